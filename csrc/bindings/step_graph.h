// A step as a list of kernel calls: noted while they run for the first time, run again by one call.
#pragma once

#include <functional>
#include <vector>

#include "bindings/bindings.h"
#include "quire/attention.h"

namespace quire {

// What is wrong with the indices that a kernel would follow, or null.
template <class Args>
auto fault_of(const Args& args, int) -> decltype(find_fault(args)) {
  return find_fault(args);
}
template <class Args>
const char* fault_of(const Args&, long) {
  return nullptr;
}

template <class Args>
const char* run_checked(void (*kernel)(Pool&, const Args&), Pool& pool, const Args& args) {
  const char* fault = fault_of(args, 0);
  if (fault == nullptr) kernel(pool, args);
  return fault;
}

// Addresses are kept as they were: whoever replays keeps that memory alive, and puts new inputs where the old ones were.
class StepGraph {
 public:
  // The graph that notes the calls of this thread, or null.
  static StepGraph*& recording() {
    thread_local StepGraph* graph = nullptr;
    return graph;
  }

  template <class Args>
  void add(void (*kernel)(Pool&, const Args&), const Args& args) {
    calls_.emplace_back([kernel, args](Pool& pool) { return run_checked(kernel, pool, args); });
  }

  int64_t num_calls() const { return static_cast<int64_t>(calls_.size()); }

  // Null, or what is wrong with a call; those after it have not run.
  const char* replay(Pool& pool) const {
    for (const auto& call : calls_) {
      if (const char* fault = call(pool)) return fault;
    }
    return nullptr;
  }

 private:
  std::vector<std::function<const char*(Pool&)>> calls_;
};

// What the passes of a chain leave and read, one line of tokens for each pass; [num_passes, stride], of which the first
// num_rows count.
struct ChainTokens {
  int64_t num_rows;
  int64_t stride;
  const int32_t* token_ids;  // what each pass gives; -1 = none
  const float* logprobs;     // beside token_ids
  int64_t* inputs;           // what each pass but the first computes
  const int32_t* most;       // [num_rows]; tokens that each row wants; 0 = none
  float least_chance;        // a row ends with a token whose chance, the product of those up to it, is less
};

// Pass after pass, each with the tokens that the one before it gave, until all rows have ended; returns how many passes
// have run. What is wrong with a call is left in `fault`.
int64_t replay_chain(const std::vector<const StepGraph*>& passes, Pool& pool, const ChainTokens& tokens,
                     const char*& fault);

// Runs a kernel that a step consists of, and notes it where a graph is being recorded.
template <class Args>
const char* run_noted(void (*kernel)(Pool&, const Args&), Pool& pool, const Args& args) {
  if (StepGraph* graph = StepGraph::recording()) graph->add(kernel, args);
  nb::gil_scoped_release release;
  return run_checked(kernel, pool, args);
}

}  // namespace quire
