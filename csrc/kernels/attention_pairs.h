// The inner products of attention by vdpbf16ps, for bfloat16: a step of both chains takes four numbers of a row and one
// instruction each (simd/bf16_dot.h). Rows are kept as pairs: for every four numbers k .. k + 3 two words, (k + 2, k)
// and (k + 3, k + 1). Where the instruction is missing nothing but the answer that it is.
#pragma once

#include "kernels/attention_cache.h"
#include "simd/bf16_dot.h"

namespace quire::QUIRE_TIER {
namespace {

template <class T>
constexpr bool kHasPairs = false;

#if defined(QUIRE_TIER_AVX512_BF16)

template <>
constexpr bool kHasPairs<bf16> = true;

// Of 16 numbers, the pairs of both chains.
inline void store_pairs(float* out, __m256i numbers) {
  const __m256i order = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(4, 5, 0, 1, 6, 7, 2, 3, 12, 13, 8, 9, 14, 15, 10, 11));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm256_shuffle_epi8(numbers, order));
}

// Of a query, zeros past its end up to a whole number of 16. `out` has half as many floats.
inline void store_query_pairs(const bf16* query, int64_t size, float* out) {
  for (int64_t i = 0; i < size; i += 16) {
    const __mmask16 lanes = first_lanes(min_i64(16, size - i));
    store_pairs(out + i / 2, _mm256_maskz_loadu_epi16(lanes, query + i));
  }
}

// Rounds the weights of 16 tokens to bfloat16 and stores their pairs, 8 floats; returns them rounded. None may be
// subnormal.
inline F16 store_weight_pairs(float* out, F16 weights) {
  const __m256i rounded = (__m256i)_mm512_cvtneps_pbh(weights.v);
  store_pairs(out, rounded);
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(rounded), 16))};
}

// Two rows of a tile, k / 2 and k / 2 + 1, as the chains take them. With one row left the second is zeros.
template <bool IsWhole, bool HasSecond>
inline void load_chains(const bf16* b, int64_t b_stride, int64_t num_lanes, F16& even, F16& odd) {
  const __mmask16 lanes = first_lanes(num_lanes);
  const __m512i first = IsWhole ? _mm512_loadu_si512(b) : _mm512_maskz_loadu_epi32(lanes, b);
  __m512i second = _mm512_setzero_si512();
  if (HasSecond) second = IsWhole ? _mm512_loadu_si512(b + b_stride) : _mm512_maskz_loadu_epi32(lanes, b + b_stride);
  even.v = _mm512_castsi512_ps(_mm512_mask_blend_epi16(0xaaaaaaaau, second, _mm512_slli_epi32(first, 16)));
  odd.v = _mm512_castsi512_ps(_mm512_mask_blend_epi16(0xaaaaaaaau, _mm512_srli_epi32(second, 16), first));
}

template <bool IsWhole, bool HasSecond, int Rows, int Columns>
inline void add_chains(const float* a, int64_t a_stride, const bf16* b, int64_t b_stride, int64_t num_lanes,
                       F16 (&even)[Rows][Columns], F16 (&odd)[Rows][Columns]) {
  F16 b_even[Columns], b_odd[Columns];
  for (int c = 0; c < Columns; ++c) {
    load_chains<IsWhole, HasSecond>(b + 32 * c, b_stride, num_lanes, b_even[c], b_odd[c]);
  }
  for (int r = 0; r < Rows; ++r) {
    const F16 a_even = set1(a[r * a_stride]), a_odd = set1(a[r * a_stride + 1]);
    for (int c = 0; c < Columns; ++c) {
      even[r][c] = add_chain_pairs(a_even, b_even[c], even[r][c]);
      odd[r][c] = add_chain_pairs(a_odd, b_odd[c], odd[r][c]);
    }
  }
}

// out[r][0 .. 16 * Columns - 1] = (Adds ? out : 0) + a . b, as `multiply` of attention_tile.h; `a` holds pairs.
template <bool Adds, bool IsWhole, int Rows, int Columns>
inline void multiply_pairs(const float* a, int64_t a_stride, const bf16* b, int64_t b_stride, int64_t k,
                           int64_t num_lanes, int64_t ahead, float* out, int64_t out_stride) {
  for (int64_t tile = 0; tile < k; tile += 32) {
    const int64_t end = min_i64(k, tile + 32);
    F16 even[Rows][Columns], odd[Rows][Columns];
    for (int r = 0; r < Rows; ++r) {
      for (int c = 0; c < Columns; ++c) even[r][c] = odd[r][c] = zero();
    }
    int64_t i = tile;
    for (; i + 4 <= end; i += 4) {
      const bf16* rows = b + i / 2 * b_stride;
      if (ahead != 0) {
        for (int c = 0; c < Columns; ++c) {
          prefetch_l2(reinterpret_cast<const char*>(rows + 32 * c) + ahead);
          prefetch_l2(reinterpret_cast<const char*>(rows + b_stride + 32 * c) + ahead);
        }
      }
      add_chains<IsWhole, true>(a + i / 2, a_stride, rows, b_stride, num_lanes, even, odd);
    }
    if (i < end) add_chains<IsWhole, false>(a + i / 2, a_stride, b + i / 2 * b_stride, b_stride, num_lanes, even, odd);
    for (int r = 0; r < Rows; ++r) {
      for (int c = 0; c < Columns; ++c) {
        float* const to = out + r * out_stride + 16 * c;
        const F16 before = Adds || tile > 0 ? load(to) : zero();
        store(to, before + (even[r][c] + odd[r][c]));
      }
    }
  }
}

#endif

}  // namespace
}  // namespace quire::QUIRE_TIER
