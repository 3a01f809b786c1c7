#include "quire/answer_store.h"

#include <algorithm>

namespace quire {
namespace {

constexpr int64_t kEntryBytes = 160;  // about what an answer or a namespace takes in the maps, beside its tokens
constexpr int64_t kChunk = 64;        // tokens that are indexed between two looks at the limit
constexpr int64_t kReserve = 16;      // this part of the bytes is left free, for the growth of a chunk
constexpr int64_t kMostShare = 4;     // an answer is cut to what fills at most this part of the bytes,
constexpr int64_t kIndexBytes = 256;  // with so many bytes of index a token, which few texts reach

int64_t bytes_of_text(const Answer& answer) {
  return kEntryBytes + static_cast<int64_t>(answer.token_ids.size() * sizeof(int32_t));
}

}  // namespace

int64_t Answers::num_bytes() const {
  const int64_t bytes = static_cast<int64_t>(sizeof(*this) + key.size()) + kEntryBytes + text_bytes;
  return index == nullptr ? bytes : bytes + index->num_bytes();
}

AnswerStore::AnswerStore(int32_t max_context, int64_t max_bytes, int64_t max_answers, int64_t* num_lookups)
    : max_context_(max_context),
      max_bytes_(max_bytes - max_bytes / kReserve),
      max_answers_(max_answers),
      most_tokens_(max_bytes / kMostShare / kIndexBytes),
      num_lookups_(num_lookups) {}

std::shared_ptr<Answers> AnswerStore::open(const std::string& key) {
  std::shared_ptr<Answers>& answers = namespaces_[key];
  if (answers == nullptr) {
    answers = std::make_shared<Answers>();
    answers->key = key;
    num_bytes_ += answers->num_bytes();
  }
  return answers;
}

void AnswerStore::close(std::shared_ptr<Answers>& answers) {
  const bool is_last = answers.use_count() == 2;  // the map's own and this one
  if (is_last && answers->by_number.empty()) {
    num_bytes_ -= answers->num_bytes();
    namespaces_.erase(std::string(answers->key));
  }
  answers.reset();
}

void AnswerStore::add(Answers& answers, const int32_t* token_ids, int64_t num_tokens) {
  const int64_t num_kept = std::min(num_tokens, most_tokens_);
  if (num_kept <= 0 || max_answers_ <= 0) return;
  Answer& answer = answers.by_number[answers.num_arrived];
  answer.token_ids.assign(token_ids + num_tokens - num_kept, token_ids + num_tokens);
  answer.last_used = ++clock_;
  answer.place = by_use_.insert(by_use_.end(), &answers);
  const int64_t bytes = bytes_of_text(answer);
  answers.waiting.push_back(answers.num_arrived++);
  answers.text_bytes += bytes;
  num_bytes_ += bytes;
  ++num_answers_;
  evict();
}

void AnswerStore::note_used(Answers& answers, int32_t number) {
  Answer& answer = answers.by_number.at(number);
  answer.last_used = ++clock_;
  by_use_.splice(by_use_.end(), by_use_, answer.place);
}

int64_t AnswerStore::index(Answers& answers, int64_t max_tokens) {
  int64_t num_indexed = 0;
  while (num_indexed < max_tokens && (answers.indexing != kNone || !answers.waiting.empty())) {
    num_bytes_ -= answers.num_bytes();
    num_indexed += index_some(answers, std::min(max_tokens - num_indexed, kChunk));
    num_bytes_ += answers.num_bytes();
    evict();
  }
  return num_indexed;
}

// Of one answer; how many.
int64_t AnswerStore::index_some(Answers& answers, int64_t max_tokens) {
  if (answers.index == nullptr) {
    answers.index = std::make_unique<SuffixAutomaton>(max_context_, num_lookups_);
    ++answers.epoch;
  }
  if (answers.indexing == kNone) {
    answers.indexing = answers.waiting.back();
    answers.waiting.pop_back();
    answers.num_indexed = 0;
    answers.index->begin_sequence();
  }
  const std::vector<int32_t>& token_ids = answers.by_number.at(answers.indexing).token_ids;
  const size_t start = answers.num_indexed;
  const size_t end = std::min(token_ids.size(), start + static_cast<size_t>(max_tokens));
  for (size_t i = start; i < end; ++i) answers.index->append(token_ids[i], answers.indexing);
  answers.num_indexed = end;
  if (end == token_ids.size()) answers.indexing = kNone;
  return static_cast<int64_t>(end - start);
}

// While the store is over a limit, the namespace of the least recently used answer forgets half of what it has. An index
// cannot lose a single answer: it is made anew, and this often enough to be worth it.
void AnswerStore::evict() {
  while (num_answers_ > 0 && (num_bytes_ > max_bytes_ || num_answers_ > max_answers_)) {
    std::shared_ptr<Answers> victim = namespaces_.at(by_use_.front()->key);
    num_bytes_ -= victim->num_bytes();
    forget_half(*victim);
    num_bytes_ += victim->num_bytes();
    close(victim);
  }
}

// The least recently used answers, until half of the tokens are gone; the rest waits to be indexed again.
void AnswerStore::forget_half(Answers& answers) {
  std::vector<std::pair<int64_t, int32_t>> by_use;  // (last used, number)
  size_t num_tokens = 0, num_forgotten = 0;
  for (const auto& [number, answer] : answers.by_number) {
    by_use.emplace_back(answer.last_used, number);
    num_tokens += answer.token_ids.size();
  }
  std::sort(by_use.begin(), by_use.end());
  answers.index.reset();
  answers.indexing = kNone;
  answers.waiting.clear();
  for (const auto& [last_used, number] : by_use) {
    if (2 * num_forgotten >= num_tokens) {
      answers.waiting.push_back(number);
      continue;
    }
    const auto found = answers.by_number.find(number);
    num_forgotten += found->second.token_ids.size();
    answers.text_bytes -= bytes_of_text(found->second);
    by_use_.erase(found->second.place);
    answers.by_number.erase(found);
    --num_answers_;
    ++num_evicted_;
  }
}

}  // namespace quire
