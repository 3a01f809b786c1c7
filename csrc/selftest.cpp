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

#include "selftest_cases.h"

namespace quire {
namespace {

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
  for (int i = 0; i < num_self_test_cases; ++i) {
    report.case_idx = i;
    self_test_cases[i].run(tier, pool, actual[i].data());
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
  const std::string where = std::string(" in case '") + self_test_cases[report.case_idx].name + "'";
  if (!has_ended) return "its self-test took longer than " + std::to_string(timeout_ms) + " ms" + where;
  if (report.verdict == kPassed) return "";
  if (report.verdict == kDiffers) return "its self-test gave other bits than the portable tier" + where;
  if (WIFSIGNALED(status)) {
    const int number = WTERMSIG(status);
    return "its self-test was ended by signal " + std::to_string(number) + " (" + strsignal(number) + ")" + where;
  }
  return "its self-test ended without a verdict" + where;
}

using Results = std::vector<std::vector<uint8_t>>;

Results empty_results() {
  Results results;
  for (int i = 0; i < num_self_test_cases; ++i) results.emplace_back(self_test_cases[i].out_bytes);
  return results;
}

// The bits of the portable tier, computed once.
const Results& expected_results() {
  static const Results* const expected = [] {
    Pool pool(1, nullptr, 0);
    auto* made = new Results(empty_results());
    for (int i = 0; i < num_self_test_cases; ++i) self_test_cases[i].run(portable_tier(), pool, (*made)[i].data());
    return made;
  }();
  return *expected;
}

}  // namespace

std::string self_test(int tier, int64_t timeout_ms, Fault fault, int idle_kernel) {
  TierCopy tested(tiers[tier]);
  if (fault == Fault::idle_kernel) idle_kernels[idle_kernel].put(tested);
  // Everything that allocates or locks is made before the fork: other threads may hold any lock at that moment.
  Pool pool(1, nullptr, 0);
  const Results& expected = expected_results();
  Results actual = empty_results();
  void* shared = mmap(nullptr, sizeof(Report), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (shared == MAP_FAILED) return "its self-test found no memory";
  Report& report = *static_cast<Report*>(shared);
  report.case_idx = 0;
  report.verdict = kNone;
  std::string reason;
  const pid_t child = fork();
  if (child == 0) run_child(tested.tier, pool, fault, actual, expected, report);
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

std::vector<std::string> idle_kernel_names() {
  std::vector<std::string> names;
  for (int i = 0; i < num_idle_kernels; ++i) names.emplace_back(idle_kernels[i].name);
  return names;
}

}  // namespace quire
