#include "quire/selftest.h"

#include <csignal>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <string>
#include <vector>

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>
#if defined(__linux__)
#include <sys/prctl.h>
#endif

#include "quire/tiers.h"

namespace quire {
namespace {

// Numbers that are the same in every process: a linear congruential generator.
class Numbers {
 public:
  uint32_t bits() { return static_cast<uint32_t>((state_ = state_ * 6364136223846793005u + 1442695040888963407u) >> 33); }
  float uniform() { return static_cast<float>(bits()) * 0x1p-30f - 1.0f; }  // -1 to 1
  void fill(float* out, int64_t n) {
    for (int64_t i = 0; i < n; ++i) out[i] = uniform();
  }
  void fill(bf16* out, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
      const float x = uniform();
      uint32_t bits;
      std::memcpy(&bits, &x, 4);
      out[i].bits = static_cast<uint16_t>(bits >> 16);
    }
  }
  void fill(int8_t* out, int64_t n) {
    for (int64_t i = 0; i < n; ++i) out[i] = static_cast<int8_t>(bits());
  }

 private:
  uint64_t state_ = 1;
};

// Cases. Each makes its inputs, runs kernels of `tier` on `pool` and leaves the result in `out`, which holds zeros and
// has the bytes named in the table. They run after a fork: no allocation but the pool's, no locks but the pool's.

void products(const Tier& tier, Pool& pool, void* out) {
  alignas(64) bf16 a[16 * kSelfTestDepth], b[16 * kSelfTestDepth];
  alignas(64) int8_t a8[16 * kSelfTestDepth], b8[16 * kSelfTestDepth];
  Numbers numbers;
  numbers.fill(a, 16 * kSelfTestDepth);
  numbers.fill(b, 16 * kSelfTestDepth);
  numbers.fill(a8, 16 * kSelfTestDepth);
  numbers.fill(b8, 16 * kSelfTestDepth);
  struct Context {
    const SelfTestKernels* kernels;
    const bf16 *a, *b;
    const int8_t *a8, *b8;
    void* out;
  } context{tier.self_test, a, b, a8, b8, out};
  // By the pool, which sets the treatment of subnormal numbers.
  const TaskFn task = [](void* pointer, int64_t, int) {
    const Context& c = *static_cast<Context*>(pointer);
    c.kernels->product_bf16(c.a, c.b, static_cast<float*>(c.out));
    c.kernels->product_int8(c.a8, c.b8, static_cast<int32_t*>(c.out) + 256);
  };
  pool.run(1, task, &context);
}

template <class T, DType kDType>
void rms_norm(const Tier& tier, Pool& pool, void* out) {
  constexpr int64_t kRows = 3, kSize = 83;
  T x[kRows * kSize], weight[kSize];
  Numbers numbers;
  numbers.fill(x, kRows * kSize);
  numbers.fill(weight, kSize);
  T* residual = static_cast<T*>(out) + kRows * kSize;
  numbers.fill(residual, kRows * kSize);
  tier.elementwise->rms_norm(pool, {x, kSize, residual, weight, out, kRows, kSize, 1e-6f, kDType});
}

struct Case {
  const char* name;
  int64_t out_bytes;
  void (*run)(const Tier&, Pool&, void* out);
};

const Case kCases[] = {
    {"products", 2 * 256 * 4, products},
    {"rms_norm bf16", 2 * 3 * 83 * 2, rms_norm<bf16, DType::bf16>},
    {"rms_norm f32", 2 * 3 * 83 * 4, rms_norm<float, DType::f32>},
};
constexpr int kNumCases = static_cast<int>(sizeof(kCases) / sizeof(kCases[0]));

// What the child tells its parent, in memory that both map: it also arrives where someone else collects the child.
struct Report {
  volatile int32_t case_idx;  // the case that runs, or ran last
  volatile int32_t verdict;   // one of the below
};
constexpr int32_t kNone = 0, kPassed = 1, kDiffers = 2;

void commit(Fault fault) {
  if (fault == Fault::illegal_instruction) __builtin_trap();
  if (fault == Fault::bad_access) raise(SIGSEGV);
  while (fault == Fault::hang) usleep(1000);
}

[[noreturn]] void run_child(const Tier& tier, Pool& pool, Fault fault, std::vector<std::vector<uint8_t>>& actual,
                            const std::vector<std::vector<uint8_t>>& expected, Report& report) {
  // The handlers are the parent's: a crash here is no reason for its tracebacks, nor for a core file.
  sigset_t none;
  sigemptyset(&none);
  for (const int number : {SIGILL, SIGSEGV, SIGBUS, SIGFPE, SIGABRT, SIGTRAP, SIGTERM}) signal(number, SIG_DFL);
  sigprocmask(SIG_SETMASK, &none, nullptr);
#if defined(__linux__)
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  prctl(PR_SET_DUMPABLE, 0);
#endif
  commit(fault);
  for (int i = 0; i < kNumCases; ++i) {
    report.case_idx = i;
    kCases[i].run(tier, pool, actual[i].data());
    if (fault == Fault::wrong_result) actual[i][0] ^= 1;
    if (std::memcmp(actual[i].data(), expected[i].data(), actual[i].size()) != 0) {
      report.verdict = kDiffers;
      _exit(1);
    }
  }
  report.verdict = kPassed;
  _exit(0);
}

int64_t now_ms() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return static_cast<int64_t>(now.tv_sec) * 1000 + now.tv_nsec / 1000000;
}

