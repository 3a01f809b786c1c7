#include "quire/host_links.h"

#include <fcntl.h>
#include <linux/sockios.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "quire/checksum.h"
#include "quire/communicator.h"

namespace quire {
namespace {

constexpr uint32_t kMagic = 0x4b4c5551;  // "QULK"
constexpr int kTickMs = 250;
// For so long after a connection has closed the reason may come another way: the name of the rank that ended first.
constexpr std::chrono::milliseconds kGrace{300};
// Frames hold what fits the buffer, and a description of at most one part for each few bytes of it.
constexpr int64_t kMaxBytesPerCapacity = 20;

enum Kind : uint32_t { kBeat, kOperation, kMail, kTaken, kAbort };

void set_nonblocking(int fd) { fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK); }

}  // namespace

// What begins a frame, in the order of the bytes of both machines, which is the same (the magic number says so).
struct HostLinks::Frame {
  uint32_t magic = kMagic;
  uint32_t kind;
  uint32_t number;  // of the operation, or of the piece
  int32_t rank;     // the other end of a message, or the rank that has ended
  int64_t num_parts = 0;
  int64_t bytes = 0;  // that follow, descriptions of parts included
  uint64_t sum = 0;   // over the frame with a zero here, and over what follows
};

struct HostLinks::Lead {
  int fd = -1;
  int rank = -1;
  std::mutex lock;
  Clock::time_point closed_at{};
};

struct HostLinks::Source {
  int fd = -1;
  int rank = -1;
  Frame frame{};
  std::vector<char> body;
  int64_t have = 0;  // bytes of the frame and of what follows
  Clock::time_point closed_at{};
};

namespace {

template <class Frame>
uint64_t sum_of(Frame frame, const char* body) {
  frame.sum = 0;
  return checksum_alone(&frame, sizeof(frame)) ^ (frame.bytes ? checksum_alone(body, frame.bytes) : 0);
}

}  // namespace

HostLinks::HostLinks(Communicator& group, std::vector<int> hosts, const std::vector<int>& leads,
                     const std::vector<std::pair<int, int>>& sources, int64_t timeout_us)
    : group_(group),
      hosts_(std::move(hosts)),
      own_host_(hosts_[group.rank()]),
      timeout_us_(timeout_us),
      leads_(leads.size()),
      sources_(sources.size()),
      silence_ms_(hosts_.size()),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  for (size_t host = 0; host < leads.size(); ++host) {
    leads_[host].fd = leads[host];
    leads_[host].rank = static_cast<int>(std::find(hosts_.begin(), hosts_.end(), host) - hosts_.begin());
    if (leads[host] >= 0) set_nonblocking(leads[host]);
  }
  for (size_t i = 0; i < sources.size(); ++i) {
    sources_[i].rank = sources[i].first, sources_[i].fd = sources[i].second;
    set_nonblocking(sources[i].second);
  }
  thread_ = std::thread(&HostLinks::run, this);
}

HostLinks::~HostLinks() {
  is_closing_ = true;
  const uint64_t one = 1;
  if (write(wake_, &one, sizeof(one)) < 0) { /* it looks up each tick */ }
  thread_.join();
  for (const Lead& lead : leads_) {
    if (lead.fd >= 0) close(lead.fd);
  }
  for (const Source& source : sources_) {
    if (source.fd >= 0) close(source.fd);
  }
  close(wake_);
}

void HostLinks::ship(uint32_t operation, const char* buffer, const std::vector<std::pair<int, Segment>>& parts) {
  for (size_t host = 0; host < leads_.size(); ++host) {
    if (static_cast<int>(host) == own_host_) continue;
    Frame frame{.kind = kOperation, .number = operation, .rank = group_.rank()};
    for (const auto& [to, part] : parts) {
      if (to >= 0 && hosts_[to] != static_cast<int>(host)) continue;
      ++frame.num_parts;
      frame.bytes += static_cast<int64_t>(sizeof(Segment)) + part.num_rows * part.bytes;
    }
    body_.resize(frame.bytes);
    char* described = body_.data();
    char* data = described + frame.num_parts * sizeof(Segment);
    for (const auto& [to, part] : parts) {
      if (to >= 0 && hosts_[to] != static_cast<int>(host)) continue;
      std::memcpy(described, &part, sizeof(part));
      described += sizeof(part);
      for (int64_t row = 0; row < part.num_rows; ++row, data += part.bytes) {
        std::memcpy(data, buffer + part.offset + row * part.stride, part.bytes);
      }
    }
    send(leads_[host], frame, body_.data());
  }
}

