// Past answers, indexed so that requests of the same namespace can be drafted from them. A namespace holds what may be
// seen together: the answers of one tenant and cache salt. Bounded in bytes and in answers.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "quire/suffix_automaton.h"

namespace quire {

struct Answers;

struct Answer {
  std::vector<int32_t> token_ids;
  int64_t last_used = 0;                // by the store's clock
  std::list<Answers*>::iterator place;  // in the store's order of use
};

// The answers of one namespace. What waits to be indexed is indexed in steps of the same namespace, the newest answer
// first and a bounded number of tokens each, so that neither a long answer nor an eviction holds up a step.
struct Answers {
  std::string key;
  std::unordered_map<int32_t, Answer> by_number;
  int32_t num_arrived = 0;                 // the number of the next one
  std::unique_ptr<SuffixAutomaton> index;  // its labels are numbers of answers; null = nothing is indexed
  int64_t epoch = 0;                       // another one for each `index`: cursors into an earlier one are void
  std::vector<int32_t> waiting;            // to be indexed, the next one last
  int32_t indexing = kNone;                // the answer that is indexed in part
  size_t num_indexed = 0;                  // tokens of it
  int64_t text_bytes = 0;                  // of `by_number` and `waiting`

  int64_t num_bytes() const;
};

class AnswerStore {
 public:
  // max_context, num_lookups: of the indices.
  AnswerStore(int32_t max_context, int64_t max_bytes, int64_t max_answers, int64_t* num_lookups);

  // The namespace of a key, until it is closed by all who opened it and has no answers.
  std::shared_ptr<Answers> open(const std::string& key);
  void close(std::shared_ptr<Answers>& answers);

  // Keeps a copy of the tokens, of very many the last ones.
  void add(Answers& answers, const int32_t* token_ids, int64_t num_tokens);

  // Indexes at most `max_tokens` of what waits; how many.
  int64_t index(Answers& answers, int64_t max_tokens);

  // The answer was the source of a draft.
  void note_used(Answers& answers, int32_t number);

  int64_t num_bytes() const { return num_bytes_; }
  int64_t num_answers() const { return num_answers_; }
  int64_t num_evicted() const { return num_evicted_; }
  int64_t num_namespaces() const { return static_cast<int64_t>(namespaces_.size()); }

 private:
  void evict();
  void forget_half(Answers& answers);
  int64_t index_some(Answers& answers, int64_t max_tokens);

  int32_t max_context_;
  int64_t max_bytes_, max_answers_, most_tokens_;
  int64_t* num_lookups_;
  std::unordered_map<std::string, std::shared_ptr<Answers>> namespaces_;
  std::list<Answers*> by_use_;  // the namespace of each answer, the least recently used answer first
  int64_t clock_ = 0, num_bytes_ = 0, num_answers_ = 0, num_evicted_ = 0;
};

}  // namespace quire
