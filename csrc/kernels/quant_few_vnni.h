// A few rows times one panel of int8 or int4 weights with VNNI: see quant_few.h.
#pragma once

namespace quire::QUIRE_TIER {

constexpr int64_t kFewByteRows = 4, kFewNibbleRows = 2;  // more nibbles are slower: instructions decide

// sums[R][kDotCols] = starts + q . the panel's bytes. A row has several sums, as the instruction has a latency of four.
template <int R>
[[gnu::noinline]] static void dot_bytes_of_panel(const int8_t* q, int64_t q_stride, const WeightPanel& panel,
                                                 const int32_t* starts, int32_t* sums) {
  constexpr int kQuads = 4;  // of a step, each to sums of its own
  __m512i parts[kQuads][R];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    parts[0][r] = _mm512_set1_epi32(starts[r]);
#pragma GCC unroll 4
    for (int i = 1; i < kQuads; ++i) parts[i][r] = _mm512_setzero_si512();
  }
  for (int64_t at = 0; at < panel.bytes; at += kInt8TileK * kPanelSize) {
    const uint8_t* ahead = panel.ahead_of(at);
    const uint8_t* w = panel.packed + at;
#pragma GCC unroll 16
    for (int quad = 0; quad < kInt8TileK / 4; ++quad) {
      prefetch_l1(ahead + quad * 64);
      const __m512i codes = _mm512_loadu_si512(w + quad * 64);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) add_dot(parts[quad % kQuads][r], codes, q + r * q_stride + 4 * quad);
    }
    q += kInt8TileK;
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) {
    const __m512i low = _mm512_add_epi32(parts[0][r], parts[1][r]), high = _mm512_add_epi32(parts[2][r], parts[3][r]);
    _mm512_storeu_si512(sums + r * kDotCols, _mm512_add_epi32(low, high));
  }
}

// totals[R][kDotCols] = the sums over groups of (start + q . codes) * scale.
template <int R>
[[gnu::noinline]] static void dot_nibbles_of_panel(const int8_t* q, int64_t q_stride, const WeightPanel& panel,
                                                   const GroupScales& of, float* totals) {
  const __m512i mask = _mm512_set1_epi8(15);
  F16 sums[R];
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) sums[r] = zero();
  int64_t at = 0;
  for (int64_t g = 0; g < of.groups; ++g) {
    __m512i low[R], high[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      low[r] = _mm512_set1_epi32(of.starts[r * of.groups + g]);
      high[r] = _mm512_setzero_si512();
    }
    prefetch_l1(of.scales + g * kPanelSize + kFetchAhead / 8);
    for (int64_t u = 0; u < of.units; ++u, at += kInt4UnitBytes, q += kInt4UnitK) {
      const uint8_t* ahead = panel.ahead_of(at);
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        prefetch_l1(ahead + i * 64);
        const __m512i pairs = _mm512_loadu_si512(panel.packed + at + i * 64);
        const __m512i first = _mm512_and_si512(pairs, mask);
        const __m512i second = _mm512_and_si512(_mm512_srli_epi16(pairs, 4), mask);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          add_dot(low[r], first, q + r * q_stride + 4 * i);
          add_dot(high[r], second, q + r * q_stride + 4 * i + 16);
        }
      }
    }
    const F16 scale = load(of.scales + g * kPanelSize);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) sums[r] = sums[r] + F16{_mm512_cvtepi32_ps(_mm512_add_epi32(low[r], high[r]))} * scale;
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r) store(totals + r * kDotCols, sums[r]);
}

template <int R>
struct FewBytes {
  static constexpr auto run = dot_bytes_of_panel<R>;
};
template <int R>
struct FewNibbles {
  static constexpr auto run = dot_nibbles_of_panel<R>;
};

static inline void dot_few_bytes(const InputRows& rows, const WeightPanel& panel, const int32_t* starts, int32_t* sums) {
  with_rows<FewBytes>(rows.count, rows.q, rows.stride, panel, starts, sums);
}
static inline void dot_few_nibbles(const InputRows& rows, const WeightPanel& panel, const GroupScales& of, float* totals) {
  with_rows<FewNibbles>(rows.count, rows.q, rows.stride, panel, of, totals);
}

}  // namespace quire::QUIRE_TIER
