// F16 in one 512-bit register.
#pragma once

#include <immintrin.h>

#define QUIRE_SIMD_AVX512 1

namespace quire::QUIRE_TIER {

struct F16 {
  __m512 v;
};

static inline F16 zero() { return {_mm512_setzero_ps()}; }
static inline F16 set1(float x) { return {_mm512_set1_ps(x)}; }
static inline F16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
static inline F16 load(const bf16* p) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}
static inline __mmask16 first_lanes(int64_t n) { return static_cast<__mmask16>((1u << n) - 1); }
// Lanes from n on are zero; memory beyond them is not touched. 0 <= n <= 16.
static inline F16 load_n(const float* p, int64_t n) { return {_mm512_maskz_loadu_ps(first_lanes(n), p)}; }
static inline F16 load_n(const bf16* p, int64_t n) {
  const __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first_lanes(n), p));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
}

static inline __m256i round_to_bf16(F16 x) {
  const __m512i bits = _mm512_castps_si512(x.v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __mmask16 is_nan = _mm512_cmp_ps_mask(x.v, x.v, _CMP_UNORD_Q);
  rounded = _mm512_mask_or_epi32(rounded, is_nan, bits, _mm512_set1_epi32(0x400000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
}
static inline void store(float* p, F16 x) { _mm512_storeu_ps(p, x.v); }
static inline void store(bf16* p, F16 x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), round_to_bf16(x)); }
static inline void store_n(float* p, int64_t n, F16 x) { _mm512_mask_storeu_ps(p, first_lanes(n), x.v); }
static inline void store_n(bf16* p, int64_t n, F16 x) { _mm256_mask_storeu_epi16(p, first_lanes(n), round_to_bf16(x)); }

static inline F16 operator+(F16 a, F16 b) { return {_mm512_add_ps(a.v, b.v)}; }
static inline F16 operator-(F16 a, F16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
static inline F16 operator*(F16 a, F16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
static inline F16 operator/(F16 a, F16 b) { return {_mm512_div_ps(a.v, b.v)}; }
// a > b ? a : b, so b when either is NaN.
static inline F16 max(F16 a, F16 b) { return {_mm512_max_ps(a.v, b.v)}; }
// a < b ? a : b, so b when either is NaN.
static inline F16 min(F16 a, F16 b) { return {_mm512_min_ps(a.v, b.v)}; }
// Where x < limit: `below`, elsewhere (NaN too): `otherwise`.
static inline F16 select_less(F16 x, F16 limit, F16 below, F16 otherwise) {
  return {_mm512_mask_blend_ps(_mm512_cmp_ps_mask(x.v, limit.v, _CMP_LT_OQ), otherwise.v, below.v)};
}
// a * b + c where a * b is exact in float32 (two bfloat16 numbers): one rounding, fused or not.
static inline F16 add_exact_product(F16 a, F16 b, F16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// 2 ** n for integers -126 <= n <= 127.
static inline F16 pow2(F16 n) {
  const __m512i exponent = _mm512_add_epi32(_mm512_cvtps_epi32(n.v), _mm512_set1_epi32(127));
  return {_mm512_castsi512_ps(_mm512_slli_epi32(exponent, 23))};
}
// Sixteen pairs of bfloat16 numbers: the first of each pair, and the second.
static inline void load_pairs(const bf16* p, F16& even, F16& odd) {
  const __m512i pairs = _mm512_loadu_si512(p);
  even.v = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
  odd.v = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}
// Lanes are folded in halves: 16 to 8, 8 to 4, 4 to 2, 2 to 1.
static inline float hsum(F16 x) {
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(x.v), _mm512_extractf32x8_ps(x.v, 1));
  const __m128 quarter = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  const __m128 pair = _mm_add_ps(quarter, _mm_movehl_ps(quarter, quarter));
  return _mm_cvtss_f32(_mm_add_ss(pair, _mm_movehdup_ps(pair)));
}
// In the order of the other tiers, which decides what is left of a NaN.
static inline float hmax(F16 x) {
  const __m256 half = _mm256_max_ps(_mm512_castps512_ps256(x.v), _mm512_extractf32x8_ps(x.v, 1));
  const __m128 quarter = _mm_max_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  const __m128 pair = _mm_max_ps(quarter, _mm_movehl_ps(quarter, quarter));
  return _mm_cvtss_f32(_mm_max_ss(pair, _mm_movehdup_ps(pair)));
}

// Quantised GEMM. Sixteen integers as floats.
static inline F16 load_int32(const int32_t* p) { return {_mm512_cvtepi32_ps(_mm512_loadu_si512(p))}; }
// Integers -128 <= x <= 127 as bytes.
static inline void store_int8(int8_t* p, F16 x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x.v)));
}

