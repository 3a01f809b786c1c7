// AVX-512 VNNI: up to six rows of four panels in registers, three where a group has two parts.
#pragma once

#include "kernels/quant_dot_vnni.h"

namespace quire::QUIRE_TIER {

template <int kParts>
constexpr int kChunkRows = kParts == 1 ? 6 : 3;

namespace {

// Pointers are copied out of the chunk: the compiler would read them again after every store.
template <int R, int P, int kParts, bool kHasMins>
struct ChunkDot {
  static constexpr int64_t kQuads = kGroupQuads / kParts;

  // The sums of one part of a group. `starts`: of row 0; null where they are zero.
  [[gnu::always_inline]] static inline void dot(const int8_t* q, int64_t q_stride, const uint8_t* codes,
                                                const PanelOffsets& offsets, const char* starts, int64_t starts_stride,
                                                __m512i (&sums)[R][P]) {
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const __m512i start = kHasMins ? _mm512_setzero_si512()
                                     : quad_at(reinterpret_cast<const int8_t*>(starts + r * starts_stride));
#pragma GCC unroll 8
      for (int p = 0; p < P; ++p) sums[r][p] = start;
    }
    add_products<R, P, 0>(sums, q, q_stride, codes, offsets, kQuads, nullptr);
  }

  [[gnu::noinline]] static void run(const BlockChunk& chunk, int64_t m, int64_t p0) {
    const int64_t q_stride = chunk.q_stride, groups = chunk.groups;
    const int64_t sums_stride = chunk.x_sums_stride, scales_stride = chunk.x_scales_stride;
    const PanelOffsets offsets = chunk.codes_offsets;
    const int64_t first_panel = offsets.at(p0);
    const int8_t* q = chunk.q + m * q_stride;
    const char* x_sums = chunk.x_sums + m * sums_stride;
    const float* x_scales = chunk.x_scales + m * scales_stride;
    const float *a = chunk.a + p0 * kPanelFactors, *b = chunk.b + p0 * kPanelFactors;
    float* totals = chunk.totals + m * kDotCols + p0 * kPanelSize;
    for (int64_t g = 0; g < groups; ++g) {
      if (m == 0) fetch_next<P>(chunk, p0, g);
      const uint8_t* codes = chunk.codes[g] + first_panel;
      asm("" : "+r"(totals), "+r"(a), "+r"(b));  // or the addresses of all totals are kept, on the stack
      __m512i sums[R][P];
      F16 first[R][P];
      if constexpr (kParts == 2) {
        dot(q, q_stride, codes, offsets, x_sums, sums_stride, sums);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
          for (int p = 0; p < P; ++p) first[r][p] = F16{_mm512_cvtepi32_ps(sums[r][p])} * load(a + p * kPanelFactors);
        }
      }
      constexpr int64_t kLast = kParts - 1;
      dot(q + kLast * kQuads * 4, q_stride, codes + kLast * kQuads * kPlaneBytes, offsets, x_sums + kLast * 4,
          sums_stride, sums);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        const F16 x_scale = set1(x_scales[r * scales_stride]);
#pragma GCC unroll 8
        for (int p = 0; p < P; ++p) {
          F16 f = F16{_mm512_cvtepi32_ps(sums[r][p])} * load(a + p * kPanelFactors + kLast * kPanelSize);
          if constexpr (kParts == 2) f = first[r][p] + f;
          if constexpr (kHasMins) {
#pragma GCC unroll 2
            for (int j = 0; j < kParts; ++j) {
              f = f + load(b + p * kPanelFactors + j * kPanelSize) * float_at(x_sums + r * sums_stride + j * 4);
            }
          }
          float* total = totals + r * kDotCols + p * kPanelSize;
          store(total, load(total) + f * x_scale);
        }
      }
      q += kGroupInputs;
      x_sums += kParts * 4;
      ++x_scales;
      a += kParts * kPanelSize;
      b += kParts * kPanelSize;
    }
  }
};

using RunChunk = void (*)(const BlockChunk&, int64_t, int64_t);

// By the number of rows.
template <int P, int kParts, bool kHasMins>
constexpr RunChunk kRunChunk[] = {
    nullptr,
    ChunkDot<1, P, kParts, kHasMins>::run,
    ChunkDot<2, P, kParts, kHasMins>::run,
    ChunkDot<3, P, kParts, kHasMins>::run,
    ChunkDot<kParts == 1 ? 4 : 3, P, kParts, kHasMins>::run,
    ChunkDot<kParts == 1 ? 5 : 3, P, kParts, kHasMins>::run,
    ChunkDot<kParts == 1 ? 6 : 3, P, kParts, kHasMins>::run,
};

}  // namespace

template <int kParts, bool kHasMins>
static inline void vnni_dot_chunk(const BlockChunk& chunk) {
  // Row blocks of nearly equal size.
  const int64_t rows_per_block = ceil_div(chunk.rows, ceil_div(chunk.rows, kChunkRows<kParts>));
  for (int64_t m = 0; m < chunk.rows; m += rows_per_block) {
    const int64_t rows = min_i64(rows_per_block, chunk.rows - m);
    if (chunk.panels == kDotPanels) {
      kRunChunk<kDotPanels, kParts, kHasMins>[rows](chunk, m, 0);
    } else {
      for (int64_t p = 0; p < chunk.panels; ++p) kRunChunk<1, kParts, kHasMins>[rows](chunk, m, p);
    }
  }
}

}  // namespace quire::QUIRE_TIER
