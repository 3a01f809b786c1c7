#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <string>
#include <vector>

#include "bindings/bindings.h"
#include "quire/checksum.h"
#include "quire/memory.h"

namespace quire {

void bind_runtime(nb::module_& m) {
  nb::class_<Pool>(m, "Pool")
      .def("__init__",
           [](Pool* self, int num_threads, const std::vector<int>& cpus, int64_t spin_us) {
             new (self) Pool(num_threads, cpus.empty() ? nullptr : cpus.data(), spin_us);
           },
           nb::arg("num_threads"), nb::arg("cpus"), nb::arg("spin_us"))
      .def_prop_ro("num_threads", &Pool::num_threads);
  m.def("tier_names", [] {
    std::vector<std::string> names;
    for (int i = 0; i < num_tiers; ++i) names.emplace_back(tiers[i].name);
    return names;
  });
  m.def("is_tier_supported", [](int tier) { return tier_at(tier).is_supported(); });
  m.def("self_test", [](int tier, int64_t timeout_ms, int fault) {
    nb::gil_scoped_release release;
    return self_test(tier, timeout_ms, static_cast<Fault>(fault));
  });
  m.def("map_huge", [](int64_t bytes) { return reinterpret_cast<uintptr_t>(map_huge(bytes)); });
  m.def("checksum", [](Pool& pool, uintptr_t address, int64_t bytes) {
    nb::gil_scoped_release release;
    return checksum(pool, at<void>(address), bytes);
  });
  m.def("unmap_huge", [](uintptr_t address, int64_t bytes) { unmap_huge(at<void>(address), bytes); });
}

}  // namespace quire
