// F16 in two 256-bit registers.
#pragma once

#include <immintrin.h>

namespace quire::QUIRE_TIER {

struct F16 {
  __m256 lo, hi;
};

static inline F16 zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
static inline F16 set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
static inline F16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
static inline __m256 widen(__m128i halves) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}
static inline F16 load(const bf16* p) {
  return {widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
          widen(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8)))};
}
// Lanes from n on are zero; memory beyond them is not touched. 0 <= n <= 16.
template <class T>
static inline F16 load_n(const T* p, int64_t n) {
  alignas(32) T lanes[16] = {};
  for (int64_t i = 0; i < n; ++i) lanes[i] = p[i];
  return load(lanes);
}

static inline __m128i round_to_bf16(__m256 x) {
  const __m256i bits = _mm256_castps_si256(x);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x400000));
  const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  const __m256i chosen = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, quiet, is_nan), 16);
  return _mm_packus_epi32(_mm256_castsi256_si128(chosen), _mm256_extracti128_si256(chosen, 1));
}
static inline void store(float* p, F16 x) {
  _mm256_storeu_ps(p, x.lo);
  _mm256_storeu_ps(p + 8, x.hi);
}
static inline void store(bf16* p, F16 x) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), round_to_bf16(x.lo));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p + 8), round_to_bf16(x.hi));
}
template <class T>
static inline void store_n(T* p, int64_t n, F16 x) {
  alignas(32) T lanes[16];
  store(lanes, x);
  for (int64_t i = 0; i < n; ++i) p[i] = lanes[i];
}

static inline F16 operator+(F16 a, F16 b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
static inline F16 operator-(F16 a, F16 b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
static inline F16 operator*(F16 a, F16 b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
static inline F16 operator/(F16 a, F16 b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
// a > b ? a : b, so b when either is NaN.
static inline F16 max(F16 a, F16 b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
// a < b ? a : b, so b when either is NaN.
static inline F16 min(F16 a, F16 b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
// Where x < limit: `below`, elsewhere (NaN too): `otherwise`.
static inline F16 select_less(F16 x, F16 limit, F16 below, F16 otherwise) {
  return {_mm256_blendv_ps(otherwise.lo, below.lo, _mm256_cmp_ps(x.lo, limit.lo, _CMP_LT_OQ)),
          _mm256_blendv_ps(otherwise.hi, below.hi, _mm256_cmp_ps(x.hi, limit.hi, _CMP_LT_OQ))};
}
// a * b + c where a * b is exact in float32 (two bfloat16 numbers): one rounding, fused or not.
static inline F16 add_exact_product(F16 a, F16 b, F16 c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
static inline __m256 pow2_half(__m256 n) {
  const __m256i exponent = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  return _mm256_castsi256_ps(_mm256_slli_epi32(exponent, 23));
}
// 2 ** n for integers -126 <= n <= 127.
static inline F16 pow2(F16 n) { return {pow2_half(n.lo), pow2_half(n.hi)}; }
static inline void split_half(const bf16* p, __m256& even, __m256& odd) {
  const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  even = _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16));
  odd = _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
}
// Sixteen pairs of bfloat16 numbers: the first of each pair, and the second.
static inline void load_pairs(const bf16* p, F16& even, F16& odd) {
  split_half(p, even.lo, odd.lo);
  split_half(p + 16, even.hi, odd.hi);
}
// Lanes are folded in halves: 16 to 8, 8 to 4, 4 to 2, 2 to 1.
static inline float hsum(F16 x) {
  const __m256 half = _mm256_add_ps(x.lo, x.hi);
  const __m128 quarter = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  const __m128 pair = _mm_add_ps(quarter, _mm_movehl_ps(quarter, quarter));
  return _mm_cvtss_f32(_mm_add_ss(pair, _mm_movehdup_ps(pair)));
}
static inline float hmax(F16 x) {
  const __m256 half = _mm256_max_ps(x.lo, x.hi);
  const __m128 quarter = _mm_max_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  const __m128 pair = _mm_max_ps(quarter, _mm_movehl_ps(quarter, quarter));
  return _mm_cvtss_f32(_mm_max_ss(pair, _mm_movehdup_ps(pair)));
}

// Quantised GEMM. Sixteen integers as floats.
static inline F16 load_int32(const int32_t* p) {
  return {_mm256_cvtepi32_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))),
          _mm256_cvtepi32_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 8)))};
}
// Integers -128 <= x <= 127 as bytes.
static inline void store_int8(int8_t* p, F16 x) {
  const __m256i pairs = _mm256_packs_epi32(_mm256_cvtps_epi32(x.lo), _mm256_cvtps_epi32(x.hi));
  const __m256i ordered = _mm256_permute4x64_epi64(pairs, 0xd8);
  const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(ordered), _mm256_extracti128_si256(ordered, 1));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
}

// Attention.

// As `load_pairs`; pairs from n on are zero and not touched. 0 <= n <= 16.
static inline void load_pairs_n(const bf16* p, int64_t n, F16& even, F16& odd) {
  alignas(32) bf16 pairs[32] = {};
  for (int64_t i = 0; i < 2 * n; ++i) pairs[i] = p[i];
  load_pairs(pairs, even, odd);
}
// Each lane rounded to a bfloat16 number.
static inline F16 as_bf16(F16 x) { return {widen(round_to_bf16(x.lo)), widen(round_to_bf16(x.hi))}; }
// 0, 1, .. 15.
static inline F16 lane_numbers() {
  return {_mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7), _mm256_setr_ps(8, 9, 10, 11, 12, 13, 14, 15)};
}