void HostLinks::ship_mail(int to, uint32_t number, const char* data, int64_t bytes) {
  send(leads_[hosts_[to]], Frame{.kind = kMail, .number = number, .rank = to, .bytes = bytes}, data);
}

void HostLinks::ship_taken(int from, uint32_t number) {
  send(leads_[hosts_[from]], Frame{.kind = kTaken, .number = number, .rank = from}, nullptr);
}

// Waits where the other machine takes nothing in, as the operations wait: for the time of a wait, and until the group
// ends.
void HostLinks::send(Lead& lead, const Frame& frame, const char* body) {
  Frame head = frame;
  head.sum = sum_of(head, body);
  const std::lock_guard<std::mutex> guard(lead.lock);
  const int64_t all = static_cast<int64_t>(sizeof(head)) + head.bytes;
  std::chrono::nanoseconds waited{0};
  for (int64_t done = 0; done < all;) {
    const int64_t head_left = std::max<int64_t>(0, static_cast<int64_t>(sizeof(head)) - done);
    const int64_t body_done = std::max<int64_t>(0, done - static_cast<int64_t>(sizeof(head)));
    iovec parts[2] = {{reinterpret_cast<char*>(&head) + sizeof(head) - head_left, static_cast<size_t>(head_left)},
                      {const_cast<char*>(body) + body_done, static_cast<size_t>(head.bytes - body_done)}};
    msghdr message{};
    message.msg_iov = parts, message.msg_iovlen = 2;
    const ssize_t sent = sendmsg(lead.fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent >= 0) {
      done += sent;
      continue;
    }
    if (errno == EINTR) continue;
    if (errno != EAGAIN && errno != EWOULDBLOCK) {
      for (const auto until = Clock::now() + kGrace; group_.aborted() < 0 && Clock::now() < until;) usleep(5000);
      group_.abort_here(lead.rank);
      group_.fail(lead.rank);
    }
    const auto start = Clock::now();
    pollfd ready{lead.fd, POLLOUT, 0};
    poll(&ready, 1, kTickMs / 2);
    waited += std::min<std::chrono::nanoseconds>(Clock::now() - start, std::chrono::milliseconds(kTickMs));
    if (group_.aborted() >= 0 || waited > std::chrono::microseconds(timeout_us_)) group_.fail(lead.rank);
  }
}

void HostLinks::ship_abort(int rank) {
  Frame frame{.kind = kAbort, .number = 0, .rank = rank};
  frame.sum = sum_of(frame, nullptr);
  for (Lead& lead : leads_) {
    if (lead.fd < 0) continue;
    const std::unique_lock<std::mutex> guard(lead.lock, std::try_to_lock);
    const bool is_whole = guard.owns_lock() &&
                          ::send(lead.fd, &frame, sizeof(frame), MSG_NOSIGNAL | MSG_DONTWAIT) == sizeof(frame);
    if (!is_whole) shutdown(lead.fd, SHUT_RDWR);  // the end of the connection is the end of the group as well
  }
}

// Says that this process is there, unless something is on its way that says so.
void HostLinks::beat() {
  Frame frame{.kind = kBeat, .number = 0, .rank = group_.rank()};
  frame.sum = sum_of(frame, nullptr);
  for (Lead& lead : leads_) {
    const std::unique_lock<std::mutex> guard(lead.lock, std::try_to_lock);
    if (lead.fd < 0 || !guard.owns_lock()) continue;
    int unsent = 1;
    if (ioctl(lead.fd, SIOCOUTQ, &unsent) == 0 && unsent == 0) {
      if (::send(lead.fd, &frame, sizeof(frame), MSG_NOSIGNAL | MSG_DONTWAIT) < 0) { /* shown by the end of it */ }
    }
  }
}

