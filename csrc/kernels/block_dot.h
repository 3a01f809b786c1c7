// Up to 256 inputs of four panels, unpacked once for all rows of a task, times those rows:
//
//   for every group of 32 inputs, in order:
//     f = float(dot of part 0) * a of part 0 [+ float(dot of part 1) * a of part 1] [+ b * sum of each part]
//     total += f * scale of the row's group
//
// Dots are exact integers and may be summed in any order; the floats are these operations in this order on every tier.
#pragma once

#include "kernels/block_formats.h"
#include "kernels/quant_dot.h"

namespace quire::QUIRE_TIER {

constexpr int64_t kChunkGroups = 8;
constexpr int64_t kGroupQuads = kGroupInputs / 4;
constexpr int64_t kPanelFactors = 2 * kChunkGroups * kPanelSize;  // room for two parts of each group
// Panels of a chunk are a line more than 4 KB apart: at the same distance, all would compete for the same cache sets.
constexpr int64_t kPanelCodes = kChunkGroups * kGroupBytes + kCacheLine;

struct BlockChunk {
  const int8_t* q;  // [rows][q_stride]
  int64_t q_stride;
  int64_t rows;
  const float* x_scales;  // [rows][x_scales_stride]
  int64_t x_scales_stride;
  const char* x_sums;  // [rows][x_sums_stride bytes]: of every group and part a start (int32) or a sum (float)
  int64_t x_sums_stride;
  const uint8_t* codes[kChunkGroups];  // of panel 0: [8 quads][16][4]
  PanelOffsets codes_offsets;          // bytes
  int64_t panels;
  int64_t groups;
  const float* a;  // [panels][kPanelFactors]: of every group and part 16 scales
  const float* b;  // the same for minima
  const uint8_t* next;  // fetched meanwhile: next_lines of each panel for every group
  PanelOffsets next_offsets;
  int64_t next_lines;
  float* totals;  // [rows][kDotCols]
  int32_t* sums;  // room for [2][kBlockRows][kDotCols]
};

// A float that may lie anywhere.
[[gnu::always_inline]] static inline F16 float_at(const char* p) {
  float value;
  __builtin_memcpy(&value, p, 4);
  return set1(value);
}

constexpr int64_t kBlockRows = 32;  // whose sums stay in level 1, where they go through memory

template <int kParts, bool kHasMins>
static inline void fill_starts(const BlockChunk& chunk, int64_t m, int64_t rows, int64_t place, int32_t* sums) {
  for (int64_t r = 0; r < rows; ++r) {
    int32_t start = 0;
    if constexpr (!kHasMins) __builtin_memcpy(&start, chunk.x_sums + (m + r) * chunk.x_sums_stride + place * 4, 4);
    for (int64_t n = 0; n < kDotCols; ++n) sums[r * kDotCols + n] = start;
  }
}

// A group of rows m .. m + rows - 1 from the sums of its parts.
template <int kParts, bool kHasMins>
static inline void add_group(const BlockChunk& chunk, int64_t m, int64_t rows, int64_t g) {
  constexpr int64_t kPartSums = kBlockRows * kDotCols;
  for (int64_t p = 0; p < chunk.panels; ++p) {
    const float* a = chunk.a + p * kPanelFactors + g * kParts * kPanelSize;
    const float* b = chunk.b + p * kPanelFactors + g * kParts * kPanelSize;
    F16 scales[kParts], mins[kParts];
    for (int j = 0; j < kParts; ++j) {
      scales[j] = load(a + j * kPanelSize);
      if constexpr (kHasMins) mins[j] = load(b + j * kPanelSize);
    }
    for (int64_t r = 0; r < rows; ++r) {
      const int32_t* sums = chunk.sums + r * kDotCols + p * kPanelSize;
      F16 f = load_int32(sums) * scales[0];
      if constexpr (kParts == 2) f = f + load_int32(sums + kPartSums) * scales[1];
      if constexpr (kHasMins) {
        const char* x_sums = chunk.x_sums + (m + r) * chunk.x_sums_stride + g * kParts * 4;
        for (int j = 0; j < kParts; ++j) f = f + mins[j] * float_at(x_sums + j * 4);
      }
      float* total = chunk.totals + (m + r) * kDotCols + p * kPanelSize;
      store(total, load(total) + f * set1(chunk.x_scales[(m + r) * chunk.x_scales_stride + g]));
    }
  }
}

template <int P>
[[gnu::always_inline]] static inline void fetch_next(const BlockChunk& chunk, int64_t p0, int64_t g) {
  const uint8_t* next = chunk.next + chunk.next_offsets.at(p0) + g * chunk.next_lines * kCacheLine;
  for (int64_t i = 0; i < chunk.next_lines; ++i, next += kCacheLine) {
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) prefetch_l2(next + chunk.next_offsets.at(p));
  }
}

// By way of sums in memory: where a tier has no kernel of its own.
template <class F>
static inline void dot_chunk_by_blocks(const BlockChunk& chunk) {
  constexpr int kParts = F::kParts;
  constexpr int64_t kQuads = kGroupQuads / kParts;
  for (int64_t m = 0; m < chunk.rows; m += kBlockRows) {
    const int64_t rows = min_i64(kBlockRows, chunk.rows - m);
    for (int64_t g = 0; g < chunk.groups; ++g) {
      for (int64_t p = 0; p < chunk.panels && m == 0; ++p) fetch_next<1>(chunk, p, g);
      for (int64_t j = 0; j < kParts; ++j) {
        int32_t* sums = chunk.sums + j * kBlockRows * kDotCols;
        fill_starts<kParts, F::kHasMins>(chunk, m, rows, g * kParts + j, sums);
        dot_codes<F::kMaxCode, kQuads>(DotBlock{chunk.q + m * chunk.q_stride + g * kGroupInputs + j * kQuads * 4, chunk.q_stride,
                                        rows, chunk.codes[g] + j * kQuads * kPlaneBytes, chunk.codes_offsets,
                                        chunk.panels, kQuads, sums, nullptr});
      }
      add_group<kParts, F::kHasMins>(chunk, m, rows, g);
    }
  }
}

}  // namespace quire::QUIRE_TIER

#if defined(QUIRE_SIMD_AVX512)
#include "kernels/block_dot_vnni.h"
#endif

namespace quire::QUIRE_TIER {

// totals += the chunk, whose rows are all of the task.
template <class F>
static inline void dot_chunk(const BlockChunk& chunk) {
#if defined(QUIRE_TIER_AMX)
  if (!goes_to_vnni(chunk.rows)) return dot_chunk_by_blocks<F>(chunk);
#endif
#if defined(QUIRE_SIMD_AVX512)
  vnni_dot_chunk<F::kParts, F::kHasMins>(chunk);
#else
  dot_chunk_by_blocks<F>(chunk);
#endif
}

}  // namespace quire::QUIRE_TIER
