// What the machine gives at most, for benchmarks to divide by: reading memory, and products from registers or level 1.
#include "kernels/gemm_lanes.h"
#include "kernels/gemm_parts.h"
#include "simd/bf16_dot.h"
#if defined(QUIRE_TIER_AMX)
#include "simd/tile.h"
#endif

namespace quire::QUIRE_TIER {
namespace {

constexpr int64_t kChunkBytes = 1 << 20;
constexpr int64_t kStepBytes = 1024;
constexpr int64_t kAheadOfStep = 4096;

// Keeps a value, hence what it was made of.
template <class T>
inline void keep(const T& value) {
  asm volatile("" ::"m"(value) : "memory");
}

// That many streams, 1 KB of each in turn, through 1 MB, fetched 4 KB ahead. One stream reads the chunk from end to end.
void read_chunk(const char* chunk, int64_t num_streams) {
  const int64_t stream_bytes = kChunkBytes / num_streams;
  Lanes sums[8];
  for (Lanes& sum : sums) sum = lanes_of(0.0f);
  for (int64_t at = 0; at < stream_bytes; at += kStepBytes) {
    for (int64_t stream = 0; stream < num_streams; ++stream) {
      const char* from = chunk + stream * stream_bytes + at;
      for (int64_t i = 0; i < kStepBytes; i += 64) prefetch_l2(from + kAheadOfStep + i);
      const float* values = reinterpret_cast<const float*>(from);
      for (int64_t i = 0; i < kStepBytes / 4; i += 8 * kLanes) {
        for (int s = 0; s < 8; ++s) sums[s] = lanes_add(sums[s], lanes_load(values + i + s * kLanes));
      }
    }
  }
  for (Lanes& sum : sums) keep(sum);
}

constexpr int kNumChains = 12;

double float32_round(int64_t steps) {
  Lanes sums[kNumChains], a = lanes_of(0.9999f), b = lanes_of(1e-4f);
  for (int i = 0; i < kNumChains; ++i) sums[i] = lanes_of(static_cast<float>(i));
  for (int64_t step = 0; step < steps; ++step) {
    for (int i = 0; i < kNumChains; ++i) sums[i] = lanes_fma(sums[i], a, b);
  }
  for (Lanes& sum : sums) keep(sum);
  return 2.0 * kNumChains * kLanes * static_cast<double>(steps);
}

#if defined(QUIRE_TIER_AMX)

// Random tiles from level 1: power, and so the frequency, depends on the data.
void fill_random(uint32_t* words, int64_t n, uint32_t mask, uint32_t base) {
  uint32_t state = 12345;
  for (int64_t i = 0; i < n; ++i) {
    state = state * 1664525u + 1013904223u;
    words[i] = ((state >> 3 ^ state << 7) & mask) | base;
  }
}

template <bool kIsInt8>
double tile_round(int64_t steps) {
  constexpr int kDepth = 8;  // tiles of each operand: 32 KB
  alignas(64) static thread_local uint32_t tiles[4 * kDepth][256];
  // bfloat16: random signs and mantissas near 1.
  fill_random(tiles[0], 4 * kDepth * 256, kIsInt8 ? 0xffffffffu : 0x80ff80ffu, kIsInt8 ? 0 : 0x3f003f00u);
  TileConfig config;
  for (int tile = 0; tile < 8; ++tile) config.set(tile, 16, 64);
  tile_configure(config);
  tile_zero<0>();
  tile_zero<1>();
  tile_zero<2>();
  tile_zero<3>();
  for (int64_t step = 0; step < steps; ++step) {
    const uint32_t(*at)[256] = tiles + 4 * (step % kDepth);
    tile_load<4>(at[0], 64);
    tile_load<5>(at[1], 64);
    tile_load<6>(at[2], 64);
    tile_load<7>(at[3], 64);
    if constexpr (kIsInt8) {
      tile_dot_s8s8<0, 4, 6>();
      tile_dot_s8s8<1, 4, 7>();
      tile_dot_s8s8<2, 5, 6>();
      tile_dot_s8s8<3, 5, 7>();
    } else {
      tile_dot_bf16<0, 4, 6>();
      tile_dot_bf16<1, 4, 7>();
      tile_dot_bf16<2, 5, 6>();
      tile_dot_bf16<3, 5, 7>();
    }
  }
  tile_release();
  return 2.0 * 4 * 16 * 16 * (kIsInt8 ? 64 : 32) * static_cast<double>(steps);
}

double bf16_round(int64_t steps) { return tile_round<false>(steps); }
double int8_round(int64_t steps) { return tile_round<true>(steps); }

#elif defined(QUIRE_SIMD_AVX512)

#if defined(QUIRE_TIER_AVX512_BF16)
double bf16_round(int64_t steps) {
  F16 sums[kNumChains], a = set1(1.0f), b = set1(1e-4f);
  for (int i = 0; i < kNumChains; ++i) sums[i] = set1(static_cast<float>(i));
  for (int64_t step = 0; step < steps; ++step) {
    for (int i = 0; i < kNumChains; ++i) sums[i] = add_chain_pairs(a, b, sums[i]);
  }
  for (F16& sum : sums) keep(sum);
  return 2.0 * 2 * 16 * kNumChains * static_cast<double>(steps);
}
#else
double bf16_round(int64_t steps) { return float32_round(steps); }
#endif

double int8_round(int64_t steps) {
  __m512i sums[kNumChains];
  const __m512i a = _mm512_set1_epi32(0x5a37c1e9), b = _mm512_set1_epi32(0x31f7a94c);
  for (int i = 0; i < kNumChains; ++i) sums[i] = _mm512_set1_epi32(i);
  for (int64_t step = 0; step < steps; ++step) {
    for (int i = 0; i < kNumChains; ++i) sums[i] = _mm512_dpbusd_epi32(sums[i], a, b);
  }
  for (__m512i& sum : sums) keep(sum);
  return 2.0 * 64 * kNumChains * static_cast<double>(steps);
}

#elif defined(QUIRE_TIER_AVX2)

double bf16_round(int64_t steps) { return float32_round(steps); }
// Products of bytes, added in pairs, and their sum in 16 bits: what nibbles take.
double int8_round(int64_t steps) {
  constexpr int kNumSums = 6;
  __m256i sums[kNumSums], a = _mm256_set1_epi32(0x5a37c1e9);
  const __m256i b = _mm256_set1_epi32(0x31f7a94c);
  for (int i = 0; i < kNumSums; ++i) sums[i] = _mm256_set1_epi32(i);
  for (int64_t step = 0; step < steps; ++step) {
    for (int i = 0; i < kNumSums; ++i) {
      asm volatile("" : "+x"(a));  // or one product would do for all
      sums[i] = _mm256_add_epi16(sums[i], _mm256_maddubs_epi16(a, b));
    }
  }
  for (__m256i& sum : sums) keep(sum);
  return 2.0 * 32 * kNumSums * static_cast<double>(steps);
}

#else

double bf16_round(int64_t steps) { return float32_round(steps); }
double int8_round(int64_t) { return 0.0; }

#endif

double product_round(Ceiling ceiling, int64_t steps) {
  if (ceiling == Ceiling::float32) return float32_round(steps);
  return ceiling == Ceiling::bf16 ? bf16_round(steps) : int8_round(steps);
}

}  // namespace

double run_ceiling(Pool& pool, Ceiling ceiling, const void* data, int64_t bytes, int64_t steps) {
  if (ceiling == Ceiling::read) {
    const int64_t num_chunks = bytes / kChunkBytes;
    parallel_for(pool, num_chunks, [&](int64_t task, int) {
      read_chunk(static_cast<const char*>(data) + task * kChunkBytes, steps);
    });
    return static_cast<double>(num_chunks * kChunkBytes);
  }
  constexpr int64_t kTasksPerThread = 8;
  const int64_t num_tasks = kTasksPerThread * pool.num_threads();
  double of_task = 0.0;
  parallel_for(pool, num_tasks, [&](int64_t task, int) {
    const double done = product_round(ceiling, steps);
    if (task == 0) of_task = done;
  });
  return of_task * static_cast<double>(num_tasks);
}

}  // namespace quire::QUIRE_TIER
