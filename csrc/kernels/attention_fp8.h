// Eight-bit floats of a KV cache: a table to bfloat16, which holds every one of them exactly, and rounding to them.
//
// Source: Micikevicius et al. 2022 (FP8 formats for deep learning), section 3: e4m3 has no infinity and one NaN.
#pragma once

#include "quire/attention.h"
#include "simd/simd.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace quire::QUIRE_TIER {
namespace {

constexpr uint16_t kBf16Special = 0x7f80;  // exponent of infinity and NaN

struct Fp8Format {
  int mantissa_bits;
  int bias;              // what the exponents of float32 have more
  uint16_t last_finite;  // code of the largest number
  alignas(64) uint16_t magnitudes[128];  // code without sign -> bfloat16

  constexpr Fp8Format(int mantissa, int more, uint16_t last)
      : mantissa_bits(mantissa), bias(more), last_finite(last), magnitudes() {
    const int low = 7 - mantissa;  // mantissa bits of bfloat16 that stay zero
    for (int code = 0; code < 128; ++code) {
      int bits = (code << low) + (more << 7);
      if (code >> mantissa == 0) {  // subnormal: bfloat16 has it as a normal number
        int exponent = more + 1, fraction = code << low;
        while (fraction != 0 && (fraction & 0x80) == 0) {
          fraction <<= 1;
          --exponent;
        }
        bits = fraction == 0 ? 0 : (exponent << 7 | (fraction & 0x7f));
      }
      magnitudes[code] = static_cast<uint16_t>(code > last ? bits | kBf16Special : bits);
    }
  }
};

constexpr Fp8Format kE4m3{3, 120, 0x7e}, kE5m2{2, 112, 0x7b};

inline bool is_fp8(DType dtype) { return dtype == DType::f8e4m3 || dtype == DType::f8e5m2; }
inline const Fp8Format& fp8_format(DType dtype) { return dtype == DType::f8e4m3 ? kE4m3 : kE5m2; }

inline uint16_t widen_code(const Fp8Format& format, uint8_t code) {
  return static_cast<uint16_t>(format.magnitudes[code & 0x7f] | (code & 0x80) << 8);
}

#if defined(QUIRE_SIMD_AVX512)

// 32 codes at a time: the lower six bits look up both halves of the table, the seventh chooses.
class Fp8Widener {
 public:
  explicit Fp8Widener(const Fp8Format& format) : format_(format) {
    for (int i = 0; i < 4; ++i) table_[i] = _mm512_load_si512(format.magnitudes + 32 * i);
  }
  void widen32(const uint8_t* codes, bf16* out) const {
    const __m512i wide = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes)));
    const __m512i low = _mm512_permutex2var_epi16(table_[0], wide, table_[1]);
    const __m512i high = _mm512_permutex2var_epi16(table_[2], wide, table_[3]);
    const __m512i size = _mm512_mask_blend_epi16(_mm512_test_epi16_mask(wide, _mm512_set1_epi16(0x40)), low, high);
    // size | (wide << 8 & 0x8000)
    const __m512i shifted = _mm512_slli_epi16(wide, 8), sign_bit = _mm512_set1_epi16(static_cast<short>(0x8000));
    _mm512_storeu_si512(out, _mm512_ternarylogic_epi32(size, shifted, sign_bit, 0xf8));
  }
  const Fp8Format& format() const { return format_; }

 private:
  const Fp8Format& format_;
  __m512i table_[4];
};

#elif defined(__AVX2__)