void HostLinks::run() {
  std::vector<pollfd> polled;
  auto last_tick = Clock::now();
  while (!is_closing_) {
    polled.assign(1, {wake_, POLLIN, 0});
    const auto watch = [&](const auto& end) {
      polled.push_back({end.closed_at == Clock::time_point{} ? end.fd : -1, POLLIN, 0});
    };
    for (const Source& source : sources_) watch(source);
    for (const Lead& lead : leads_) watch(lead);
    poll(polled.data(), polled.size(), kTickMs);
    for (size_t i = 0; i < sources_.size(); ++i) {
      if (polled[1 + i].revents) read_all(sources_[i]);
    }
    for (size_t i = 0; i < leads_.size(); ++i) {
      // Nothing is ever sent this way: it is the end of the connection.
      if (polled[1 + sources_.size() + i].revents) leads_[i].closed_at = Clock::now();
    }
    const auto now = Clock::now();
    const int64_t elapsed_ms = std::chrono::duration_cast<std::chrono::milliseconds>(now - last_tick).count();
    if (elapsed_ms < kTickMs) continue;
    last_tick = now;
    tick(std::min<int64_t>(elapsed_ms, 2 * kTickMs));  // time in which this process did not run does not count
  }
}

void HostLinks::tick(int64_t elapsed_ms) {
  beat();
  for (Source& source : sources_) {
    if (source.closed_at != Clock::time_point{}) {
      end(source.rank, source.closed_at);
    } else if ((silence_ms_[source.rank] += elapsed_ms) * 1000 > timeout_us_) {
      group_.abort_silent(source.rank);
    }
  }
  for (Lead& lead : leads_) {
    if (lead.closed_at != Clock::time_point{}) end(lead.rank, lead.closed_at);
  }
}

void HostLinks::end(int rank, Clock::time_point& closed_at) {
  if (group_.aborted() < 0 && Clock::now() > closed_at + kGrace) group_.abort(rank);
}

void HostLinks::read_all(Source& source) {
  constexpr int64_t kHead = sizeof(Frame);
  const int64_t most = kMaxBytesPerCapacity * group_.capacity() + kMaxMailBytes;
  for (;;) {
    const bool is_head = source.have < kHead;
    char* to = is_head ? reinterpret_cast<char*>(&source.frame) + source.have : source.body.data() + source.have - kHead;
    const int64_t left = (is_head ? kHead : kHead + source.frame.bytes) - source.have;
    const ssize_t got = recv(source.fd, to, left, MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return;
    if (got < 0 && errno == EINTR) continue;
    if (got <= 0) {
      source.closed_at = Clock::now();
      return;
    }
    silence_ms_[source.rank] = 0;
    source.have += got;
    if (source.have < kHead) continue;
    if (source.have == kHead) {
      if (source.frame.magic != kMagic || source.frame.bytes < 0 || source.frame.bytes > most) break;
      source.body.resize(source.frame.bytes);
    }
    if (source.have < kHead + source.frame.bytes) continue;
    if (sum_of(source.frame, source.body.data()) != source.frame.sum || !deliver(source)) break;
    source.have = 0;
  }
  group_.abort_damaged(source.rank);
  source.closed_at = Clock::now();
}

// Whether it was in turn, and within the group's memory.
bool HostLinks::deliver(Source& source) {
  const Frame& frame = source.frame;
  const char* body = source.body.data();
  const bool has_rank = frame.rank >= 0 && frame.rank < group_.size();
  switch (frame.kind) {
    case kBeat:
      return frame.bytes == 0;
    case kOperation: {
      if (frame.num_parts < 0 || frame.num_parts > frame.bytes / static_cast<int64_t>(sizeof(Segment))) return false;
      const int64_t described = frame.num_parts * static_cast<int64_t>(sizeof(Segment));
      std::vector<Segment> parts(frame.num_parts);
      if (described) std::memcpy(parts.data(), body, described);
      return group_.take_operation(source.rank, frame.number, parts, body + described, frame.bytes - described);
    }
    case kMail:
      return has_rank && group_.take_mail(source.rank, frame.rank, frame.number, body, frame.bytes);
    case kTaken:
      return has_rank && frame.bytes == 0 && group_.take_taken(frame.rank, source.rank, frame.number);
    case kAbort:
      if (has_rank) group_.abort_here(frame.rank);
      return has_rank;
    default:
      return false;
  }
}

}  // namespace quire
