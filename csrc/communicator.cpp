#include "quire/communicator.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>
#include <system_error>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace quire {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kMailBytes = kMaxMailBytes;  // of a slot
constexpr int kSpinsPerClockRead = 64;
// Who waits longer than this lets other threads of the machine go first; as the pool's workers do.
constexpr std::chrono::microseconds kPolite{50};
// A sleeper looks up this often, whatever happened to those who should have woken it.
constexpr int64_t kSliceNs = 100'000'000;

inline void cpu_relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Not FUTEX_PRIVATE: waiters are in other processes.
void futex_wait(std::atomic<uint32_t>& word, uint32_t seen) {
  const timespec slice{0, kSliceNs};
  syscall(SYS_futex, &word, FUTEX_WAIT, seen, &slice, nullptr, 0);
}

// Why a group has ended; 0 = the process of the rank has.
enum Reason : int32_t { kEnded = 0, kSilent = 1 << 16, kDamaged = 2 << 16 };
constexpr int32_t kRankMask = kSilent - 1;

void futex_wake(std::atomic<uint32_t>& word) { syscall(SYS_futex, &word, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0); }

// Counters wrap.
bool has_reached(uint32_t value, uint32_t wanted) { return static_cast<int32_t>(value - wanted) >= 0; }

}  // namespace

// A counter with those who sleep until it rises.
struct alignas(64) Communicator::Word {
  std::atomic<uint32_t> value;
  std::atomic<uint32_t> num_sleepers;
};

struct alignas(64) Communicator::Mail {
  Word num_sent, num_taken;
  alignas(64) char slots[kMailSlots][kMailBytes];
};

struct alignas(64) Communicator::Region {
  std::atomic<int32_t> aborted;  // a rank, plus 1, and a `Reason`
  Word arrived[kMaxRanks];
};

static_assert(std::atomic<uint32_t>::is_always_lock_free && std::atomic<int32_t>::is_always_lock_free);

int64_t Communicator::region_bytes(int size, int64_t capacity) {
  return static_cast<int64_t>(sizeof(Region)) + 2 * capacity + int64_t{size} * size * static_cast<int64_t>(sizeof(Mail));
}

Communicator::Communicator(int fd, int rank, int size, int64_t capacity, int64_t spin_us, int64_t timeout_us,
                           int first_rank)
    : bytes_(region_bytes(size, capacity)),
      rank_(rank),
      size_(size),
      first_rank_(first_rank),
      capacity_(capacity),
      spin_us_(spin_us),
      timeout_us_(timeout_us) {
  void* address = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (address == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "the region cannot be mapped");
  region_ = static_cast<Region*>(address);
  buffers_ = static_cast<char*>(address) + sizeof(Region);
  mails_ = buffers_ + 2 * capacity;
}

Communicator::~Communicator() {
  links_.reset();
  munmap(region_, bytes_);
}

Communicator::Mail& Communicator::mail(int from, int to) const {
  return reinterpret_cast<Mail*>(mails_)[from * size_ + to];
}

bool Communicator::abort_as(int32_t reason) {
  int32_t none = 0;
  const bool is_first = region_->aborted.compare_exchange_strong(none, reason);
  for (int other = 0; other < size_; ++other) {
    futex_wake(region_->arrived[other].value);
    for (int to = 0; to < size_; ++to) {
      futex_wake(mail(other, to).num_sent.value);
      futex_wake(mail(other, to).num_taken.value);
    }
  }
  return is_first;
}

void Communicator::abort(int rank) {
  if (abort_as(rank + 1) && links_) links_->ship_abort(rank);
}

void Communicator::abort_here(int rank) { abort_as(rank + 1); }

void Communicator::abort_silent(int rank) {
  if (abort_as((rank + 1) | kSilent)) links_->ship_abort(rank);
}

void Communicator::abort_damaged(int rank) {
  if (abort_as((rank + 1) | kDamaged)) links_->ship_abort(rank);
}

int Communicator::aborted() const { return (region_->aborted.load() & kRankMask) - 1; }

void Communicator::fail(int other) const {
  const int dead = aborted();
  const std::string name = "rank " + std::to_string(dead >= 0 ? dead : first_rank_ + other);
  const std::string time = std::to_string(timeout_us_ / 1000) + " ms";
  const int32_t reason = region_->aborted.load() & ~kRankMask;
  if (reason == kSilent) throw std::runtime_error("nothing came from " + name + ", on another machine, for " + time);
  if (reason == kDamaged) throw std::runtime_error("what came from " + name + ", on another machine, was damaged");
  if (dead >= 0) throw std::runtime_error(name + " has ended");
  throw std::runtime_error(name + " did not come to " + what_ + " (operation " + std::to_string(operation_) +
                           ") within " + time);
}

void Communicator::publish(Word& word, uint32_t value) {
  word.value.store(value);
  if (word.num_sleepers.load() != 0) futex_wake(word.value);
}

