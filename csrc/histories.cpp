#include "quire/histories.h"

#include <algorithm>
#include <stdexcept>

namespace quire {
namespace {

// A row that had drafts in the last step has at most so many new tokens: they are indexed whatever the limit says.
constexpr int32_t kSteady = 32;

// How often the strings of a state were continued; the one place where the text ends does not count.
int32_t num_continued(const SuffixState& state, int32_t newest) {
  return state.count - (state.last_end == newest ? 1 : 0);
}

}  // namespace

const char* find_fault(const HistoryRows& rows, const DraftArrays& drafts) {
  int64_t most = 0;
  for (int64_t i = 0; i < rows.num_rows; ++i) {
    if (rows.rows[i] < 0 || rows.rows[i] >= rows.max_num_seqs) return "a row is outside of token_ids";
    if (rows.num_tokens[i] < 1 || rows.num_tokens[i] > rows.max_model_len) return "num_tokens is outside of token_ids";
    if (rows.max_tokens[i] < 0) return "max_tokens is negative";
    most += rows.max_tokens[i];
  }
  return most > drafts.capacity ? "max_tokens are more than there is room for" : nullptr;
}

Histories::Histories(const HistoryLimits& limits)
    : limits_(limits), store_(limits.max_context, limits.max_store_bytes, limits.max_store_answers, &num_lookups_) {}

void Histories::begin(int64_t handle, const std::string& key) {
  History& history = histories_[handle];
  if (limits_.max_store_answers > 0 && history.answers == nullptr) history.answers = store_.open(key);
}

void Histories::end(int64_t handle, const int32_t* answer, int64_t num_tokens) {
  const auto found = histories_.find(handle);
  if (found == histories_.end()) return;
  std::shared_ptr<Answers> answers = std::move(found->second.answers);
  histories_.erase(found);
  if (answers == nullptr) return;
  store_.add(*answers, answer, num_tokens);
  store_.close(answers);
}

void Histories::append(History& history, const int32_t* token_ids, int32_t num_tokens) {
  for (int32_t i = 0; i < num_tokens; ++i) {
    if (token_ids[i] < 0) throw std::invalid_argument("a token id is negative");
    history.index->append(token_ids[i], history.num_tokens++);
    history.newest = token_ids[i];
  }
  num_indexed_ += num_tokens;
}

// Index what a row has that its history lacks: a few tokens always, of many at most `max_tokens`, which become fewer.
// Null when that is not all of them.
Histories::History* Histories::catch_up(const HistoryRows& rows, int64_t i, int64_t& max_tokens) {
  const int32_t* token_ids = rows.token_ids + rows.rows[i] * rows.max_model_len;
  History& history = histories_[rows.handles[i]];
  const int32_t known = history.num_tokens;
  const bool is_same = known <= rows.num_tokens[i] && (known == 0 || token_ids[known - 1] == history.newest);
  if (history.index == nullptr || !is_same) {
    history.index = std::make_unique<SuffixAutomaton>(limits_.max_context, &num_lookups_);
    history.num_tokens = history.num_followed = 0;
    history.epoch = kNone;
  }
  int32_t num_new = rows.num_tokens[i] - history.num_tokens;
  if (num_new > kSteady) {
    num_new = static_cast<int32_t>(std::min<int64_t>(num_new, max_tokens));
    max_tokens -= num_new;
  }
  append(history, token_ids + history.num_tokens, num_new);
  return history.num_tokens == rows.num_tokens[i] ? &history : nullptr;
}

void Histories::propose_ngram(const HistoryRows& rows, const NgramRule& rule, const DraftArrays& drafts) {
  int64_t max_tokens = limits_.max_indexed_tokens, num_drafts = 0;
  for (int64_t i = 0; i < rows.num_rows; ++i) {
    drafts.counts[i] = drafts.match_lengths[i] = 0;
    const History* history = catch_up(rows, i, max_tokens);
    if (history == nullptr) continue;
    const SuffixAutomaton& index = *history->index;
    const int32_t num_tokens = rows.num_tokens[i];
    SuffixCursor match = index.cut(index.context(), rule.max_length);
    if (index[match.state].first_end == num_tokens - 1) {  // it occurs only here: the longest that occurs before
      match.state = index[match.state].link;
      match.length = index[match.state].length;
    }
    if (match.length < rule.min_length) continue;
    const int32_t start = index[match.state].first_end + 1;
    const int32_t count = std::min(rows.max_tokens[i], num_tokens - start);
    const int32_t* source = rows.token_ids + rows.rows[i] * rows.max_model_len + start;
    for (int32_t j = 0; j < count; ++j) {
      drafts.token_ids[num_drafts] = source[j];
      drafts.scores[num_drafts++] = static_cast<float>((match.length + j + 1.0) / (match.length + j + 2.0));
    }
    drafts.counts[i] = count;
    drafts.match_lengths[i] = match.length;
  }
}

// Move the cursor to the end of the text, in the index of the namespace as it is now.
void Histories::follow(History& history, const int32_t* token_ids, int32_t num_tokens) {
  if (history.epoch != history.answers->epoch) {
    history.epoch = history.answers->epoch;
    history.cursor = {};
    history.num_followed = std::max(0, num_tokens - limits_.max_context);
  }
  SuffixAutomaton& index = *history.answers->index;
  for (; history.num_followed < num_tokens; ++history.num_followed) {
    history.cursor = index.advance(history.cursor, token_ids[history.num_followed]);
  }
  history.cursor = index.cut(history.cursor);
}

void Histories::propose_suffix(const HistoryRows& rows, const SuffixRule& rule, const DraftArrays& drafts) {
  int64_t max_tokens = limits_.max_indexed_tokens, num_drafts = 0;
  complete_.clear();
  for (int64_t i = 0; i < rows.num_rows; ++i) complete_.push_back(catch_up(rows, i, max_tokens));
  max_tokens = limits_.max_indexed_tokens;
  for (int64_t i = 0; i < rows.num_rows; ++i) {
    best_.clear();
    if (complete_[i] != nullptr) {
      const int32_t* token_ids = rows.token_ids + rows.rows[i] * rows.max_model_len;
      search_all(*complete_[i], token_ids, rows.num_tokens[i], rule, rows.max_tokens[i], max_tokens);
    }
    drafts.counts[i] = static_cast<int32_t>(best_.token_ids.size());
    drafts.match_lengths[i] = best_.match_length;
    std::copy(best_.token_ids.begin(), best_.token_ids.end(), drafts.token_ids + num_drafts);
    std::copy(best_.scores.begin(), best_.scores.end(), drafts.scores + num_drafts);
    num_drafts += drafts.counts[i];
  }
}

// The best draft of a request, of its own text and of its namespace, of which at most `max_tokens` are indexed first.
void Histories::search_all(History& history, const int32_t* token_ids, int32_t num_tokens, const SuffixRule& rule,
                           int32_t most, int64_t& max_tokens) {
  search(*history.index, history.index->context(), rule, most, num_tokens - 1);
  if (history.answers == nullptr) return;
  Answers& answers = *history.answers;
  max_tokens -= store_.index(answers, max_tokens);
  if (answers.index == nullptr) return;
  follow(history, token_ids, num_tokens);
  const double own_score = best_.score;
  search(*answers.index, history.cursor, rule, most, kNone);
  if (best_.score > own_score) store_.note_used(answers, best_.label);
}

// A better draft than the best one, if a suffix of the cursor's string has one. Shorter suffixes are allowed fewer
// tokens: once the best one's score is out of reach the search ends, and of equals the longest match wins.
void Histories::search(const SuffixAutomaton& index, SuffixCursor cursor, const SuffixRule& rule, int32_t most,
                       int32_t newest) {
  for (; cursor.state != 0; cursor.state = index[cursor.state].link) {
    const SuffixState& state = index[cursor.state];
    cursor.length = std::min(cursor.length, state.length);
    const int32_t allowed = static_cast<int32_t>(std::min<double>(most, cursor.length * rule.max_spec_factor + 1e-6));
    if (allowed <= best_.score) return;
    walk(index, cursor, rule, allowed, newest);
    if (tried_.score <= best_.score) continue;
    std::swap(best_, tried_);
    best_.match_length = cursor.length;
    best_.label = state.last_end;
  }
}

// The most frequent continuation, then that of the string so far, while the draft is likely enough.
void Histories::walk(const SuffixAutomaton& index, SuffixCursor cursor, const SuffixRule& rule, int32_t most,
                     int32_t newest) {
  tried_.clear();
  double chance = 1;  // that all drafts so far stand
  for (int32_t i = 0; i < most; ++i) {
    ++num_lookups_;
    const SuffixState& state = index[cursor.state];
    if (state.token == kNone) return;
    const double share = static_cast<double>(index[state.child].count) / num_continued(state, newest);
    chance *= share;
    if (chance < rule.min_token_prob) return;
    tried_.token_ids.push_back(state.token);
    tried_.scores.push_back(static_cast<float>(share));
    tried_.score += chance;
    cursor = index.cut({state.child, cursor.length + 1});
  }
}

HistoryStats Histories::stats() const {
  HistoryStats stats{};
  for (const auto& [handle, history] : histories_) {
    if (history.index != nullptr) stats.num_request_bytes += history.index->num_bytes();
  }
  stats.num_requests = static_cast<int64_t>(histories_.size());
  stats.num_indexed_tokens = num_indexed_;
  stats.num_lookups = num_lookups_;
  stats.num_store_bytes = store_.num_bytes();
  stats.num_store_answers = store_.num_answers();
  stats.num_store_evictions = store_.num_evicted();
  stats.num_store_namespaces = store_.num_namespaces();
  return stats;
}

}  // namespace quire
