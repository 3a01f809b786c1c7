#include "quire/pool.h"

#include <pthread.h>
#include <sched.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>
#include <vector>

#include "quire/memory.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace quire {
namespace {

inline void cpu_relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Subnormal floats count as zero while this lives: the tile unit treats them so, hence every tier does.
class FlushSubnormals {
 public:
#if defined(__x86_64__)
  FlushSubnormals() : saved_(_mm_getcsr()) { _mm_setcsr(saved_ | 0x8040); }
  ~FlushSubnormals() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#elif defined(__aarch64__)
  FlushSubnormals() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" ::"r"(saved_ | (uint64_t{1} << 24)));
  }
  ~FlushSubnormals() { asm volatile("msr fpcr, %0" ::"r"(saved_)); }

 private:
  uint64_t saved_;
#endif
};

struct Buffer {
  void* address = nullptr;
  int64_t bytes = 0;

  ~Buffer() { unmap_huge(address, bytes); }
  void* at_least(int64_t wanted) {
    if (wanted > bytes) {
      unmap_huge(address, bytes);
      bytes = 0;
      address = map_huge(wanted);
      if (address == nullptr) std::terminate();  // a few MiB that the memory plan counted are not there
      bytes = wanted;
    }
    return address;
  }
};

// A job is open while tasks are handed out. A worker enters an open job once; one that is late misses it, so that the
// caller never waits for a thread that the operating system does not run.
constexpr uint64_t kOpen = uint64_t{1} << 15;
constexpr uint64_t kEnteredMask = kOpen - 1;
constexpr int kGenerationShift = 16;
constexpr int kSpinsPerClockRead = 64;
constexpr int64_t kWaitBeforeYieldUs = 200;

}  // namespace

struct Pool::State {
  std::recursive_mutex callers;
  alignas(64) std::atomic<uint64_t> gate{0};  // generation << 16 | open | workers that entered
  alignas(64) std::atomic<int64_t> next{0};
  alignas(64) std::atomic<uint64_t> left{0};  // workers that entered this job and are done
  TaskFn fn = nullptr;
  void* context = nullptr;
  int64_t num_tasks = 0;

  std::mutex sleep_mutex;
  std::condition_variable wake;
  std::atomic<int> num_asleep{0};
  std::atomic<bool> is_stopping{false};
  int64_t spin_us = 0;

  std::vector<std::thread> threads;
  std::vector<Buffer> scratch;
  Buffer shared;

  void work(int thread) {
    FlushSubnormals flush;
    for (;;) {
      const int64_t task = next.fetch_add(1, std::memory_order_relaxed);
      if (task >= num_tasks) return;
      fn(context, task, thread);
    }
  }

  // True when a job newer than `seen` was entered.
  bool try_enter(uint64_t& seen) {
    uint64_t now = gate.load(std::memory_order_acquire);
    while ((now & kOpen) != 0 && (now >> kGenerationShift) != seen) {
      if (gate.compare_exchange_weak(now, now + 1, std::memory_order_acquire)) {
        seen = now >> kGenerationShift;
        return true;
      }
    }
    return false;
  }

  bool is_open() const { return (gate.load() & kOpen) != 0; }

  void sleep(uint64_t seen) {
    std::unique_lock<std::mutex> held(sleep_mutex);
    num_asleep.fetch_add(1);
    wake.wait(held, [&] { return is_stopping.load() || (is_open() && (gate.load() >> kGenerationShift) != seen); });
    num_asleep.fetch_sub(1);
  }

  void worker(int thread) {
    using clock = std::chrono::steady_clock;
    uint64_t seen = 0;
    auto idle_since = clock::now();
    int spins = 0;
    while (!is_stopping.load(std::memory_order_relaxed)) {
      if (try_enter(seen)) {
        work(thread);
        left.fetch_add(1, std::memory_order_release);
        idle_since = clock::now();
        spins = 0;
        continue;
      }
      cpu_relax();
      if (++spins % kSpinsPerClockRead != 0) continue;
      if (clock::now() - idle_since > std::chrono::microseconds(spin_us)) {
        sleep(seen);
        idle_since = clock::now();
      }
    }
  }

  void wait_for(uint64_t entered) {
    using clock = std::chrono::steady_clock;
    clock::time_point started{};
    for (int spins = 1; left.load(std::memory_order_acquire) != entered; ++spins) {
      cpu_relax();
      if (spins % kSpinsPerClockRead != 0) continue;
      if (started == clock::time_point{}) started = clock::now();
      if (clock::now() - started > std::chrono::microseconds(kWaitBeforeYieldUs)) sched_yield();
    }
  }
};

Pool::Pool(int num_threads, const int* cpus, int64_t spin_us) : state_(new State), num_threads_(num_threads) {
  state_->spin_us = spin_us;
  state_->scratch = std::vector<Buffer>(num_threads);
  for (int thread = 1; thread < num_threads; ++thread) {
    state_->threads.emplace_back([this, thread] { state_->worker(thread); });
#if defined(__linux__)
    pthread_setname_np(state_->threads.back().native_handle(), "quire-compute");
    if (cpus != nullptr) {
      cpu_set_t set;
      CPU_ZERO(&set);
      CPU_SET(cpus[thread], &set);
      pthread_setaffinity_np(state_->threads.back().native_handle(), sizeof(set), &set);
    }
#else
    (void)cpus;
#endif
  }
}

Pool::~Pool() {
  {
    std::lock_guard<std::mutex> held(state_->sleep_mutex);
    state_->is_stopping.store(true);
  }
  state_->wake.notify_all();
  for (std::thread& thread : state_->threads) thread.join();
  delete state_;
}

void Pool::run(int64_t num_tasks, TaskFn fn, void* context) {
  if (num_tasks <= 0) return;
  std::lock_guard<std::recursive_mutex> held(state_->callers);
  State& state = *state_;
  if (num_threads_ == 1 || num_tasks == 1) {
    FlushSubnormals flush;
    for (int64_t task = 0; task < num_tasks; ++task) fn(context, task, 0);
    return;
  }
  state.fn = fn;
  state.context = context;
  state.num_tasks = num_tasks;
  state.next.store(0, std::memory_order_relaxed);
  state.left.store(0, std::memory_order_relaxed);
  const uint64_t generation = (state.gate.load() >> kGenerationShift) + 1;
  state.gate.store(generation << kGenerationShift | kOpen);
  if (state.num_asleep.load() > 0) {
    std::lock_guard<std::mutex> sleepers(state.sleep_mutex);
    state.wake.notify_all();
  }
  state.work(0);
  const uint64_t closed = state.gate.fetch_and(~kOpen);
  state.wait_for(closed & kEnteredMask);
}

void* Pool::scratch(int thread, int64_t bytes) { return state_->scratch[thread].at_least(bytes); }
void* Pool::shared_scratch(int64_t bytes) { return state_->shared.at_least(bytes); }
void Pool::lock() { state_->callers.lock(); }
void Pool::unlock() { state_->callers.unlock(); }

}  // namespace quire
