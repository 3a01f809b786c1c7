// vdpbf16ps in the tile unit's order. The instruction adds two products to each float: that of the second elements of
// its pairs first, then that of the first elements, each with one rounding and subnormals as zero. With the pairs
// (k + 2, k) it is two steps of the even chain, with (k + 3, k + 1) two steps of the odd chain: the same bits as two
// fused multiply-adds, at twice their rate. The tier's self-test compares it with the portable tier.
//
// Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, VDPBF16PS.
#pragma once

#if defined(QUIRE_TIER_AVX512_BF16)

#include <immintrin.h>

#include "simd/simd.h"

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

// The same, in place. Not the intrinsic: GCC 12 copies the sum first, and runs out of registers.
[[gnu::always_inline]] static inline void add_chain_pairs_inplace(__m512& sum, __m512 a, __m512 b) {
  asm("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
}
// Of 32 inputs, the pairs of the even and of the odd chain in turns: (2, 0), (3, 1), (6, 4), (7, 5), ...
static inline void store_chain_pairs(float* out, __m512i inputs) {
  const __m512i even = _mm512_and_si512(inputs, _mm512_set1_epi32(0xffff)), odd = _mm512_srli_epi32(inputs, 16);
  const __m512i next_even = _mm512_srli_epi64(even, 32), next_odd = _mm512_srli_epi64(odd, 32);
  // In every 64 bits: low word (even pair) = even << 16 | next even, high word = odd << 16 | next odd.
  const __m512i low = _mm512_or_si512(_mm512_slli_epi32(even, 16), next_even);
  const __m512i high = _mm512_or_si512(_mm512_slli_epi32(odd, 16), next_odd);
  _mm512_storeu_si512(out, _mm512_mask_blend_epi32(0xaaaa, low, _mm512_slli_epi64(high, 32)));
}
// The first `n` inputs at `x`, then zeros up to 32.
static inline void store_chain_pairs(float* out, const bf16* x, int64_t n) {
  store_chain_pairs(out, _mm512_maskz_loadu_epi16(n >= 32 ? 0xffffffffu : (1u << n) - 1, x));
}
// As `store`, in one instruction that takes subnormal numbers for zero: for results of arithmetic, which has none.
static inline void store_normal(bf16* p, F16 x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(x.v));
}

// As `as_bf16`, for results of arithmetic.
static inline F16 as_bf16_normal(F16 x) {
  const __m512i wide = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(x.v));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}

}  // namespace quire::QUIRE_TIER

#endif
