// A few rows times one panel of int8 or int4 weights on AVX2: see quant_few.h.
//
// A panel is two registers wide; both are taken together, so that inputs are broadcast once.
// Of more than kRowsOfBlock rows, each further block of rows finds the panel in the caches.
#pragma once

#include <immintrin.h>

namespace quire::QUIRE_TIER {

constexpr int64_t kFewByteRows = kMaxTaskRows, kFewNibbleRows = kMaxTaskRows;  // faster for any number of rows
constexpr int64_t kRowsOfBlock = 4;  // that have registers

// sums[R][kDotCols] = q . (the panel's bytes - 128).
template <int R>
[[gnu::noinline]] static void dot_bytes_of_panel(const int8_t* q, int64_t q_stride, const WeightPanel& panel,
                                                 int32_t* sums) {
  __m256i totals[R][2];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) totals[r][0] = totals[r][1] = _mm256_setzero_si256();
  for (int64_t at = 0; at < panel.bytes; at += 4 * kPanelSize, q += 4) {
    prefetch_l1(panel.ahead_of(at));
    add_bytes<R>(q, q_stride, load_codes(panel.packed + at), load_codes(panel.packed + at + 32), totals);
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    store_codes(sums + r * kDotCols, totals[r][0]);
    store_codes(sums + r * kDotCols + 8, totals[r][1]);
  }
}

// pairs[r][half] += the sums of two products of 8 k, a line of a unit.
template <int R>
[[gnu::always_inline]] static inline void add_nibbles(const int8_t* q, int64_t q_stride, const uint8_t* packed,
                                                      __m256i (&pairs)[R][2]) {
  const __m256i mask = _mm256_set1_epi8(15);
  const __m256i low = load_codes(packed), high = load_codes(packed + 32);
  add_pairs<R>(q, q_stride, _mm256_and_si256(low, mask), _mm256_and_si256(high, mask), pairs);
  add_pairs<R>(q + 16, q_stride, _mm256_and_si256(_mm256_srli_epi16(low, 4), mask),
               _mm256_and_si256(_mm256_srli_epi16(high, 4), mask), pairs);
}

// totals[R][kDotCols] = the sums over groups of (start + q . codes) * scale.
template <int R>
[[gnu::noinline]] static void dot_nibbles_of_panel(const int8_t* q, int64_t q_stride, const WeightPanel& panel,
                                                   const GroupScales& of, float* totals) {
  const __m256i ones = _mm256_set1_epi16(1);
  F16 sums[R];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) sums[r] = zero();
  int64_t at = 0;
  for (int64_t g = 0; g < of.groups; ++g) {
    __m256i in_group[R][2];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) in_group[r][0] = in_group[r][1] = _mm256_set1_epi32(of.starts[r * of.groups + g]);
    prefetch_l1(of.scales + g * kPanelSize + kFetchAhead / 8);
    for (int64_t u = 0; u < of.units; ++u, at += kInt4UnitBytes, q += kInt4UnitK) {
      __m256i pairs[R][2];
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) pairs[r][0] = pairs[r][1] = _mm256_setzero_si256();
      const uint8_t* ahead = panel.ahead_of(at);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        prefetch_l1(ahead + i * kCacheLine);
        add_nibbles<R>(q + 4 * i, q_stride, panel.packed + at + i * 64, pairs);
      }
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) {
        in_group[r][0] = _mm256_add_epi32(in_group[r][0], _mm256_madd_epi16(pairs[r][0], ones));
        in_group[r][1] = _mm256_add_epi32(in_group[r][1], _mm256_madd_epi16(pairs[r][1], ones));
      }
    }
    const F16 scale = load(of.scales + g * kPanelSize);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      sums[r] = sums[r] + F16{_mm256_cvtepi32_ps(in_group[r][0]), _mm256_cvtepi32_ps(in_group[r][1])} * scale;
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) store(totals + r * kDotCols, sums[r]);
}

// fn(first row, rows, q) for blocks of rows that differ by one at most.
template <class Fn>
static inline void each_few_block(const InputRows& rows, const Fn& fn) {
  const int64_t num_blocks = ceil_div(rows.count, kRowsOfBlock);
  for (int64_t i = 0; i < num_blocks; ++i) {
    const int64_t m = i * rows.count / num_blocks;
    fn(m, (i + 1) * rows.count / num_blocks - m, rows.q + m * rows.stride);
  }
}

// The sum of (byte - 128) * q needs no start.
static inline void dot_few_bytes(const InputRows& rows, const WeightPanel& panel, const int32_t*, int32_t* sums) {
  each_few_block(rows, [&](int64_t m, int64_t count, const int8_t* q) {
    int32_t* out = sums + m * kDotCols;
    switch (count) {
      case 1: return dot_bytes_of_panel<1>(q, rows.stride, panel, out);
      case 2: return dot_bytes_of_panel<2>(q, rows.stride, panel, out);
      case 3: return dot_bytes_of_panel<3>(q, rows.stride, panel, out);
      default: return dot_bytes_of_panel<4>(q, rows.stride, panel, out);
    }
  });
}

static inline void dot_few_nibbles(const InputRows& rows, const WeightPanel& panel, const GroupScales& of, float* totals) {
  each_few_block(rows, [&](int64_t m, int64_t count, const int8_t* q) {
    const GroupScales scales{of.units, of.scales, of.starts + m * of.groups, of.groups};
    float* out = totals + m * kDotCols;
    switch (count) {
      case 1: return dot_nibbles_of_panel<1>(q, rows.stride, panel, scales, out);
      case 2: return dot_nibbles_of_panel<2>(q, rows.stride, panel, scales, out);
      case 3: return dot_nibbles_of_panel<3>(q, rows.stride, panel, scales, out);
      default: return dot_nibbles_of_panel<4>(q, rows.stride, panel, scales, out);
    }
  });
}

}  // namespace quire::QUIRE_TIER
