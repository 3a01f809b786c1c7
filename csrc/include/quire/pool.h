// The threads that kernels run on. One pool serves every engine of a process.
#pragma once

#include <cstdint>

namespace quire {

// A task: the context given to `Pool::run`, which task (0 .. num_tasks - 1), and which thread runs it.
using TaskFn = void (*)(void* context, int64_t task, int thread);

// Fixed threads that take tasks one by one from a shared counter. The caller of `run` is thread 0 and works too.
// Workers spin for `spin_us` after their last task, so that the kernels of a step follow each other without a wake-up,
// and then sleep until the next `run`.
class Pool {
 public:
  // cpus: one per thread, or null; thread i > 0 is bound to cpus[i]. Thread 0 belongs to the caller and is not bound.
  // Throws std::system_error, with no thread left behind, when the system has no more threads to give.
  Pool(int num_threads, const int* cpus, int64_t spin_us);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  // After a fork, the child's copy of a pool has one thread: the others did not come along.
  int num_threads() const { return num_threads_; }

  // Workers that could not be bound to their CPU, and run anywhere.
  int num_unbound() const { return num_unbound_; }

  // Runs tasks 0 .. num_tasks - 1, each exactly once, and returns when all are done. Calls from several threads take
  // turns; a task must not call `run`. Tasks round to nearest, with subnormal floats flushed to zero, as the tile unit
  // does.
  void run(int64_t num_tasks, TaskFn fn, void* context);

  // Memory of `thread` for the length of one task, at least `bytes`, 64-byte aligned, contents undefined.
  void* scratch(int thread, int64_t bytes);

  // Memory shared by the tasks of one kernel call, at least `bytes`, 64-byte aligned; call it before `run`, from the
  // thread that calls `run`, under `lock`.
  void* shared_scratch(int64_t bytes);

  // Taken by a kernel that uses `shared_scratch` over several `run`s; `run` may be called while holding it.
  void lock();
  void unlock();

 private:
  struct State;
  struct Registry;
  void stop();
  State* state_;
  int num_threads_;
  int num_unbound_ = 0;
};

}  // namespace quire
