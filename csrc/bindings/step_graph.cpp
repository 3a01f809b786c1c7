#include "bindings/step_graph.h"

#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <optional>

namespace quire {

namespace {

// What the first of two numbers is of a size, where the second one is as much of the other size.
std::optional<int64_t> common_factor(int64_t first, int64_t size, int64_t second, int64_t other_size) {
  if (size < 1 || first % size != 0 || second != first / size * other_size) return std::nullopt;
  return first / size;
}

}  // namespace

bool StepGraph::makes_same_calls(const StepGraph& other) const {
  const auto is_same = [](const NotedCall& one, const NotedCall& two) {
    return one.run == two.run && one.kernel == two.kernel && one.args.size() == two.args.size();
  };
  return std::equal(calls_.begin(), calls_.end(), other.calls_.begin(), other.calls_.end(), is_same);
}

bool StepGraph::learn_sizes(const std::vector<int64_t>& sizes, const StepGraph& other,
                            const std::vector<int64_t>& other_sizes) {
  scaled_.clear();
  if (sizes.size() != other_sizes.size() || !makes_same_calls(other)) return false;
  for (size_t call = 0; call < calls_.size(); ++call) {
    for (size_t word = 0; word < calls_[call].num_words(); ++word) {
      const int64_t here = calls_[call].word(word), there = other.calls_[call].word(word);
      if (here == there) continue;
      std::optional<int64_t> factor;
      for (size_t size = 0; size < sizes.size() && !factor; ++size) {
        factor = common_factor(here, sizes[size], there, other_sizes[size]);
        if (factor) scaled_.push_back({call, word, size, *factor});
      }
      if (!factor) return false;
    }
  }
  return true;
}

bool StepGraph::predicts(const StepGraph& other, const std::vector<int64_t>& other_sizes) const {
  if (!makes_same_calls(other)) return false;
  auto next = scaled_.begin();
  for (size_t call = 0; call < calls_.size(); ++call) {
    for (size_t word = 0; word < calls_[call].num_words(); ++word) {
      int64_t expected = calls_[call].word(word);
      if (next != scaled_.end() && next->call == call && next->word == word) {
        if (next->size >= other_sizes.size()) return false;
        expected = next->factor * other_sizes[next->size];
        ++next;
      }
      if (other.calls_[call].word(word) != expected) return false;
    }
  }
  return true;
}

void StepGraph::resize(const std::vector<int64_t>& sizes) {
  for (const Scaled& one : scaled_) calls_[one.call].set_word(one.word, one.factor * sizes.at(one.size));
}

int64_t replay_chain(const std::vector<const StepGraph*>& passes, Pool& pool, const ChainTokens& tokens,
                     const char*& fault) {
  std::vector<float> chances(tokens.num_rows, 1.0f);
  for (size_t pass = 0; pass < passes.size(); ++pass) {
    fault = passes[pass]->replay(pool);
    if (fault != nullptr) return static_cast<int64_t>(pass);
    bool goes_on = false;
    const int64_t first = static_cast<int64_t>(pass) * tokens.stride;
    for (int64_t row = 0; row < tokens.num_rows; ++row) {
      const int32_t id = tokens.token_ids[first + row];
      // NaN is not at least anything.
      chances[row] = id < 0 ? -1.0f : chances[row] * std::min(std::exp(tokens.logprobs[first + row]), 1.0f);
      goes_on |= chances[row] >= tokens.least_chance && static_cast<int64_t>(pass) + 1 < tokens.most[row];
      if (pass + 1 < passes.size()) tokens.inputs[first + tokens.stride + row] = std::max(id, 0);
    }
    if (!goes_on) return static_cast<int64_t>(pass) + 1;
  }
  return static_cast<int64_t>(passes.size());
}

void bind_step_graph(nb::module_& m) {
  nb::class_<StepGraph>(m, "StepGraph")
      .def(nb::init<bool>(), nb::arg("is_run") = true)
      .def_prop_ro("num_calls", &StepGraph::num_calls)
      .def("begin",
           [](StepGraph& self) {
             if (StepGraph::recording() != nullptr) throw nb::value_error("another step is being recorded");
             StepGraph::recording() = &self;
           })
      .def("end", [](StepGraph&) { StepGraph::recording() = nullptr; })
      .def("learn_sizes", &StepGraph::learn_sizes)
      .def("predicts", &StepGraph::predicts)
      .def("resize", &StepGraph::resize);
  m.def("replay_step", [](const StepGraph& graph, Pool& pool) {
    nb::gil_scoped_release release;
    return graph.replay(pool);
  });
  // (passes that ran, what is wrong with a call or None)
  m.def("replay_chain", [](const nb::list& graphs, Pool& pool, int64_t num_rows, int64_t stride, uintptr_t token_ids,
                           uintptr_t logprobs, uintptr_t inputs, uintptr_t most, float least_chance) {
    std::vector<const StepGraph*> passes;
    for (nb::handle graph : graphs) passes.push_back(nb::cast<const StepGraph*>(graph));
    const ChainTokens tokens{num_rows, stride, at<int32_t>(token_ids), at<float>(logprobs), at<int64_t>(inputs),
                             at<int32_t>(most), least_chance};
    const char* fault = nullptr;
    int64_t num_run = 0;
    {
      nb::gil_scoped_release release;
      num_run = replay_chain(passes, pool, tokens, fault);
    }
    return nb::make_tuple(num_run, fault == nullptr ? nb::none() : nb::object(nb::str(fault)));
  });
}

}  // namespace quire