// By shifting; subnormal numbers, fewer than eight, by a table of bytes.
class Fp8Widener {
 public:
  explicit Fp8Widener(const Fp8Format& format) : format_(format), shift_(_mm_cvtsi32_si128(7 - format.mantissa_bits)) {
    alignas(16) uint8_t bytes[16];
    for (int i = 0; i < 8; ++i) {
      bytes[i] = static_cast<uint8_t>(format.magnitudes[i]);
      bytes[i + 8] = static_cast<uint8_t>(format.magnitudes[i] >> 8);
    }
    smallest_ = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(bytes)));
  }
  void widen32(const uint8_t* codes, bf16* out) const {
    widen16(codes, out);
    widen16(codes + 16, out + 16);
  }
  const Fp8Format& format() const { return format_; }

 private:
  void widen16(const uint8_t* codes, bf16* out) const {
    const __m256i wide = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes)));
    const __m256i code = _mm256_and_si256(wide, _mm256_set1_epi16(0x7f));
    const __m256i bias = _mm256_set1_epi16(static_cast<short>(format_.bias << 7));
    const __m256i normal = _mm256_add_epi16(_mm256_sll_epi16(code, shift_), bias);
    const __m256i bytes = _mm256_or_si256(code, _mm256_slli_epi16(_mm256_or_si256(code, _mm256_set1_epi16(8)), 8));
    const __m256i least_normal = _mm256_set1_epi16(static_cast<short>(1 << format_.mantissa_bits));
    const __m256i is_small = _mm256_cmpgt_epi16(least_normal, code);
    const __m256i size = _mm256_blendv_epi8(normal, _mm256_shuffle_epi8(smallest_, bytes), is_small);
    const __m256i is_special = _mm256_cmpgt_epi16(code, _mm256_set1_epi16(static_cast<short>(format_.last_finite)));
    const __m256i special = _mm256_and_si256(is_special, _mm256_set1_epi16(static_cast<short>(kBf16Special)));
    const __m256i sign = _mm256_and_si256(_mm256_slli_epi16(wide, 8), _mm256_set1_epi16(static_cast<short>(0x8000)));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm256_or_si256(_mm256_or_si256(size, special), sign));
  }

  const Fp8Format& format_;
  __m128i shift_;
  __m256i smallest_;
};

#else

class Fp8Widener {
 public:
  explicit Fp8Widener(const Fp8Format& format) : format_(format) {}
  void widen32(const uint8_t* codes, bf16* out) const {
    for (int i = 0; i < 32; ++i) out[i].bits = widen_code(format_, codes[i]);
  }
  const Fp8Format& format() const { return format_; }

 private:
  const Fp8Format& format_;
};

#endif

// Codes to bfloat16, while what lies `ahead` bytes from them is fetched; 0 = nothing. Line by line: fetches in a row
// would wait for each other.
inline void widen_codes(const Fp8Widener& given, const uint8_t* codes, int64_t n, int64_t ahead, bf16* out) {
  const Fp8Widener widener = given;  // its tables stay in registers
  int64_t i = 0;
  for (; i + 64 <= n; i += 64) {
    if (ahead != 0) prefetch_l2(codes + i + ahead);
    widener.widen32(codes + i, out + i);
    widener.widen32(codes + i + 32, out + i + 32);
  }
  if (i < n && ahead != 0) prefetch_l2(codes + i + ahead);
  if (i + 32 <= n) {
    widener.widen32(codes + i, out + i);
    i += 32;
  }
  for (; i < n; ++i) out[i].bits = widen_code(widener.format(), codes[i]);
}

inline uint32_t bits_of_float(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  return bits;
}
inline float float_of_bits(uint32_t bits) {
  float x;
  __builtin_memcpy(&x, &bits, 4);
  return x;
}

// The nearest code, of two the even one; beyond the largest number that number, NaN stays NaN.
inline void round_to_codes(const Fp8Format& format, const bf16* numbers, int64_t n, uint8_t* codes) {
  const uint32_t bias = static_cast<uint32_t>(format.bias), mantissa = static_cast<uint32_t>(format.mantissa_bits);
  const uint32_t shift = 23 - mantissa, largest = static_cast<uint32_t>(format.magnitudes[format.last_finite]) << 16;
  const uint32_t least_normal = (bias + 1) << 23;
  // Adding it leaves a subnormal number's code in the lowest bits.
  const float magic = float_of_bits((bias + 1 + shift) << 23);
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t given = static_cast<uint32_t>(numbers[i].bits) << 16, size = given & 0x7fffffffu;
    const uint32_t capped = size < largest ? size : largest;
    const uint32_t normal = ((capped + (1u << (shift - 1)) - 1 + (capped >> shift & 1)) >> shift) - (bias << mantissa);
    const uint32_t subnormal = bits_of_float(float_of_bits(capped) + magic) - bits_of_float(magic);
    const uint32_t finite = capped < least_normal ? subnormal : normal;
    codes[i] = static_cast<uint8_t>((size > 0x7f800000u ? 0x7fu : finite) | (given >> 24 & 0x80u));
  }
}

}  // namespace
}  // namespace quire::QUIRE_TIER
