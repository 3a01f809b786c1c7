// The operations of a communicator. Each is a kernel like others: it can be recorded in a step and replayed.
#include <cstring>
#include <type_traits>

#include "quire/communicator.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace quire {
namespace {

constexpr int64_t kLargeBytes = 256 << 10;  // from here on several threads copy
// From here on a copy goes past the caches of the writer: the reader is another core, and it would push out weights.
constexpr int64_t kPastCachesBytes = 2 << 20;
constexpr int64_t kSumBlock = 128;  // elements summed at a time

template <class Body>
void run_parts(Pool& pool, int64_t num_parts, const Body& body) {
  const auto task = [](void* context, int64_t part, int) { (*static_cast<const Body*>(context))(part); };
  pool.run(num_parts, task, const_cast<void*>(static_cast<const void*>(&body)));
}

void copy_past_caches(char* to, const char* from, int64_t bytes) {
#if defined(__x86_64__)
  const int64_t head = min_i64(bytes, -reinterpret_cast<intptr_t>(to) & 15);
  std::memcpy(to, from, head);
  int64_t done = head;
  for (; done + 64 <= bytes; done += 64) {
    for (int64_t i = 0; i < 64; i += 16) {
      const __m128i value = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + done + i));
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + done + i), value);
    }
  }
  std::memcpy(to + done, from + done, bytes - done);
  _mm_sfence();
#else
  std::memcpy(to, from, bytes);
#endif
}

// Rows of `bytes` bytes each, by all threads where they are many.
void copy_rows(Pool& pool, char* to, int64_t to_stride, const char* from, int64_t from_stride, int64_t num_rows,
               int64_t bytes, bool is_shared) {
  if (num_rows <= 0 || bytes <= 0) return;
  if (num_rows * bytes < kLargeBytes) {
    for (int64_t row = 0; row < num_rows; ++row) std::memcpy(to + row * to_stride, from + row * from_stride, bytes);
    return;
  }
  const bool is_past_caches = is_shared && num_rows * bytes >= kPastCachesBytes;
  const int64_t num_parts = min_i64(num_rows, 4 * pool.num_threads());
  run_parts(pool, num_parts, [&](int64_t part) {
    const int64_t end = num_rows * (part + 1) / num_parts;
    for (int64_t row = num_rows * part / num_parts; row < end; ++row) {
      char* target = to + row * to_stride;
      is_past_caches ? copy_past_caches(target, from + row * from_stride, bytes)
                : static_cast<void>(std::memcpy(target, from + row * from_stride, bytes));
    }
  });
}

float to_float(bf16 value) {
  const uint32_t bits = static_cast<uint32_t>(value.bits) << 16;
  float result;
  std::memcpy(&result, &bits, sizeof result);
  return result;
}
float to_float(float value) { return value; }