// Sampling.

// Bit i: a[i] < b[i].
static inline uint32_t less_mask(F16 a, F16 b) {
  return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(a.lo, b.lo, _CMP_LT_OQ))) |
         static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(a.hi, b.hi, _CMP_LT_OQ))) << 8;
}
// Lane i: `set` where bit i is 1, else `clear`.
static inline F16 select_bits(uint32_t bits, F16 set, F16 clear) {
  const __m256i bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const __m256i lo = _mm256_and_si256(_mm256_set1_epi32(static_cast<int>(bits)), bit);
  const __m256i hi = _mm256_and_si256(_mm256_set1_epi32(static_cast<int>(bits >> 8)), bit);
  return {_mm256_blendv_ps(clear.lo, set.lo, _mm256_castsi256_ps(_mm256_cmpeq_epi32(lo, bit))),
          _mm256_blendv_ps(clear.hi, set.hi, _mm256_castsi256_ps(_mm256_cmpeq_epi32(hi, bit)))};
}
// The lanes whose bits are 1, side by side, and their numbers plus `first`. May write 16 of each. Returns how many.
static inline int pack(uint32_t bits, F16 x, int32_t first, float* values, int32_t* numbers) {
  alignas(32) float lanes[16];
  store(lanes, x);
  int count = 0;
  for (; bits != 0; bits &= bits - 1) {
    const int lane = __builtin_ctz(bits);
    values[count] = lanes[lane];
    numbers[count++] = first + lane;
  }
  return count;
}
// Sixteen sums of unsigned 64-bit integers.
struct Fixed16 {
  __m256i v[4];
};
static inline Fixed16 fixed_zero() {
  const __m256i none = _mm256_setzero_si256();
  return {{none, none, none, none}};
}
static inline __m256i to_fixed_quarter(__m128 x) {
  // An integer below 2 ** 52 is the mantissa of itself plus 2 ** 52.
  const __m256d whole = _mm256_round_pd(_mm256_cvtps_pd(x), _MM_FROUND_TO_ZERO | _MM_FROUND_NO_EXC);
  const __m256i bits = _mm256_castpd_si256(_mm256_add_pd(whole, _mm256_set1_pd(4503599627370496.0)));
  return _mm256_and_si256(bits, _mm256_set1_epi64x(0xfffffffffffff));
}
// The integer part of each lane, 0 <= x < 2 ** 52.
static inline Fixed16 to_fixed(F16 x) {
  return {{to_fixed_quarter(_mm256_castps256_ps128(x.lo)), to_fixed_quarter(_mm256_extractf128_ps(x.lo, 1)),
           to_fixed_quarter(_mm256_castps256_ps128(x.hi)), to_fixed_quarter(_mm256_extractf128_ps(x.hi, 1))}};
}
static inline Fixed16 operator+(Fixed16 a, Fixed16 b) {
  return {{_mm256_add_epi64(a.v[0], b.v[0]), _mm256_add_epi64(a.v[1], b.v[1]), _mm256_add_epi64(a.v[2], b.v[2]),
           _mm256_add_epi64(a.v[3], b.v[3])}};
}
static inline void store(uint64_t* p, Fixed16 x) {
  for (int i = 0; i < 4; ++i) _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 4 * i), x.v[i]);
}

// Products.

// Past the caches, for outputs larger than they are; p is 32-byte aligned. `store_fence` before others may read.
static inline void stream(float* p, F16 x) {
  _mm256_stream_ps(p, x.lo);
  _mm256_stream_ps(p + 8, x.hi);
}
static inline void stream(bf16* p, F16 x) {
  _mm_stream_si128(reinterpret_cast<__m128i*>(p), round_to_bf16(x.lo));
  _mm_stream_si128(reinterpret_cast<__m128i*>(p + 8), round_to_bf16(x.hi));
}
static inline void store_fence() { _mm_sfence(); }

// Attention's softmax.

static inline __m256 add_to_exponent(__m256 x, __m256 shifted) {
  const __m256i n = _mm256_slli_epi32(_mm256_castps_si256(shifted), 23);
  return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x), n));
}
// x * 2 ** n where `shifted` is n + 1.5 * 2 ** 23 and neither x nor the result is subnormal.
static inline F16 add_to_exponent(F16 x, F16 shifted) {
  return {add_to_exponent(x.lo, shifted.lo), add_to_exponent(x.hi, shifted.hi)};
}
// Zero where x < limit; elsewhere (NaN too) as `add_to_exponent`.
static inline F16 add_to_exponent_or_zero(F16 y, F16 shifted, F16 x, F16 limit) {
  return select_less(x, limit, zero(), add_to_exponent(y, shifted));
}
// Of the 32 numbers in a and then b, those at even places, and those at odd ones.
static inline void split_pairs(F16 a, F16 b, F16& even, F16& odd) {
  const auto pick = [](__m256 first, __m256 second, bool is_odd) {
    const __m256 mixed = is_odd ? _mm256_shuffle_ps(first, second, 0xdd) : _mm256_shuffle_ps(first, second, 0x88);
    return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(mixed), 0xd8));
  };
  even = {pick(a.lo, a.hi, false), pick(b.lo, b.hi, false)};
  odd = {pick(a.lo, a.hi, true), pick(b.lo, b.hi, true)};
}

}  // namespace quire::QUIRE_TIER
