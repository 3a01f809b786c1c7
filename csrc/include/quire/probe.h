// Jobs that do nothing useful: what tests and benchmarks of the pool run on it.
#pragma once

#include <cstdint>

#include "quire/pool.h"

namespace quire {

struct ProbeResult {
  int64_t num_wrong;    // tasks that did not run exactly once, or ran as a thread that there is not
  int64_t median_ns;    // of one run
  int64_t max_ns;
  int64_t num_by_others;  // tasks that workers ran, not the caller
};

// Runs `num_runs` jobs of `num_tasks` tasks, each of which reads the clock until `task_ns` have passed (0: never).
// The caller pauses for `pause_us` between jobs.
ProbeResult probe_pool(Pool& pool, int64_t num_runs, int64_t num_tasks, int64_t task_ns, int64_t pause_us);

}  // namespace quire
