// Sixty-four bytes at a time, and small numbers as F16: what weights stored in blocks are unpacked with.
#pragma once

#include "simd/simd.h"

namespace quire::QUIRE_TIER {

struct Table16 {
  alignas(16) uint8_t v[16];
};

// A half-precision number, by integers: subnormal halves are ordinary floats, and must not be flushed on the way.
static inline float half_value(const uint8_t* p) {
  uint16_t half;
  __builtin_memcpy(&half, p, 2);
  const uint32_t sign = static_cast<uint32_t>(half & 0x8000u) << 16, magnitude = half & 0x7fffu;
  uint32_t bits = sign | ((magnitude << 13) + (112u << 23));
  if (magnitude >= 0x7c00u) bits = sign | 0x7f800000u | (magnitude & 0x3ffu) << 13;
  float value;
  __builtin_memcpy(&value, &bits, 4);
  if (magnitude >= 0x400u) return value;
  const float tiny = static_cast<float>(magnitude) * 0x1p-24f;
  return sign ? -tiny : tiny;
}
static inline bool is_finite_half(const uint8_t* p) { return (p[1] & 0x7c) != 0x7c; }

#if defined(QUIRE_SIMD_AVX512)

struct B64 {
  __m512i v;
};

static inline B64 load_bytes(const uint8_t* p) { return {_mm512_loadu_si512(p)}; }
static inline void store_bytes(uint8_t* p, B64 x) { _mm512_storeu_si512(p, x.v); }
static inline B64 operator|(B64 a, B64 b) { return {_mm512_or_si512(a.v, b.v)}; }
// Of every byte the kCount bits from bit kFrom on, moved to bit kTo.
template <int kFrom, int kTo, int kCount>
static inline B64 bits(B64 x) {
  const __m512i mask = _mm512_set1_epi8(static_cast<char>(((1 << kCount) - 1) << kTo));
  if constexpr (kFrom > kTo) return {_mm512_and_si512(_mm512_srli_epi16(x.v, kFrom - kTo), mask)};
  if constexpr (kFrom < kTo) return {_mm512_and_si512(_mm512_slli_epi16(x.v, kTo - kFrom), mask)};
  return {_mm512_and_si512(x.v, mask)};
}
// Of every byte bit `from`, moved to bit `to`.
static inline B64 bit_at(B64 x, int64_t from, int to) {
  const __m512i bit = _mm512_and_si512(_mm512_srl_epi16(x.v, _mm_cvtsi64_si128(from)), _mm512_set1_epi8(1));
  return {_mm512_slli_epi16(bit, static_cast<unsigned>(to))};
}
// table[x] of every byte x below 16.
static inline B64 lookup(const Table16& table, B64 x) {
  const __m128i entries = _mm_load_si128(reinterpret_cast<const __m128i*>(table.v));
  return {_mm512_shuffle_epi8(_mm512_broadcast_i32x4(entries), x.v)};
}

// Sixteen numbers.
static inline F16 load_halves(const uint8_t* p) {
  return {_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)))};
}
static inline __m128i load_16(const uint8_t* p) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)); }
static inline F16 load_unsigned(const uint8_t* p) {
  return {_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(load_16(p)))};
}
static inline F16 load_signed(const uint8_t* p) { return {_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_16(p)))}; }

#elif defined(QUIRE_TIER_AVX2)

struct B64 {
  __m256i lo, hi;
};

static inline B64 load_bytes(const uint8_t* p) {
  const __m256i* at = reinterpret_cast<const __m256i*>(p);
  return {_mm256_loadu_si256(at), _mm256_loadu_si256(at + 1)};
}
static inline void store_bytes(uint8_t* p, B64 x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x.lo);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p) + 1, x.hi);
}
static inline B64 operator|(B64 a, B64 b) { return {_mm256_or_si256(a.lo, b.lo), _mm256_or_si256(a.hi, b.hi)}; }
template <int kFrom, int kTo, int kCount>
static inline B64 bits(B64 x) {
  const __m256i mask = _mm256_set1_epi8(static_cast<char>(((1 << kCount) - 1) << kTo));
  const auto half = [&](__m256i v) {
    if constexpr (kFrom > kTo) v = _mm256_srli_epi16(v, kFrom - kTo);
    if constexpr (kFrom < kTo) v = _mm256_slli_epi16(v, kTo - kFrom);
    return _mm256_and_si256(v, mask);
  };
  return {half(x.lo), half(x.hi)};
}
static inline B64 bit_at(B64 x, int64_t from, int to) {
  const auto half = [&](__m256i v) {
    v = _mm256_and_si256(_mm256_srl_epi16(v, _mm_cvtsi64_si128(from)), _mm256_set1_epi8(1));
    return _mm256_slli_epi16(v, to);
  };
  return {half(x.lo), half(x.hi)};
}
static inline B64 lookup(const Table16& table, B64 x) {
  const __m128i entries = _mm_load_si128(reinterpret_cast<const __m128i*>(table.v));
  const __m256i both = _mm256_broadcastsi128_si256(entries);
  return {_mm256_shuffle_epi8(both, x.lo), _mm256_shuffle_epi8(both, x.hi)};
}

static inline F16 load_halves(const uint8_t* p) {
  const __m128i* at = reinterpret_cast<const __m128i*>(p);
  return {_mm256_cvtph_ps(_mm_loadu_si128(at)), _mm256_cvtph_ps(_mm_loadu_si128(at + 1))};
}
static inline __m128i load_8(const uint8_t* p) { return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)); }
static inline F16 load_unsigned(const uint8_t* p) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(load_8(p))), _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(load_8(p + 8)))};
}
static inline F16 load_signed(const uint8_t* p) {
  return {_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(load_8(p))), _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(load_8(p + 8)))};
}

#else

struct B64 {
  uint8_t v[64];
};

template <class Fn>
static inline B64 each_byte(const Fn& fn) {
  B64 out;
  for (int i = 0; i < 64; ++i) out.v[i] = static_cast<uint8_t>(fn(i));
  return out;
}
static inline B64 load_bytes(const uint8_t* p) {
  B64 out;
  __builtin_memcpy(out.v, p, 64);
  return out;
}
static inline void store_bytes(uint8_t* p, const B64& x) { __builtin_memcpy(p, x.v, 64); }
static inline B64 operator|(const B64& a, const B64& b) {
  return each_byte([&](int i) { return a.v[i] | b.v[i]; });
}
template <int kFrom, int kTo, int kCount>
static inline B64 bits(const B64& x) {
  return each_byte([&](int i) { return (x.v[i] >> kFrom & ((1 << kCount) - 1)) << kTo; });
}
static inline B64 bit_at(const B64& x, int64_t from, int to) {
  return each_byte([&](int i) { return (x.v[i] >> from & 1) << to; });
}
static inline B64 lookup(const Table16& table, const B64& x) {
  return each_byte([&](int i) { return table.v[x.v[i]]; });
}

static inline F16 load_halves(const uint8_t* p) {
  return each_lane([=](int i) { return half_value(p + 2 * i); });
}
static inline F16 load_unsigned(const uint8_t* p) {
  return each_lane([=](int i) { return static_cast<float>(p[i]); });
}
static inline F16 load_signed(const uint8_t* p) {
  return each_lane([=](int i) { return static_cast<float>(static_cast<int8_t>(p[i])); });
}

#endif

}  // namespace quire::QUIRE_TIER
