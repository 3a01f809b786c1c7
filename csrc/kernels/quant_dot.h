// The integer product of a block: sums[m][n] += q[m][k] * w[k][n], with q signed and w unsigned bytes. Exact, so each
// tier may do it in its own order. One implementation per tier, all with this interface:
//
//   DotScope(rows, tile_quads)   lives around the blocks of a task, each with that many rows and whole tiles of k
//   dot_block<kNibbles>(block)   kNibbles: every w is below 16
#pragma once

#include "quire/quant.h"
#include "simd/simd.h"

namespace quire::QUIRE_TIER {

constexpr int64_t kDotPanels = 4;                         // panels side by side: four streams of weights
constexpr int64_t kDotCols = kDotPanels * kPanelSize;     // columns of a row of sums
constexpr int64_t kRowsPadding = 16;                      // q and sums have rows up to a multiple of this

struct DotBlock {
  const int8_t* q;  // [rows][q_stride]
  int64_t q_stride;
  int64_t rows;
  const uint8_t* w;  // [panels][quads][16][4]; panels are w_stride bytes apart
  int64_t w_stride;
  int64_t panels;  // 1 .. kDotPanels
  int64_t quads;
  int32_t* sums;        // [rows][kDotCols]
  const uint8_t* next;  // weights wanted after this block, laid out like `w`: fetched into the cache; null = none
};

}  // namespace quire::QUIRE_TIER

#if defined(QUIRE_TIER_AMX) || defined(QUIRE_TIER_AMX_EMULATED)
#include "kernels/quant_dot_tile.h"
#elif defined(QUIRE_SIMD_AVX512)
#include "kernels/quant_dot_avx512.h"
#elif defined(QUIRE_TIER_AVX2)
#include "kernels/quant_dot_avx2.h"
#else
#include "kernels/quant_dot_portable.h"
#endif