// Attention.

// As `load_pairs`; pairs from n on are zero and not touched. 0 <= n <= 16.
static inline void load_pairs_n(const bf16* p, int64_t n, F16& even, F16& odd) {
  const __m512i pairs = _mm512_maskz_loadu_epi32(first_lanes(n), p);
  even.v = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
  odd.v = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}
// Each lane rounded to a bfloat16 number.
static inline F16 as_bf16(F16 x) {
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(round_to_bf16(x)), 16))};
}
// 0, 1, .. 15.
static inline F16 lane_numbers() {
  return {_mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)};
}

// Sampling.

// Bit i: a[i] < b[i].
static inline uint32_t less_mask(F16 a, F16 b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ); }
// Lane i: `set` where bit i is 1, else `clear`.
static inline F16 select_bits(uint32_t bits, F16 set, F16 clear) {
  return {_mm512_mask_blend_ps(static_cast<__mmask16>(bits), clear.v, set.v)};
}
// The lanes whose bits are 1, side by side, and their numbers plus `first`. May write 16 of each. Returns how many.
static inline int pack(uint32_t bits, F16 x, int32_t first, float* values, int32_t* numbers) {
  const __mmask16 mask = static_cast<__mmask16>(bits);
  const __m512i lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  _mm512_storeu_ps(values, _mm512_maskz_compress_ps(mask, x.v));
  const __m512i number = _mm512_add_epi32(lane, _mm512_set1_epi32(first));
  _mm512_storeu_si512(numbers, _mm512_maskz_compress_epi32(mask, number));
  return __builtin_popcount(bits);
}
// Sixteen sums of unsigned 64-bit integers.
struct Fixed16 {
  __m512i lo, hi;
};
static inline Fixed16 fixed_zero() { return {_mm512_setzero_si512(), _mm512_setzero_si512()}; }
// The integer part of each lane, 0 <= x < 2 ** 52.
static inline Fixed16 to_fixed(F16 x) {
  return {_mm512_cvttps_epi64(_mm512_castps512_ps256(x.v)), _mm512_cvttps_epi64(_mm512_extractf32x8_ps(x.v, 1))};
}
static inline Fixed16 operator+(Fixed16 a, Fixed16 b) {
  return {_mm512_add_epi64(a.lo, b.lo), _mm512_add_epi64(a.hi, b.hi)};
}
static inline void store(uint64_t* p, Fixed16 x) {
  _mm512_storeu_si512(p, x.lo);
  _mm512_storeu_si512(p + 8, x.hi);
}

// Products.

// Past the caches, for outputs larger than they are; p is 32-byte aligned. `store_fence` before others may read.
static inline void stream(float* p, F16 x) {
  _mm256_stream_ps(p, _mm512_castps512_ps256(x.v));
  _mm256_stream_ps(p + 8, _mm512_extractf32x8_ps(x.v, 1));
}
static inline void stream(bf16* p, F16 x) { _mm256_stream_si256(reinterpret_cast<__m256i*>(p), round_to_bf16(x)); }
static inline void store_fence() { _mm_sfence(); }

// Attention's softmax.

// x * 2 ** n where `shifted` is n + 1.5 * 2 ** 23 and neither x nor the result is subnormal.
static inline F16 add_to_exponent(F16 x, F16 shifted) {
  const __m512i n = _mm512_slli_epi32(_mm512_castps_si512(shifted.v), 23);
  return {_mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(x.v), n))};
}
// Zero where x < limit; elsewhere (NaN too) as `add_to_exponent`.
static inline F16 add_to_exponent_or_zero(F16 y, F16 shifted, F16 x, F16 limit) {
  const __m512i n = _mm512_slli_epi32(_mm512_castps_si512(shifted.v), 23);
  const __mmask16 is_kept = _mm512_cmp_ps_mask(x.v, limit.v, _CMP_NLT_UQ);
  return {_mm512_castsi512_ps(_mm512_maskz_add_epi32(is_kept, _mm512_castps_si512(y.v), n))};
}
// Of the 32 numbers in a and then b, those at even places, and those at odd ones.
static inline void split_pairs(F16 a, F16 b, F16& even, F16& odd) {
  const __m512i places = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  even.v = _mm512_permutex2var_ps(a.v, places, b.v);
  odd.v = _mm512_permutex2var_ps(a.v, _mm512_add_epi32(places, _mm512_set1_epi32(1)), b.v);
}

}  // namespace quire::QUIRE_TIER
