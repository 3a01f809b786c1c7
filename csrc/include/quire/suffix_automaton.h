// A suffix automaton over sequences of tokens (Blumer et al. 1985), built a token at a time, that counts how often each
// context was continued in which way (the frequencies of SuffixDecoding, Oliaro et al. 2024, section 3).
//
// A state stands for all strings that end at the same places. A context is the last tokens of a sequence, at most
// `max_context` of them; the counts of longer strings are not kept, which bounds the work of an append: at most
// `max_context` + 1 states are counted, and all else is constant on average over a sequence.
#pragma once

#include <cstdint>

#include "quire/edge_table.h"
#include "quire/paged.h"

namespace quire {

struct SuffixState {
  int32_t length;     // of its longest string
  int32_t link;       // the state of the longest suffix that ends at more places; kNone = this is the root
  int32_t count;      // places where its strings end
  int32_t first_end;  // label of the first of them
  int32_t last_end;   // label of the last of them
  int32_t token;      // its most frequent continuation, of equals the latest; kNone = it is never continued
  int32_t child;      // the state that `token` leads to
  int32_t others;     // token of its first edge in the table; kNone = it has no edge but (token, child)
};

// A string in an automaton: the suffix of `length` tokens of those that led there.
struct SuffixCursor {
  int32_t state = 0;
  int32_t length = 0;
};

class SuffixAutomaton {
 public:
  // max_context: 1 to 1024 tokens. num_lookups: grows by the edges and links that are followed, a measure of work that
  // does not depend on the machine; must live as long.
  SuffixAutomaton(int32_t max_context, int64_t* num_lookups);

  // The next token is the first of another sequence.
  void begin_sequence();

  // token: 0 or more. label: of this place, for `first_end` and `last_end`.
  void append(int32_t token, int32_t label);

  const SuffixState& operator[](int32_t state) const { return states_[state]; }

  // The longest context of the sequence's end.
  SuffixCursor context() const { return cut(context_); }

  // The longest suffix of the cursor's string and `token` that occurs here, at most `max_context` tokens of it.
  SuffixCursor advance(SuffixCursor cursor, int32_t token);

  // The same string, or its last `length` tokens. Needed before a cursor is used that was made before an append.
  SuffixCursor cut(SuffixCursor cursor, int32_t length) const;
  SuffixCursor cut(SuffixCursor cursor) const { return cut(cursor, max_context_); }

  int64_t num_bytes() const { return states_.num_bytes() + edges_.num_bytes(); }

 private:
  int32_t child(int32_t state, int32_t token);
  void add_edge(int32_t state, int32_t token, int32_t child);
  void redirect(int32_t state, int32_t token, int32_t from, int32_t to);
  int32_t extend(int32_t token, int32_t label);
  int32_t split(int32_t parent, int32_t token, int32_t child);
  void count(SuffixCursor before, SuffixCursor after, int32_t token, int32_t label);

  int32_t max_context_;
  Paged<SuffixState, 9> states_;
  EdgeTable edges_;
  int32_t last_ = 0;      // the state of the whole sequence
  SuffixCursor context_;  // its last `max_context_` + 1 tokens: what is counted
  int64_t* num_lookups_;
};

}  // namespace quire
