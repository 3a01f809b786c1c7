// Collectives between processes of one machine, in memory that they share, and of several (`host_links.h`).
//
// Every rank calls the same collectives in the same order; calls of one communicator come from one thread at a time.
// Rank order is fixed on every rank, so all of them get the same bits. The region has two buffers that take turns, so
// that one wait an operation is enough: a rank that has arrived at operation k has read the results of all before it,
// and the buffer of k is that of k - 2.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "quire/host_links.h"
#include "quire/pool.h"
#include "quire/types.h"

namespace quire {

constexpr int kMaxRanks = 64;
constexpr int64_t kMaxMailBytes = 256 << 10;  // of a piece of a message
constexpr int64_t kMailSlots = 4;             // pieces from one rank to another that may be under way

class Communicator {
 public:
  // Of the region that all ranks map, which begins as zeros.
  static int64_t region_bytes(int size, int64_t capacity);

  // Maps the region behind `fd`. A wait spins for spin_us, then sleeps, and throws std::runtime_error after timeout_us.
  // capacity: bytes that one round of an operation moves, a multiple of 64; larger ones take several rounds.
  // first_rank: what messages call rank 0 of a group that is a part of another; `abort` takes such a number.
  Communicator(int fd, int rank, int size, int64_t capacity, int64_t spin_us, int64_t timeout_us, int first_rank);
  ~Communicator();
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  int64_t capacity() const { return capacity_; }

  // Ranks of other machines take part from now on; before the first operation.
  void connect(std::unique_ptr<HostLinks> links) { links_ = std::move(links); }
  const HostLinks* links() const { return links_.get(); }

  // All waits on all ranks end with an error that names `rank`, now and later.
  void abort(int rank);
  // The rank that `abort` was given first; -1 = none.
  int aborted() const;

  // Throws: `rank` did not come, or the group has ended.
  [[noreturn]] void fail(int rank) const;

  // An operation: `begin` gives its buffer, `wait_for_readers` before it is written, `wrote` for each part that is,
  // `arrive` then, `wait_for` the ranks that write before it is read.
  char* begin(const char* what);
  void wait_for_readers();
  // Rows of `bytes` bytes, `stride` apart, which are for one rank, or for all (-1).
  void wrote(int64_t offset, int64_t stride, int64_t num_rows, int64_t bytes, int to = -1) {
    if (links_ && num_rows > 0 && bytes > 0) parts_.push_back({to, {offset, stride, num_rows, bytes}});
  }
  void arrive();
  void wait_for(int other, bool forever = false);
  void wait_for_all();

  // A number to all ranks, and those of all; calls of other kinds may lie between, operations may not.
  void announce(int64_t number);
  std::vector<int64_t> announced();
  // Another rank has begun an operation that this one has not.
  bool is_awaited() const;

  // Time in operations so far, waits included; of broadcasts, which may wait for work, none.
  int64_t busy_ns() const { return busy_ns_; }
  void add_busy(int64_t ns) { busy_ns_ += ns; }

  // From one rank to another, whatever the others do; in pieces.
  void send(const char* data, int64_t bytes, int to);
  void receive(char* data, int64_t bytes, int from, bool forever);

  // For `HostLinks`: what ranks of other machines did. False = that cannot have been.
  bool take_operation(int rank, uint32_t operation, const std::vector<Segment>& parts, const char* data, int64_t bytes);
  bool take_mail(int from, int to, uint32_t number, const char* data, int64_t bytes);
  bool take_taken(int from, int to, uint32_t number);
  // As `abort`, on this machine alone; and for other reasons than the end of the rank.
  void abort_here(int rank);
  void abort_silent(int rank);
  void abort_damaged(int rank);

 private:
  struct Word;
  struct Mail;
  struct Region;
  void wait(Word& word, uint32_t value, int other, bool forever);
  static void publish(Word& word, uint32_t value);
  Mail& mail(int from, int to) const;
  bool is_elsewhere(int rank) const { return links_ && links_->is_elsewhere(rank); }
  bool abort_as(int32_t reason);