// Waits for the child; false when it had to be ended. `status` is 0 where someone else collected it.
bool wait_for_child(pid_t child, int64_t timeout_ms, int& status) {
  const int64_t deadline = now_ms() + timeout_ms;
  for (;;) {
    status = 0;
    const pid_t ended = waitpid(child, &status, WNOHANG);
    if (ended == child || (ended < 0 && errno != EINTR)) return true;
    if (now_ms() > deadline) {
      kill(child, SIGKILL);
      while (waitpid(child, &status, 0) < 0 && errno == EINTR) {
      }
      return false;
    }
    const timespec pause{0, 300000};
    nanosleep(&pause, nullptr);
  }
}

const Tier& portable_tier() {
  int i = 0;
  while (std::strcmp(tiers[i].name, "portable") != 0) ++i;
  return tiers[i];
}

std::string reason_of(const Report& report, bool has_ended, int status, int64_t timeout_ms) {
  const std::string where = std::string(" in case '") + kCases[report.case_idx].name + "'";
  if (!has_ended) return "its self-test took longer than " + std::to_string(timeout_ms) + " ms" + where;
  if (report.verdict == kPassed) return "";
  if (report.verdict == kDiffers) return "its self-test gave other bits than the portable tier" + where;
  if (WIFSIGNALED(status)) {
    const int number = WTERMSIG(status);
    return "its self-test was ended by signal " + std::to_string(number) + " (" + strsignal(number) + ")" + where;
  }
  return "its self-test ended without a verdict" + where;
}

}  // namespace

std::string self_test(int tier, int64_t timeout_ms, Fault fault) {
  // Everything that allocates or locks is made before the fork: other threads may hold any lock at that moment.
  Pool pool(1, nullptr, 0);
  std::vector<std::vector<uint8_t>> expected, actual;
  for (const Case& one : kCases) {
    expected.emplace_back(one.out_bytes);
    actual.emplace_back(one.out_bytes);
    one.run(portable_tier(), pool, expected.back().data());
  }
  void* shared = mmap(nullptr, sizeof(Report), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (shared == MAP_FAILED) return "its self-test found no memory";
  Report& report = *static_cast<Report*>(shared);
  report.case_idx = 0;
  report.verdict = kNone;
  std::string reason;
  const pid_t child = fork();
  if (child == 0) run_child(tiers[tier], pool, fault, actual, expected, report);
  if (child < 0) {
    reason = std::string("its self-test could not start: ") + strerror(errno);
  } else {
    int status = 0;
    const bool has_ended = wait_for_child(child, timeout_ms, status);
    reason = reason_of(report, has_ended, status, timeout_ms);
  }
  munmap(shared, sizeof(Report));
  return reason;
}

}  // namespace quire
