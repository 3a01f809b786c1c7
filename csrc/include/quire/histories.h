// Drafts from history: what followed the end of a request's text when that text occurred before, in the request itself
// or in past answers of its namespace. Host code, compiled once; one call serves all rows of a step.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "quire/answer_store.h"
#include "quire/suffix_automaton.h"

namespace quire {

struct HistoryLimits {
  int32_t max_context;         // tokens, 1 to 1024
  int64_t max_indexed_tokens;  // of long texts in a call, of requests and of answers each; at least 1
  int64_t max_store_bytes;
  int64_t max_store_answers;   // 0 = there is no store
};

// Rows that ask for drafts. Row i of `token_ids` has `max_model_len` places.
struct HistoryRows {
  const int64_t* rows;        // [num_rows] into token_ids
  const int64_t* handles;     // [num_rows] of their requests
  const int32_t* num_tokens;  // [num_rows]
  const int32_t* max_tokens;  // [num_rows] most drafts
  const int32_t* token_ids;   // [max_num_seqs, max_model_len]
  int64_t num_rows, max_num_seqs, max_model_len;
};

// Where drafts go, those of a row behind those of the row before.
struct DraftArrays {
  int32_t* counts;         // [num_rows]
  int32_t* match_lengths;  // [num_rows]
  int32_t* token_ids;      // [capacity]
  float* scores;           // [capacity]
  int64_t capacity;        // at least the sum of max_tokens
};

struct NgramRule {
  int32_t min_length, max_length;  // 1 to max_context
};

struct SuffixRule {
  double max_spec_factor;  // drafts per token of the match
  double min_token_prob;   // of a draft and all before it
};

struct HistoryStats {
  int64_t num_requests, num_request_bytes, num_indexed_tokens, num_lookups;
  int64_t num_store_bytes, num_store_answers, num_store_evictions, num_store_namespaces;
};

// What is wrong with the rows, or null.
const char* find_fault(const HistoryRows& rows, const DraftArrays& drafts);

class Histories {
 public:
  explicit Histories(const HistoryLimits& limits);
  Histories(const Histories&) = delete;
  Histories& operator=(const Histories&) = delete;

  // A request arrived; its answer will be kept in the namespace of `key`, and drafts may come from there. A request
  // that was not announced has its own text alone.
  void begin(int64_t handle, const std::string& key);

  // Drafts by prompt lookup: what follows the first occurrence of the longest n-gram that ends the text.
  void propose_ngram(const HistoryRows& rows, const NgramRule& rule, const DraftArrays& drafts);

  // Drafts by frequency. Both throw std::invalid_argument for a negative token.
  void propose_suffix(const HistoryRows& rows, const SuffixRule& rule, const DraftArrays& drafts);

  // A request ended with this answer; unknown handles are ignored.
  void end(int64_t handle, const int32_t* answer, int64_t num_tokens);

  HistoryStats stats() const;

 private:
  struct History {
    std::unique_ptr<SuffixAutomaton> index;  // null = nothing is indexed
    int32_t num_tokens = 0;                  // indexed
    int32_t newest = kNone;                  // the last of them
    std::shared_ptr<Answers> answers;        // null = it has no namespace
    SuffixCursor cursor;                     // the end of its text in the index of `answers`
    int64_t epoch = kNone;                   // of that index
    int32_t num_followed = 0;                // tokens of its text that led to the cursor
  };
  struct Draft {
    std::vector<int32_t> token_ids;
    std::vector<float> scores;
    double score = 0;  // expected number of tokens that stand
    int32_t match_length = 0;
    int32_t label = kNone;  // of the match's last occurrence

    void clear() {
      token_ids.clear();
      scores.clear();
      score = match_length = 0;
    }
  };

  History* catch_up(const HistoryRows& rows, int64_t i, int64_t& max_tokens);
  void append(History& history, const int32_t* token_ids, int32_t num_tokens);
  void follow(History& history, const int32_t* token_ids, int32_t num_tokens);
  void search_all(History& history, const int32_t* token_ids, int32_t num_tokens, const SuffixRule& rule, int32_t most,
                  int64_t& max_tokens);
  void search(const SuffixAutomaton& index, SuffixCursor cursor, const SuffixRule& rule, int32_t most, int32_t newest);
  void walk(const SuffixAutomaton& index, SuffixCursor cursor, const SuffixRule& rule, int32_t most, int32_t newest);

  HistoryLimits limits_;
  AnswerStore store_;
  std::unordered_map<int64_t, History> histories_;
  Draft best_, tried_;              // of the row in hand
  std::vector<History*> complete_;  // by row of a call; null = its text is not indexed to the end
  int64_t num_indexed_ = 0, num_lookups_ = 0;
};

}  // namespace quire
