#include "quire/pool.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <csignal>
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

// While this lives, floats round to nearest and subnormal ones count as zero: the tile unit does so whatever the mode of
// its thread, hence every tier does.
class FloatMode {
 public:
#if defined(__x86_64__)
  FloatMode() : saved_(_mm_getcsr()) { _mm_setcsr(0x1f80 | 0x8040); }
  ~FloatMode() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#elif defined(__aarch64__)
  FloatMode() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" ::"r"(uint64_t{1} << 24));
  }
  ~FloatMode() { asm volatile("msr fpcr, %0" ::"r"(saved_)); }

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
// The next kernel of a step comes sooner than this. Who waits longer lets other threads of the machine go first.
constexpr std::chrono::microseconds kPolite{50};

using Clock = std::chrono::steady_clock;

// Signals are for the threads of Python; the handlers of crashes still run where the crash is.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    for (const int number : {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGABRT, SIGTRAP, SIGSYS}) sigdelset(&all, number);
    pthread_sigmask(SIG_BLOCK, &all, &saved_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &saved_, nullptr); }

 private:
  sigset_t saved_;
};

bool bind_to(std::thread& thread, int cpu) {
#if defined(__linux__)
  cpu_set_t* set = CPU_ALLOC(cpu + 1);
  if (set == nullptr) return false;
  const size_t bytes = CPU_ALLOC_SIZE(cpu + 1);
  CPU_ZERO_S(bytes, set);
  CPU_SET_S(cpu, bytes, set);
  const bool is_bound = pthread_setaffinity_np(thread.native_handle(), bytes, set) == 0;
  CPU_FREE(set);
  return is_bound;
#else
  (void)thread, (void)cpu;
  return false;
#endif
}

}  // namespace

struct Pool::State {
  std::recursive_mutex callers;
  alignas(64) std::atomic<uint64_t> gate{0};  // generation << 16 | open | workers that entered
  alignas(64) std::atomic<int64_t> next{0};
  alignas(64) std::atomic<uint64_t> left{0};  // workers that entered this job and are done
  // The job: written while the gate is closed and nobody is inside.
  alignas(64) TaskFn fn = nullptr;
  void* context = nullptr;
  int64_t num_tasks = 0;

  alignas(64) std::mutex sleep_mutex;
  std::condition_variable wake;
  std::atomic<int> num_asleep{0};
  std::atomic<bool> is_stopping{false};
  std::chrono::microseconds spin{0};

  std::vector<std::thread> threads;
  std::vector<Buffer> scratch;
  Buffer shared;

  State(int num_threads, int64_t spin_us) : spin(spin_us), scratch(num_threads) {}

  void work(int thread) {
    const FloatMode mode;
    const TaskFn run_task = fn;
    void* const job = context;
    const int64_t end = num_tasks;
    for (;;) {
      const int64_t task = next.fetch_add(1, std::memory_order_relaxed);
      if (task >= end) return;
      run_task(job, task, thread);
    }
  }

  static bool is_new(uint64_t gate, uint64_t seen) { return (gate & kOpen) != 0 && gate >> kGenerationShift != seen; }

  // True when a job newer than `seen` was entered. Acquires what `run` wrote before it opened the gate: the entries of
  // other workers in between are read-modify-writes, which continue its release.
  bool try_enter(uint64_t& seen) {
    uint64_t now = gate.load(std::memory_order_relaxed);
    while (is_new(now, seen)) {
      if (gate.compare_exchange_weak(now, now + 1, std::memory_order_acquire, std::memory_order_relaxed)) {
        seen = now >> kGenerationShift;
        return true;
      }
    }
    return false;
  }

  // Either this thread's `num_asleep` is seen by `run` after it opened the gate, or the open gate is seen here: both
  // are sequentially consistent. `run` then notifies under the mutex, so not between this test and this sleep.
  void sleep(uint64_t seen) {
    std::unique_lock<std::mutex> held(sleep_mutex);
    num_asleep.fetch_add(1);
    wake.wait(held, [&] { return is_stopping.load() || is_new(gate.load(), seen); });
    num_asleep.fetch_sub(1);
  }