void store(float value, float* out) { *out = value; }
void store(float value, bf16* out) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  const bool is_nan = value != value;
  out->bits = static_cast<uint16_t>(is_nan ? (bits >> 16) | 0x40 : (bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

// The sum of `size` arrays that lie `stride` elements apart, as a tree over their numbers.
template <class T>
void sum_pairwise(const T* parts, int64_t stride, int size, T* out, int64_t count) {
  float sums[kMaxRanks][kSumBlock];
  for (int64_t begin = 0; begin < count; begin += kSumBlock) {
    const int64_t num = min_i64(kSumBlock, count - begin);
    for (int part = 0; part < size; ++part) {
      for (int64_t i = 0; i < num; ++i) sums[part][i] = to_float(parts[part * stride + begin + i]);
    }
    for (int step = 1; step < size; step *= 2) {
      for (int part = 0; part + step < size; part += 2 * step) {
        for (int64_t i = 0; i < num; ++i) sums[part][i] += sums[part + step][i];
      }
    }
    for (int64_t i = 0; i < num; ++i) store(sums[0][i], out + begin + i);
  }
}

template <class T>
void reduce_as(const ReduceArgs& args) {
  Communicator& group = *args.communicator;
  T* data = static_cast<T*>(args.data);
  const int size = group.size();
  const int64_t most = group.capacity() / size / kCacheLine * kCacheLine / static_cast<int64_t>(sizeof(T));
  // Scattered: a round has a piece of every rank's part.
  const int64_t num_parts = args.is_scattered ? size : 1;
  const int64_t part_size = args.num_elements / num_parts, round_size = most / num_parts;
  for (int64_t begin = 0; begin < part_size; begin += round_size) {
    const int64_t num = min_i64(round_size, part_size - begin);
    T* buffer = reinterpret_cast<T*>(group.begin(args.is_scattered ? "reduce_scatter" : "all_reduce"));
    group.wait_for_readers();
    for (int64_t part = 0; part < num_parts; ++part) {
      std::memcpy(buffer + group.rank() * most + part * num, data + part * part_size + begin, num * sizeof(T));
    }
    const int64_t item = sizeof(T), row = num_parts * num * item;
    group.wrote(group.rank() * most * item, row, 1, row);
    group.arrive();
    group.wait_for_all();
    const int64_t own = args.is_scattered ? group.rank() * num : 0;
    // Scattered: to the rank's own part, which no later round reads elsewhere; moved to the front below.
    T* out = data + (args.is_scattered ? group.rank() * part_size : 0) + begin;
    sum_pairwise(buffer + own, most, size, out, num);
  }
  if (args.is_scattered && group.rank() > 0) {
    std::memcpy(static_cast<void*>(data), data + group.rank() * part_size, part_size * sizeof(T));
  }
}

}  // namespace

void gather(Pool& pool, const GatherArgs& args) {
  const BusyTime busy(args.communicator);
  Communicator& group = *args.communicator;
  const int rank = group.rank();
  const int64_t width = args.starts[group.size()], first = args.starts[rank], own = args.starts[rank + 1] - first;
  if (width == 0) return;
  const bool is_reader = args.root < 0 || args.root == rank, is_writer = args.root != rank;
  const int64_t most = group.capacity() / width;
  for (int64_t begin = 0; begin < args.num_rows; begin += most) {
    const int64_t num = min_i64(most, args.num_rows - begin);
    const char* source = args.own + begin * args.own_stride;
    char* buffer = group.begin("all_gather");
    if (is_writer) {
      group.wait_for_readers();
      copy_rows(pool, buffer + first, width, source, args.own_stride, num, own, true);
      group.wrote(first, width, num, own, args.root);
    }
    group.arrive();
    if (!is_reader) continue;
    group.wait_for_all();
    char* out = args.out + begin * args.out_stride;
    if (args.root < 0) {
      copy_rows(pool, out, args.out_stride, buffer, width, num, width, false);
      continue;
    }
    // The root's own columns did not go through the buffer.
    if (out + first != source) copy_rows(pool, out + first, args.out_stride, source, args.own_stride, num, own, false);
    copy_rows(pool, out, args.out_stride, buffer, width, num, first, false);
    copy_rows(pool, out + first + own, args.out_stride, buffer + first + own, width, num, width - first - own, false);
  }
}

void gather_rows(Pool& pool, const GatherRowsArgs& args) {
  const BusyTime busy(args.communicator);
  Communicator& group = *args.communicator;
  const int64_t most = group.capacity() / args.row_bytes;
  for (int64_t begin = 0; begin < args.num_rows; begin += most) {
    const int64_t num = min_i64(most, args.num_rows - begin);
    char* buffer = group.begin("a lookup of tokens");
    group.wait_for_readers();
    for (int64_t row = 0; row < num; ++row) {
      const int64_t id = args.ids[begin + row] - args.first;
      if (id < 0 || id >= args.count) continue;
      std::memcpy(buffer + row * args.row_bytes, args.own + (begin + row) * args.row_bytes, args.row_bytes);
      group.wrote(row * args.row_bytes, args.row_bytes, 1, args.row_bytes);
    }
    group.arrive();
    group.wait_for_all();
    copy_rows(pool, args.out + begin * args.row_bytes, args.row_bytes, buffer, args.row_bytes, num, args.row_bytes,
              false);
  }
}

const char* find_fault(const GatherGroupsArgs& args) {
  if (args.starts[0] != 0 || args.starts[args.num_groups] != args.num_rows) {
    return "starts do not reach from 0 to the last row";
  }
  for (int64_t group = 0; group < args.num_groups; ++group) {
    if (args.starts[group + 1] < args.starts[group]) return "starts fall";
  }
  return nullptr;
}

void gather_groups(Pool& pool, const GatherGroupsArgs& args) {
  const BusyTime busy(args.communicator);
  Communicator& group = *args.communicator;
  const int64_t bytes = args.row_bytes, most = group.capacity() / bytes;
  const int64_t first = args.starts[args.firsts[group.rank()]], end = args.starts[args.firsts[group.rank() + 1]];
  for (int64_t begin = 0; begin < args.num_rows; begin += most) {
    const int64_t stop = min_i64(begin + most, args.num_rows);
    const int64_t own_begin = min_i64(max_i64(first, begin), stop), own_end = max_i64(min_i64(end, stop), own_begin);
    char* buffer = group.begin("a gather of experts' rows");
    char* rows = args.rows + begin * bytes;
    group.wait_for_readers();
    const int64_t offset = (own_begin - begin) * bytes;
    copy_rows(pool, buffer + offset, bytes, rows + offset, bytes, own_end - own_begin, bytes, true);
    group.wrote(offset, bytes, own_end - own_begin, bytes);
    group.arrive();
    group.wait_for_all();
    copy_rows(pool, rows, bytes, buffer, bytes, own_begin - begin, bytes, false);
    const int64_t behind = (own_end - begin) * bytes;
    copy_rows(pool, rows + behind, bytes, buffer + behind, bytes, stop - own_end, bytes, false);
  }
}

void local_ids(Pool&, const LocalIdsArgs& args) {
  for (int64_t i = 0; i < args.num_ids; ++i) {
    const int64_t id = args.ids[i] - args.first;
    args.out[i] = id < 0 || id >= args.count ? 0 : id;
  }
}

void reduce(Pool&, const ReduceArgs& args) {
  const BusyTime busy(args.communicator);
  args.dtype == DType::f32 ? reduce_as<float>(args) : reduce_as<bf16>(args);
}

void broadcast(Pool& pool, const BroadcastArgs& args) {
  Communicator& group = *args.communicator;
  for (int64_t begin = 0; begin < args.bytes; begin += group.capacity()) {
    const int64_t num = min_i64(group.capacity(), args.bytes - begin);
    char* buffer = group.begin("broadcast");
    if (group.rank() == args.root) {
      group.wait_for_readers();
      copy_rows(pool, buffer, num, args.data + begin, num, 1, num, true);
      group.wrote(0, num, 1, num);
      group.arrive();
      continue;
    }
    group.arrive();
    group.wait_for(args.root, args.is_patient);
    copy_rows(pool, args.data + begin, num, buffer, num, 1, num, false);
  }
}

void send(Pool&, const SendArgs& args) {
  const BusyTime busy(args.communicator);
  args.communicator->send(args.data, args.bytes, args.to);
}

void receive(Pool&, const ReceiveArgs& args) {
  if (args.is_patient) return args.communicator->receive(args.data, args.bytes, args.from, true);
  const BusyTime busy(args.communicator);
  args.communicator->receive(args.data, args.bytes, args.from, false);
}

void all_to_all(Pool& pool, const AllToAllArgs& args) {
  const BusyTime busy(args.communicator);
  Communicator& group = *args.communicator;
  const int64_t size = group.size(), rank = group.rank();
  const int64_t most = group.capacity() / (size * size) / kCacheLine * kCacheLine;
  for (int64_t begin = 0; begin < args.part_bytes; begin += most) {
    const int64_t num = min_i64(most, args.part_bytes - begin);
    char* buffer = group.begin("all_to_all");
    group.wait_for_readers();
    copy_rows(pool, buffer + rank * size * most, most, args.data + begin, args.part_bytes, size, num, true);
    for (int to = 0; to < size; ++to) group.wrote((rank * size + to) * most, num, 1, num, to);
    group.arrive();
    group.wait_for_all();
    copy_rows(pool, args.out + begin, args.part_bytes, buffer + rank * most, size * most, size, num, false);
  }
}

void barrier(Pool&, Communicator* const& communicator) {
  communicator->begin("barrier");
  communicator->arrive();
  communicator->wait_for_all();
}

}  // namespace quire
