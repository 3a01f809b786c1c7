#include "bindings/step_graph.h"

#include <algorithm>
#include <cmath>

namespace quire {

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
      .def(nb::init<>())
      .def_prop_ro("num_calls", &StepGraph::num_calls)
      .def("begin",
           [](StepGraph& self) {
             if (StepGraph::recording() != nullptr) throw nb::value_error("another step is being recorded");
             StepGraph::recording() = &self;
           })
      .def("end", [](StepGraph&) { StepGraph::recording() = nullptr; });
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
