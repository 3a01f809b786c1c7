#include "bindings/step_graph.h"

namespace quire {

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
}

}  // namespace quire
