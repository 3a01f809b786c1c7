#include "quire/probe.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <vector>

namespace quire {
namespace {

using Clock = std::chrono::steady_clock;

int64_t ns_since(Clock::time_point start) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start).count();
}

struct Job {
  int num_threads;
  int64_t task_ns;
  // Plain memory: that each task runs once, and that its writes are seen after `run`, is what is probed.
  std::vector<int64_t> counts;
  std::vector<int> threads;
};

void run_task(void* context, int64_t task, int thread) {
  Job& job = *static_cast<Job*>(context);
  ++job.counts[task];
  job.threads[task] = thread;
  if (job.task_ns == 0) return;
  const Clock::time_point start = Clock::now();
  while (ns_since(start) < job.task_ns) {
  }
}

}  // namespace

ProbeResult probe_pool(Pool& pool, int64_t num_runs, int64_t num_tasks, int64_t task_ns, int64_t pause_us) {
  Job job{pool.num_threads(), task_ns, std::vector<int64_t>(num_tasks), std::vector<int>(num_tasks)};
  std::vector<int64_t> times(num_runs);
  ProbeResult result{0, 0, 0, 0};
  for (int64_t run = 0; run < num_runs; ++run) {
    if (pause_us > 0) std::this_thread::sleep_for(std::chrono::microseconds(pause_us));
    const Clock::time_point start = Clock::now();
    pool.run(num_tasks, run_task, &job);
    times[run] = ns_since(start);
    for (int64_t task = 0; task < num_tasks; ++task) {
      const bool is_right = job.counts[task] == run + 1 && job.threads[task] >= 0 && job.threads[task] < job.num_threads;
      result.num_wrong += !is_right;
      result.num_by_others += job.threads[task] > 0;
    }
  }
  std::sort(times.begin(), times.end());
  if (num_runs > 0) {
    result.median_ns = times[num_runs / 2];
    result.max_ns = times.back();
  }
  return result;
}

}  // namespace quire