void Communicator::wait(Word& word, uint32_t value, int other, bool forever) {
  if (has_reached(word.value.load(std::memory_order_acquire), value)) return;
  const auto start = Clock::now();
  const auto spin_until = start + std::chrono::microseconds(spin_us_);
  for (auto now = start; now < spin_until; now = Clock::now()) {
    for (int i = 0; i < kSpinsPerClockRead; ++i) {
      if (has_reached(word.value.load(std::memory_order_acquire), value)) return;
      cpu_relax();
    }
    if (now > start + kPolite) sched_yield();
  }
  // Time in which this process did not run (stopped, or on a suspended machine) does not count: the others may not have
  // run either.
  std::chrono::nanoseconds waited{0}, most{2 * kSliceNs};
  for (auto last = start;;) {
    if (aborted() >= 0) fail(other);
    word.num_sleepers.fetch_add(1);
    const uint32_t seen = word.value.load();
    if (!has_reached(seen, value)) futex_wait(word.value, seen);
    word.num_sleepers.fetch_sub(1);
    if (has_reached(word.value.load(std::memory_order_acquire), value)) return;
    const auto now = Clock::now();
    waited += std::min<std::chrono::nanoseconds>(now - last, most);
    last = now;
    if (!forever && waited > std::chrono::microseconds(timeout_us_)) fail(other);
  }
}

char* Communicator::begin(const char* what) {
  what_ = what;
  ++operation_;
  parts_.clear();
  return buffers_ + (operation_ & 1) * capacity_;
}

void Communicator::wait_for_readers() {
  for (int other = 0; other < size_; ++other) wait(region_->arrived[other], operation_ - 1, other, false);
}

void Communicator::arrive() {
  publish(region_->arrived[rank_], operation_);
  if (links_) links_->ship(operation_, buffers_ + (operation_ & 1) * capacity_, parts_);
}

void Communicator::wait_for(int other, bool forever) { wait(region_->arrived[other], operation_, other, forever); }

void Communicator::wait_for_all() {
  for (int other = 0; other < size_; ++other) wait_for(other);
}

void Communicator::announce(int64_t number) {
  char* buffer = begin("a pass");
  wait_for_readers();
  std::memcpy(buffer + rank_ * kCacheLine, &number, sizeof number);
  wrote(rank_ * kCacheLine, kCacheLine, 1, kCacheLine);
  arrive();
}

std::vector<int64_t> Communicator::announced() {
  wait_for_all();
  std::vector<int64_t> numbers(static_cast<std::size_t>(size_));
  const char* buffer = buffers_ + (operation_ & 1) * capacity_;
  for (int other = 0; other < size_; ++other) {
    std::memcpy(&numbers[static_cast<std::size_t>(other)], buffer + other * kCacheLine, sizeof(int64_t));
  }
  return numbers;
}

bool Communicator::is_awaited() const {
  for (int other = 0; other < size_; ++other) {
    if (other != rank_ && has_reached(region_->arrived[other].value.load(), operation_ + 1)) return true;
  }
  return false;
}

void Communicator::send(const char* data, int64_t bytes, int to) {
  what_ = "receive";
  Mail& box = mail(rank_, to);
  for (int64_t done = 0; done < bytes; done += kMailBytes) {
    const uint32_t number = box.num_sent.value.load();
    wait(box.num_taken, number + 1 - kMailSlots, to, false);
    const int64_t num = min_i64(kMailBytes, bytes - done);
    if (is_elsewhere(to)) {
      links_->ship_mail(to, number, data + done, num);
    } else {
      std::memcpy(box.slots[number % kMailSlots], data + done, num);
    }
    publish(box.num_sent, number + 1);
  }
}

void Communicator::receive(char* data, int64_t bytes, int from, bool forever) {
  what_ = "send";
  Mail& box = mail(from, rank_);
  for (int64_t done = 0; done < bytes; done += kMailBytes) {
    const uint32_t number = box.num_taken.value.load();
    wait(box.num_sent, number + 1, from, forever);
    std::memcpy(data + done, box.slots[number % kMailSlots], min_i64(kMailBytes, bytes - done));
    publish(box.num_taken, number + 1);
    if (is_elsewhere(from)) links_->ship_taken(from, number);
  }
}

bool Communicator::take_operation(int rank, uint32_t operation, const std::vector<Segment>& parts, const char* data,
                                  int64_t bytes) {
  Word& arrived = region_->arrived[rank];
  if (operation != arrived.value.load() + 1) return false;
  char* buffer = buffers_ + (operation & 1) * capacity_;
  for (const Segment& part : parts) {
    // By divisions: products of what came from elsewhere may overflow.
    const bool is_within = part.bytes > 0 && part.bytes <= capacity_ && part.offset >= 0 &&
                           part.offset <= capacity_ - part.bytes && part.stride >= part.bytes && part.num_rows > 0 &&
                           part.num_rows <= bytes / part.bytes &&
                           part.num_rows - 1 <= (capacity_ - part.bytes - part.offset) / part.stride;
    if (!is_within) return false;
    for (int64_t row = 0; row < part.num_rows; ++row, data += part.bytes) {
      std::memcpy(buffer + part.offset + row * part.stride, data, part.bytes);
    }
    bytes -= part.num_rows * part.bytes;
  }
  if (bytes == 0) publish(arrived, operation);
  return bytes == 0;
}

bool Communicator::take_mail(int from, int to, uint32_t number, const char* data, int64_t bytes) {
  if (is_elsewhere(to) || bytes > kMailBytes) return false;
  Mail& box = mail(from, to);
  if (number != box.num_sent.value.load() || number - box.num_taken.value.load() >= kMailSlots) return false;
  std::memcpy(box.slots[number % kMailSlots], data, bytes);
  publish(box.num_sent, number + 1);
  return true;
}

bool Communicator::take_taken(int from, int to, uint32_t number) {
  if (is_elsewhere(from)) return false;
  Word& taken = mail(from, to).num_taken;
  if (number != taken.value.load()) return false;
  publish(taken, number + 1);
  return true;
}

}  // namespace quire
