#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <tuple>
#include <vector>

#include "bindings/bindings.h"
#include "quire/checksum.h"
#include "quire/memory.h"
#include "quire/probe.h"

namespace quire {

namespace {
constexpr int kMaxThreads = 4096;
constexpr int kMaxCpus = 1 << 16;
constexpr int64_t kMaxSpinUs = 60'000'000;
}  // namespace

void bind_runtime(nb::module_& m) {
  nb::class_<Pool>(m, "Pool")
      .def("__init__",
           [](Pool* self, int num_threads, const std::vector<int>& cpus, int64_t spin_us) {
             if (num_threads < 1 || num_threads > kMaxThreads) throw nb::value_error("number of threads");
             if (!cpus.empty() && cpus.size() != static_cast<size_t>(num_threads)) throw nb::value_error("CPUs");
             for (const int cpu : cpus) {
               if (cpu < 0 || cpu >= kMaxCpus) throw nb::value_error("number of a CPU");
             }
             if (spin_us < 0 || spin_us > kMaxSpinUs) throw nb::value_error("time to spin");
             nb::gil_scoped_release release;
             new (self) Pool(num_threads, cpus.empty() ? nullptr : cpus.data(), spin_us);
           },
           nb::arg("num_threads"), nb::arg("cpus"), nb::arg("spin_us"))
      .def_prop_ro("num_threads", &Pool::num_threads)
      .def_prop_ro("num_unbound", &Pool::num_unbound);
  // (tasks that ran wrong, median and longest time of a run in ns, tasks that workers ran)
  m.def("probe_pool", [](Pool& pool, int64_t num_runs, int64_t num_tasks, int64_t task_ns, int64_t pause_us) {
    nb::gil_scoped_release release;
    const ProbeResult result = probe_pool(pool, num_runs, num_tasks, task_ns, pause_us);
    return std::make_tuple(result.num_wrong, result.median_ns, result.max_ns, result.num_by_others);
  });
  m.def("tier_names", [] {
    std::vector<std::string> names;
    for (int i = 0; i < num_tiers; ++i) names.emplace_back(tiers[i].name);
    return names;
  });
  m.def("is_tier_supported", [](int tier) { return tier_at(tier).is_supported(); });
  m.def("self_test",
        [](int tier, int64_t timeout_ms, int fault, int idle_kernel) {
          nb::gil_scoped_release release;
          return self_test(tier, timeout_ms, static_cast<Fault>(fault), idle_kernel);
        },
        nb::arg("tier"), nb::arg("timeout_ms"), nb::arg("fault"), nb::arg("idle_kernel") = 0);
  m.def("idle_kernel_names", &idle_kernel_names);
  m.def("map_huge", [](int64_t bytes) { return reinterpret_cast<uintptr_t>(map_huge(bytes)); });
  m.def("checksum", [](Pool& pool, uintptr_t address, int64_t bytes) {
    nb::gil_scoped_release release;
    return checksum(pool, at<void>(address), bytes);
  });
  m.def("unmap_huge", [](uintptr_t address, int64_t bytes) { unmap_huge(at<void>(address), bytes); });
}

}  // namespace quire
