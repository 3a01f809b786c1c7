// AVX-512 VNNI: up to six rows of four panels in registers, so that weights are read from L1 once per six rows.
#pragma once

#include <immintrin.h>

namespace quire::QUIRE_TIER {

constexpr int64_t kBlockQuads = 64;  // 4 KB of each panel: a block of four stays in L1
constexpr int64_t kMaxDotRows = 6;

#if !defined(QUIRE_TIER_AMX)
struct DotScope {
  DotScope(int64_t, int64_t) {}
};
#endif

static inline __m512i quad_at(const int8_t* q) {
  int32_t quad;
  __builtin_memcpy(&quad, q, 4);
  return _mm512_set1_epi32(quad);
}

// R rows of P panels. While at it, the next weights of F panels from `next` on are fetched.
template <int R, int P, int F>
static inline void dot_rows(const DotBlock& block, const int8_t* q, const uint8_t* w, int32_t* out,
                            const uint8_t* next) {
  const int64_t q_stride = block.q_stride, w_stride = block.w_stride;
  __m512i sums[R][P];
  for (int r = 0; r < R; ++r) {
    for (int p = 0; p < P; ++p) sums[r][p] = _mm512_loadu_si512(out + r * kDotCols + p * kPanelSize);
  }
  for (int64_t k = 0; k < block.quads; ++k, q += 4, w += 64) {
    __m512i b[P];
    for (int p = 0; p < P; ++p) b[p] = _mm512_loadu_si512(w + p * w_stride);
    for (int f = 0; f < F; ++f) prefetch_l2(next + f * w_stride + k * 64);
    for (int r = 0; r < R; ++r) {
      const __m512i a = quad_at(q + r * q_stride);
      for (int p = 0; p < P; ++p) sums[r][p] = _mm512_dpbusd_epi32(sums[r][p], b[p], a);
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int p = 0; p < P; ++p) _mm512_storeu_si512(out + r * kDotCols + p * kPanelSize, sums[r][p]);
  }
}

template <int P, int F>
static inline void dot_some_rows(const DotBlock& block, int64_t m, int64_t rows, int64_t p, const uint8_t* next) {
  const int8_t* q = block.q + m * block.q_stride;
  const uint8_t* w = block.w + p * block.w_stride;
  int32_t* out = block.sums + m * kDotCols + p * kPanelSize;
  switch (rows) {
    case 1: return dot_rows<1, P, F>(block, q, w, out, next);
    case 2: return dot_rows<2, P, F>(block, q, w, out, next);
    case 3: return dot_rows<3, P, F>(block, q, w, out, next);
    case 4: return dot_rows<4, P, F>(block, q, w, out, next);
    case 5: return dot_rows<5, P, F>(block, q, w, out, next);
    default: return dot_rows<6, P, F>(block, q, w, out, next);
  }
}

template <bool kNibbles>
static inline void dot_block(const DotBlock& block) {
  // Row blocks of equal size, and the next weights fetched over the first of them.
  const int64_t num_blocks = ceil_div(block.rows, kMaxDotRows);
  const int64_t rows_per_block = ceil_div(block.rows, num_blocks);
  const int64_t fetched = block.next == nullptr ? 0 : num_blocks == 1 ? 4 : num_blocks <= 3 ? 2 : 1;
  for (int64_t i = 0, m = 0; m < block.rows; ++i, m += rows_per_block) {
    const int64_t rows = min_i64(rows_per_block, block.rows - m);
    if (block.panels < kDotPanels) {
      for (int64_t p = 0; p < block.panels; ++p) dot_some_rows<1, 0>(block, m, rows, p, nullptr);
      continue;
    }
    const uint8_t* next = block.next + i * fetched * block.w_stride;
    if (fetched == 0 || i * fetched >= kDotPanels) {
      dot_some_rows<4, 0>(block, m, rows, 0, nullptr);
    } else if (fetched == 4) {
      dot_some_rows<4, 4>(block, m, rows, 0, next);
    } else if (fetched == 2) {
      dot_some_rows<4, 2>(block, m, rows, 0, next);
    } else {
      dot_some_rows<4, 1>(block, m, rows, 0, next);
    }
  }
}

}  // namespace quire::QUIRE_TIER