  Region* region_;
  char* buffers_;
  char* mails_;
  int64_t bytes_;
  int rank_;
  int size_;
  int first_rank_;
  int64_t capacity_;
  int64_t spin_us_;
  int64_t timeout_us_;
  uint32_t operation_ = 0;
  int64_t busy_ns_ = 0;
  const char* what_ = "";
  std::vector<std::pair<int, Segment>> parts_;  // of the operation's buffer that this rank has written
  std::unique_ptr<HostLinks> links_;            // the last: its thread writes to the region
};

// Adds the time of an operation to its communicator's.
class BusyTime {
 public:
  explicit BusyTime(Communicator* communicator) : communicator_(communicator), start_(Clock::now()) {}
  ~BusyTime() {
    const auto time = std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start_);
    communicator_->add_busy(time.count());
  }
  BusyTime(const BusyTime&) = delete;
  BusyTime& operator=(const BusyTime&) = delete;

 private:
  using Clock = std::chrono::steady_clock;
  Communicator* communicator_;
  Clock::time_point start_;
};

// Columns of a matrix from all ranks: out[i] = the own[i] of rank 0, then that of rank 1, and so on.
struct GatherArgs {
  Communicator* communicator;
  const char* own;
  int64_t own_stride;  // bytes
  char* out;
  int64_t out_stride;  // bytes
  int64_t num_rows;
  int64_t starts[kMaxRanks + 1];  // bytes: where the columns of each rank begin; the last is the width of a row
  int root;                       // the rank that alone gets the result; -1 = all
};
void gather(Pool& pool, const GatherArgs& args);

// Rows of a table that is divided over the ranks: out[i] is the own[i] of the rank whose part of the table has ids[i].
struct GatherRowsArgs {
  Communicator* communicator;
  const int64_t* ids;
  int64_t first;  // the table's rows first .. first + count - 1 are here
  int64_t count;
  const char* own;
  char* out;
  int64_t num_rows;
  int64_t row_bytes;
};
void gather_rows(Pool& pool, const GatherRowsArgs& args);

// Rows that are sorted by group, of which each rank has computed those of its groups: every rank gets all, in place.
struct GatherGroupsArgs {
  Communicator* communicator;
  char* rows;
  const int32_t* starts;  // [num_groups + 1]: first row of each group, from 0 to num_rows
  int64_t num_groups;
  int64_t num_rows;
  int64_t row_bytes;
  int32_t firsts[kMaxRanks + 1];  // first group of each rank; the last is num_groups
};
const char* find_fault(const GatherGroupsArgs& args);
void gather_groups(Pool& pool, const GatherGroupsArgs& args);

// out[i] = ids[i] - first, or 0 where that is not in 0 .. count - 1.
struct LocalIdsArgs {
  const int64_t* ids;
  int64_t* out;
  int64_t num_ids;
  int64_t first;
  int64_t count;
};
void local_ids(Pool& pool, const LocalIdsArgs& args);

// Sums over the ranks, in float32, pairwise by rank: ((0 + 1) + (2 + 3)) + ...; rounded once. In place.
// scattered: each rank gets its part of `counts` elements alone, at the beginning of `data`.
struct ReduceArgs {
  Communicator* communicator;
  void* data;
  int64_t num_elements;
  DType dtype;  // f32 or bf16
  bool is_scattered;
};
void reduce(Pool& pool, const ReduceArgs& args);

struct BroadcastArgs {
  Communicator* communicator;
  char* data;
  int64_t bytes;
  int root;
  bool is_patient;  // receivers have no timeout
};
void broadcast(Pool& pool, const BroadcastArgs& args);

// Part j of `data` goes to rank j: out = what each rank has for this one, in the order of the ranks.
struct AllToAllArgs {
  Communicator* communicator;
  const char* data;
  char* out;
  int64_t part_bytes;
};
void all_to_all(Pool& pool, const AllToAllArgs& args);

// To or from one rank, whatever the others do; a send returns when its last 1 MiB may still be under way.
struct SendArgs {
  Communicator* communicator;
  const char* data;
  int64_t bytes;
  int to;
};
void send(Pool& pool, const SendArgs& args);

struct ReceiveArgs {
  Communicator* communicator;
  char* data;
  int64_t bytes;
  int from;
  bool is_patient;  // without a timeout
};
void receive(Pool& pool, const ReceiveArgs& args);

void barrier(Pool& pool, Communicator* const& communicator);

}  // namespace quire