  void worker(int thread) {
    uint64_t seen = 0;
    Clock::time_point idle_since = Clock::now();
    for (unsigned spins = 1; !is_stopping.load(std::memory_order_relaxed); ++spins) {
      if (try_enter(seen)) {
        work(thread);
        left.fetch_add(1, std::memory_order_release);
        idle_since = Clock::now();
        continue;
      }
      cpu_relax();
      if (spins % kSpinsPerClockRead != 0) continue;
      const Clock::duration idle = Clock::now() - idle_since;
      if (idle > spin) {
        sleep(seen);
        idle_since = Clock::now();
      } else if (idle > kPolite) {
        sched_yield();
      }
    }
  }

  // Acquires what the workers wrote: the adding of one to `left` continues the release of another.
  void wait_for(uint64_t entered) {
    Clock::time_point started{};
    for (unsigned spins = 1; left.load(std::memory_order_acquire) != entered; ++spins) {
      cpu_relax();
      if (spins % kSpinsPerClockRead != 0) continue;
      if (started == Clock::time_point{}) started = Clock::now();
      if (Clock::now() - started > kPolite) sched_yield();
    }
  }
};

// The pools of this process. A forked child has only the thread that forked: its pools go on without workers, and with
// locks that no absent thread holds.
struct Pool::Registry {
  std::mutex mutex;
  std::vector<Pool*> pools;

  static Registry& get() {
    static Registry* const registry = [] {
      auto* made = new Registry;  // never destroyed: pools may outlive static objects
      pthread_atfork([] { get().mutex.lock(); }, [] { get().mutex.unlock(); }, [] { get().after_fork(); });
      return made;
    }();
    return *registry;
  }

  void add(Pool* pool) {
    std::lock_guard<std::mutex> held(mutex);
    pools.push_back(pool);
  }
  void remove(Pool* pool) {
    std::lock_guard<std::mutex> held(mutex);
    pools.erase(std::find(pools.begin(), pools.end(), pool));
  }
  void after_fork() {
    for (Pool* pool : pools) {
      pool->state_ = new State(1, 0);  // the old one is left: its threads cannot be joined
      pool->num_threads_ = 1;
    }
    mutex.unlock();
  }
};

Pool::Pool(int num_threads, const int* cpus, int64_t spin_us)
    : state_(new State(num_threads, spin_us)), num_threads_(num_threads) {
  try {
    const SignalsBlocked blocked;  // inherited by the threads made here
    state_->threads.reserve(num_threads);
    for (int thread = 1; thread < num_threads; ++thread) {
      state_->threads.emplace_back([state = state_, thread] { state->worker(thread); });
#if defined(__linux__)
      pthread_setname_np(state_->threads.back().native_handle(), "quire-compute");
#endif
      if (cpus != nullptr && !bind_to(state_->threads.back(), cpus[thread])) ++num_unbound_;
    }
    Registry::get().add(this);
  } catch (...) {
    stop();
    throw;
  }
}

Pool::~Pool() {
  Registry::get().remove(this);
  stop();
}

void Pool::stop() {
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
  State& state = *state_;
  std::lock_guard<std::recursive_mutex> held(state.callers);
  if (num_threads_ == 1 || num_tasks == 1) {
    const FloatMode mode;
    for (int64_t task = 0; task < num_tasks; ++task) fn(context, task, 0);
    return;
  }
  state.fn = fn;
  state.context = context;
  state.num_tasks = num_tasks;
  state.next.store(0, std::memory_order_relaxed);
  state.left.store(0, std::memory_order_relaxed);
  const uint64_t generation = (state.gate.load(std::memory_order_relaxed) >> kGenerationShift) + 1;
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
