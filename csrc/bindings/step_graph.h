// A step as a list of kernel calls: noted when it is computed for the first time, run again by one call, with as many
// tokens as are asked for.
#pragma once

#include <cstddef>
#include <cstring>
#include <type_traits>
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

// A call, with its arguments as bytes: what differs between two recordings of a step is found there.
struct NotedCall {
  using Kernel = void (*)();

  const char* (*run)(const NotedCall&, Pool&);
  Kernel kernel;
  std::vector<std::byte> args;  // a multiple of eight; padding is zero

  template <class Args>
  static NotedCall of(void (*kernel)(Pool&, const Args&), const Args& args) {
    static_assert(std::is_trivially_copyable_v<Args> && alignof(Args) <= kWord);
    const auto run = [](const NotedCall& call, Pool& pool) {
      return run_checked(reinterpret_cast<void (*)(Pool&, const Args&)>(call.kernel), pool,
                         *reinterpret_cast<const Args*>(call.args.data()));
    };
    Args copy = args;
#if defined(__has_builtin) && __has_builtin(__builtin_clear_padding)
    __builtin_clear_padding(&copy);
#endif
    NotedCall call{run, reinterpret_cast<Kernel>(kernel), std::vector<std::byte>((sizeof(Args) + kWord - 1) / kWord * kWord)};
    std::memcpy(call.args.data(), &copy, sizeof(Args));
    return call;
  }

  static constexpr size_t kWord = sizeof(int64_t);
  size_t num_words() const { return args.size() / kWord; }
  int64_t word(size_t index) const {
    int64_t value;
    std::memcpy(&value, args.data() + index * kWord, kWord);
    return value;
  }
  void set_word(size_t index, int64_t value) { std::memcpy(args.data() + index * kWord, &value, kWord); }
};

// Addresses are kept as they were: whoever replays keeps that memory alive, and puts new inputs where the old ones were.
class StepGraph {
 public:
  // The graph that notes the calls of this thread, or null.
  static StepGraph*& recording() {
    thread_local StepGraph* graph = nullptr;
    return graph;
  }

  // Calls are noted, and run or not.
  explicit StepGraph(bool is_run = true) : is_run_(is_run) {}

  bool is_run() const { return is_run_; }

  template <class Args>
  void add(void (*kernel)(Pool&, const Args&), const Args& args) {
    calls_.push_back(NotedCall::of(kernel, args));
  }

  int64_t num_calls() const { return static_cast<int64_t>(calls_.size()); }

  // Finds the arguments that grow with the step: those that are a multiple of one of its sizes, in this recording and in
  // another one of the same step, which has other sizes. False: the two differ in anything else.
  bool learn_sizes(const std::vector<int64_t>& sizes, const StepGraph& other, const std::vector<int64_t>& other_sizes);

  // Whether a recording of these sizes is what `resize` makes of this one.
  bool predicts(const StepGraph& other, const std::vector<int64_t>& other_sizes) const;

  // Replays compute a step of these sizes from now on.
  void resize(const std::vector<int64_t>& sizes);

  // Null, or what is wrong with a call; those after it have not run.
  const char* replay(Pool& pool) const {
    for (const NotedCall& call : calls_) {
      if (const char* fault = call.run(call, pool)) return fault;
    }
    return nullptr;
  }

 private:
  // Argument `word` of a call is `factor` times a size of the step.
  struct Scaled {
    size_t call;
    size_t word;
    size_t size;
    int64_t factor;
  };

  bool makes_same_calls(const StepGraph& other) const;

  const bool is_run_;
  std::vector<NotedCall> calls_;
  std::vector<Scaled> scaled_;  // in the order of calls and words
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
  if (StepGraph* graph = StepGraph::recording()) {
    graph->add(kernel, args);
    if (!graph->is_run()) return nullptr;
  }
  nb::gil_scoped_release release;
  return run_checked(kernel, pool, args);
}

}  // namespace quire
