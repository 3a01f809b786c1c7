// vdpbf16ps in the tile unit's order. The instruction adds two products to each float: that of the second elements of
// its pairs first, then that of the first elements, each with one rounding and subnormals as zero. With the pairs
// (k + 2, k) it is two steps of the even chain, with (k + 3, k + 1) two steps of the odd chain: the same bits as two
// fused multiply-adds, at twice their rate. The tier's self-test compares it with the portable tier.
//
// Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, VDPBF16PS.
#pragma once

#if defined(QUIRE_TIER_AVX512_BF16)

#include <immintrin.h>

namespace quire::QUIRE_TIER {

// Sixteen pairs of bfloat16 numbers travel in an F16.

// From rows k / 2 and k / 2 + 1 of a tile, whose pairs are (k, k + 1) and (k + 2, k + 3), those of the two chains.
static inline void load_chain_pairs(const bf16* first, const bf16* second, F16& even, F16& odd) {
  const __m512i low = _mm512_loadu_si512(first), high = _mm512_loadu_si512(second);
  even.v = _mm512_castsi512_ps(_mm512_mask_blend_epi16(0xaaaaaaaau, high, _mm512_slli_epi32(low, 16)));
  odd.v = _mm512_castsi512_ps(_mm512_mask_blend_epi16(0xaaaaaaaau, _mm512_srli_epi32(high, 16), low));
}
// The same pair in every lane.
static inline F16 set1_pair(bf16 first, bf16 second) {
  const uint32_t pair = static_cast<uint32_t>(second.bits) << 16 | first.bits;
  return {_mm512_castsi512_ps(_mm512_set1_epi32(static_cast<int>(pair)))};
}
// sum + second * second, then + first * first.
static inline F16 add_chain_pairs(F16 a, F16 b, F16 sum) {
  return {_mm512_dpbf16_ps(sum.v, (__m512bh)a.v, (__m512bh)b.v)};
}

}  // namespace quire::QUIRE_TIER

#endif
