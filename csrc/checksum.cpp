#include "quire/checksum.h"

#include <cstring>
#include <vector>

#include "quire/types.h"

namespace quire {
namespace {

constexpr int64_t kChunk = int64_t{1} << 20;
constexpr int kLanes = 8;
constexpr uint64_t kOdd = 0x9e3779b97f4a7c15u;  // 2 ** 64 / golden ratio

// One word into one lane. Each step is invertible, so two different words never meet in the same state; the shift
// carries the high bits, which a product moves nowhere, to where the next product spreads them.
inline uint64_t mix(uint64_t lane, uint64_t word) {
  lane = (lane ^ word) * kOdd;
  return lane ^ lane >> 32;
}

inline uint64_t finish(uint64_t x) {
  x = (x ^ x >> 32) * kOdd;
  x = (x ^ x >> 29) * kOdd;
  return x ^ x >> 32;
}

// At most one chunk. Eight lanes, because a product takes several cycles and one can start in each.
uint64_t checksum_chunk(const uint8_t* p, int64_t bytes) {
  uint64_t lanes[kLanes];
  for (int i = 0; i < kLanes; ++i) lanes[i] = kOdd * (2 * i + 1);
  uint64_t block[kLanes];
  int64_t done = 0;
  for (; done + 64 <= bytes; done += 64) {
    std::memcpy(block, p + done, 64);
    for (int i = 0; i < kLanes; ++i) lanes[i] = mix(lanes[i], block[i]);
  }
  if (done < bytes) {
    std::memset(block, 0, sizeof(block));
    std::memcpy(block, p + done, bytes - done);
    for (int i = 0; i < kLanes; ++i) lanes[i] = mix(lanes[i], block[i]);
  }
  uint64_t sum = static_cast<uint64_t>(bytes);
  for (int i = 0; i < kLanes; ++i) sum = mix(sum, lanes[i]);
  return finish(sum);
}

}  // namespace

uint64_t checksum(Pool& pool, const void* data, int64_t bytes) {
  struct Context {
    const uint8_t* data;
    int64_t bytes;
    std::vector<uint64_t> sums;
  } context{static_cast<const uint8_t*>(data), bytes, std::vector<uint64_t>(ceil_div(bytes, kChunk))};
  const TaskFn chunk = [](void* pointer, int64_t task, int) {
    Context& c = *static_cast<Context*>(pointer);
    c.sums[task] = checksum_chunk(c.data + task * kChunk, min_i64(kChunk, c.bytes - task * kChunk));
  };
  pool.run(static_cast<int64_t>(context.sums.size()), chunk, &context);
  uint64_t sum = static_cast<uint64_t>(bytes);
  for (const uint64_t one : context.sums) sum = mix(sum, one);
  return finish(sum);
}

uint64_t checksum_alone(const void* data, int64_t bytes) {
  uint64_t sum = static_cast<uint64_t>(bytes);
  for (int64_t done = 0; done < bytes; done += kChunk) {
    sum = mix(sum, checksum_chunk(static_cast<const uint8_t*>(data) + done, min_i64(kChunk, bytes - done)));
  }
  return finish(sum);
}

}  // namespace quire
