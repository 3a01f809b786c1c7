// Ranks on several machines: each machine has the shared memory of a group, and what is written there goes over TCP to
// the memory of the other machines, with the counter that says so. An operation is then the same on one machine and on
// several: the same waits, the same order of sums, and the same names of ranks that do not come.
//
// Every rank has a connection to the first rank of each other machine, the one that leads there; a thread of that
// process takes in what comes. Frames have a number and a checksum: one that is missing, damaged or out of turn ends the
// group, as a connection that ends does, or one over which nothing came for the time of a wait.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace quire {

class Communicator;

// Rows that lie `stride` bytes apart in the buffer of an operation.
struct Segment {
  int64_t offset;
  int64_t stride;
  int64_t num_rows;
  int64_t bytes;
};

class HostLinks {
 public:
  // hosts: the machine of each rank. leads: for each machine, a socket to its first rank; -1 = this machine.
  // sources: ranks of other machines and sockets from them, in the process of the first rank of this machine.
  // The sockets are this object's from now on. Nothing for timeout_us ends the group.
  HostLinks(Communicator& group, std::vector<int> hosts, const std::vector<int>& leads,
            const std::vector<std::pair<int, int>>& sources, int64_t timeout_us);
  ~HostLinks();
  HostLinks(const HostLinks&) = delete;
  HostLinks& operator=(const HostLinks&) = delete;

  bool is_elsewhere(int rank) const { return hosts_[rank] != own_host_; }

  // This rank has written these parts of the buffer of an operation: each for one rank, or for all (-1).
  void ship(uint32_t operation, const char* buffer, const std::vector<std::pair<int, Segment>>& parts);
  // One piece of a message from this rank, and that this rank has taken one.
  void ship_mail(int to, uint32_t number, const char* data, int64_t bytes);
  void ship_taken(int from, uint32_t number);
  // As far as it can be said at once; from any thread.
  void ship_abort(int rank);

  // Milliseconds since something came from a rank of another machine; 0 for the others, and for all in processes other
  // than that of the first rank of this machine.
  int64_t silence_ms(int rank) const { return silence_ms_[rank].load(); }

 private:
  using Clock = std::chrono::steady_clock;
  struct Frame;
  struct Lead;
  struct Source;
  void run();
  void tick(int64_t elapsed_ms);
  void read_all(Source& source);
  bool deliver(Source& source);
  void send(Lead& lead, const Frame& frame, const char* body);
  void end(int rank, Clock::time_point& closed_at);
  void beat();

  Communicator& group_;
  std::vector<int> hosts_;
  int own_host_;
  int64_t timeout_us_;
  std::vector<Lead> leads_;
  std::vector<Source> sources_;
  std::vector<std::atomic<int64_t>> silence_ms_;
  std::vector<char> body_;
  int wake_;
  std::atomic<bool> is_closing_{false};
  std::thread thread_;
};

}  // namespace quire
