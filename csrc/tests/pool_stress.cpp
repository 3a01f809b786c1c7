// The thread pool as ThreadSanitizer sees it: jobs of every size, sleepers, several callers, shared memory, pools that
// end. Prints the number of checks; a race ends it with the sanitizer's exit code.
#include <cstdint>
#include <cstdio>
#include <thread>
#include <vector>

#include "quire/checksum.h"
#include "quire/pool.h"
#include "quire/probe.h"

namespace {

using quire::Pool;

// A two-step kernel as attention and sampling are: tasks write shared memory, later tasks read all of it.
struct Sums {
  Pool* pool;
  int64_t* shared;
  int64_t num_tasks;
  int64_t total;
};

bool share_memory(Pool& pool, int64_t num_tasks) {
  pool.lock();
  Sums sums{&pool, static_cast<int64_t*>(pool.shared_scratch(num_tasks * 8)), num_tasks, 0};
  pool.run(
      num_tasks,
      [](void* context, int64_t task, int thread) {
        Sums& s = *static_cast<Sums*>(context);
        auto* own = static_cast<int64_t*>(s.pool->scratch(thread, 64));
        own[0] = task;
        s.shared[task] = own[0] + 1;
      },
      &sums);
  pool.run(
      num_tasks,
      [](void* context, int64_t task, int) {
        Sums& s = *static_cast<Sums*>(context);
        if (task != 0) return;
        for (int64_t i = 0; i < s.num_tasks; ++i) s.total += s.shared[i];
      },
      &sums);
  pool.unlock();
  return sums.total == num_tasks * (num_tasks + 1) / 2;
}

}  // namespace

int main() {
  int64_t num_checks = 0, num_wrong = 0;
  const auto check = [&](bool is_right) {
    ++num_checks;
    num_wrong += !is_right;
  };
  for (const int num_threads : {1, 2, 3, 8}) {
    for (const int64_t spin_us : {0, 20, 2000}) {
      Pool pool(num_threads, nullptr, spin_us);
      for (const int64_t num_tasks : {1, 2, 7, 40}) {
        check(quire::probe_pool(pool, 300, num_tasks, 0, 0).num_wrong == 0);
        check(quire::probe_pool(pool, 20, num_tasks, 200, spin_us).num_wrong == 0);
        check(share_memory(pool, num_tasks));
      }
      const std::vector<uint8_t> bytes(3 << 20, 7);
      Pool alone(1, nullptr, 0);
      check(quire::checksum(pool, bytes.data(), bytes.size()) == quire::checksum(alone, bytes.data(), bytes.size()));
    }
  }
  Pool shared(3, nullptr, 50);
  std::vector<int64_t> wrong(4);
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 4; ++caller) {
    callers.emplace_back([&, caller] {
      wrong[caller] = quire::probe_pool(shared, 200, caller + 1, 0, 0).num_wrong;
      for (int i = 0; i < 50; ++i) wrong[caller] += !share_memory(shared, 9);
    });
  }
  for (std::thread& caller : callers) caller.join();
  for (const int64_t number : wrong) check(number == 0);
  std::printf("%lld checks, %lld wrong\n", static_cast<long long>(num_checks), static_cast<long long>(num_wrong));
  return num_wrong == 0 ? 0 : 1;
}
