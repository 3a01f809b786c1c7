// The integer product of a block: sums[m][n] += q[m][k] * w[k][n], with q signed and w unsigned bytes. Exact, so each
// tier may do it in its own order. One implementation per tier, all with this interface:
//
//   DotScope(rows, tile_quads)   lives around the blocks of a task, each with that many rows and whole tiles of k
//   dot_block(block)             sums of bytes
//   dot_group(group)             one group of int4 weights, scaled into float32 totals
//   dot_codes<kMaxCode, kQuads>  as dot_block, of kQuads quads of weights <= kMaxCode
#pragma once

#include "quire/quant.h"
#include "simd/simd.h"

namespace quire::QUIRE_TIER {

constexpr int64_t kDotPanels = 4;                         // panels side by side: four streams of weights
constexpr int64_t kDotCols = kDotPanels * kPanelSize;     // columns of a row of sums
constexpr int64_t kRowsPadding = 16;                      // q and sums have rows up to a multiple of this

// How far each panel of a block lies from the first: panels that follow each other, or gates and ups in turns.
struct PanelOffsets {
  int64_t odd, pair;

  int64_t at(int64_t panel) const { return (panel & 1) * odd + (panel >> 1) * pair; }
  int64_t next_block() const { return kDotPanels / 2 * pair; }
};
static inline PanelOffsets consecutive(int64_t stride) { return {stride, 2 * stride}; }

struct DotBlock {
  const int8_t* q;  // [rows][q_stride]
  int64_t q_stride;
  int64_t rows;
  const uint8_t* w;  // of each panel [quads][16][4]
  PanelOffsets w_offsets;  // bytes
  int64_t panels;  // 1 .. kDotPanels
  int64_t quads;
  int32_t* sums;        // [rows][kDotCols]
  const uint8_t* next;  // weights wanted after this block, laid out like `w`: fetched into the cache; null = none
};

// totals[m][n] += float(starts[m] + sum over the group of q[m][k] * w[k][n]) * scales[n].
struct GroupBlock {
  const int8_t* q;  // [rows][q_stride]
  int64_t q_stride;
  int64_t rows;
  const uint8_t* packed;  // of each panel, units of 32 k
  PanelOffsets packed_offsets;  // bytes
  int64_t panels;
  int64_t units;
  const int32_t* starts;  // of row m at m * starts_stride
  int64_t starts_stride;
  const bf16* scales;  // 16 of each panel
  PanelOffsets scales_offsets;
  float* totals;        // [rows][kDotCols]
  int32_t* sums;        // room for [rows][kDotCols]
  uint8_t* unpacked;    // room for [panels][units][2 * kInt4UnitBytes]
  const uint8_t* next;  // weights wanted later, laid out like `packed`
};

// Units of a panel to bytes [8 quads][16][4] a unit.
static inline void unpack_units(const uint8_t* __restrict packed, int64_t units, uint8_t* __restrict out) {
  for (int64_t u = 0; u < units; ++u, packed += kInt4UnitBytes, out += 2 * kInt4UnitBytes) {
    for (int64_t i = 0; i < kInt4UnitBytes; ++i) {
      out[i] = packed[i] & 15;
      out[kInt4UnitBytes + i] = packed[i] >> 4;
    }
  }
}

// dot_group by way of unpacked bytes and a product of blocks: the unpacking is shared by all rows.
template <class Dot>
static inline void dot_unpacked_group(const GroupBlock& group, const Dot& dot) {
  const int64_t bytes = group.units * kInt4UnitBytes;
  for (int64_t p = 0; p < group.panels; ++p) {
    for (int64_t i = 0; i < bytes; i += 64) prefetch_l2(group.next + group.packed_offsets.at(p) + i);
    unpack_units(group.packed + group.packed_offsets.at(p), group.units, group.unpacked + p * 2 * bytes);
  }
  for (int64_t m = 0; m < group.rows; ++m) {
    const int32_t start = group.starts[m * group.starts_stride];
    for (int64_t n = 0; n < kDotCols; ++n) group.sums[m * kDotCols + n] = start;
  }
  dot(DotBlock{group.q, group.q_stride, group.rows, group.unpacked, consecutive(2 * bytes), group.panels,
               group.units * kInt4UnitK / 4, group.sums, nullptr});
  for (int64_t p = 0; p < group.panels; ++p) {
    const F16 scale = load(group.scales + group.scales_offsets.at(p));
    for (int64_t i = p * kPanelSize; i < group.rows * kDotCols; i += kDotCols) {
      store(group.totals + i, load(group.totals + i) + load_int32(group.sums + i) * scale);
    }
  }
}

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

#if !defined(QUIRE_TIER_AVX2)
namespace quire::QUIRE_TIER {

template <int, int64_t>
static inline void dot_codes(const DotBlock& block) {
  dot_block(block);
}

}  // namespace quire::QUIRE_TIER
#endif
