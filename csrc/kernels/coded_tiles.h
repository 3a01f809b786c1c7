// Codes to the bfloat16 numbers that they stand for: a tile of 32 inputs and 16 outputs at a time. Exact, so that every
// tier gives the same numbers however it finds them.
#pragma once

#include "kernels/attention_fp8.h"
#include "quire/coded.h"
#include "simd/simd.h"

namespace quire::QUIRE_TIER {
namespace {

constexpr int64_t kPairLanes = 2 * kPanelSize;  // numbers of a pair of inputs
constexpr int64_t kHalfPairs = kTileDepth / 4;  // pairs in the lower halves of a tile of 4-bit codes

// Dettmers et al. 2023 (QLoRA), appendix E, rounded to bfloat16.
constexpr uint16_t kNf4[16] = {0xbf80, 0xbf32, 0xbf06, 0xbeca, 0xbe92, 0xbe3d, 0xbdba, 0x0000,
                               0x3da3, 0x3e25, 0x3e7c, 0x3ead, 0x3ee2, 0x3f10, 0x3f39, 0x3f80};

// An integer of magnitude up to 256 as bfloat16.
inline uint16_t bf16_of_integer(int32_t value) {
  const float wide = static_cast<float>(value);
  uint32_t bits;
  __builtin_memcpy(&bits, &wide, 4);
  return static_cast<uint16_t>(bits >> 16);
}

// Each has tile(codes, zeros, out), and value(code, zero) of one code.

class E4m3Codes {
 public:
  static constexpr Code kCode = Code::e4m3;
  E4m3Codes() : widener_(kE4m3) {}
  inline void tile(const uint8_t* codes, const uint8_t*, bf16* out) const {
    for (int64_t i = 0; i < kTileSize; i += 32) widener_.widen32(codes + i, out + i);
  }
  static uint16_t value(uint8_t code, uint8_t) { return widen_code(kE4m3, code); }

 private:
  Fp8Widener widener_;
};

class Int8Codes {
 public:
  static constexpr Code kCode = Code::int8;
  inline void tile(const uint8_t* codes, const uint8_t*, bf16* out) const {
    for (int64_t i = 0; i < kTileSize; ++i) out[i].bits = value(codes[i], 0);
  }
  static uint16_t value(uint8_t code, uint8_t) { return bf16_of_integer(static_cast<int8_t>(code)); }
};

#if defined(QUIRE_SIMD_AVX512)

// Sixteen or thirty-two numbers that codes of 4 bits, plus what is given for each lane, stand for.
class HalfLookup {
 public:
  explicit HalfLookup(const uint16_t* numbers) : table_(_mm512_loadu_si512(numbers)) {}
  // 32 bytes: the numbers of their lower halves, and of their upper halves.
  inline void widen(const uint8_t* codes, __m512i offsets, bf16* low, bf16* high) const {
    const __m512i wide = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes)));
    const __m512i first = _mm512_and_si512(wide, _mm512_set1_epi16(15)), second = _mm512_srli_epi16(wide, 4);
    _mm512_storeu_si512(low, _mm512_permutexvar_epi16(_mm512_add_epi16(first, offsets), table_));
    _mm512_storeu_si512(high, _mm512_permutexvar_epi16(_mm512_add_epi16(second, offsets), table_));
  }

 private:
  __m512i table_;
};

#endif

class Int4Codes {
 public:
  static constexpr Code kCode = Code::int4;
#if defined(QUIRE_SIMD_AVX512)
  Int4Codes() : lookup_(integers()) {}
  inline void tile(const uint8_t* codes, const uint8_t* zeros, bf16* out) const {
    const __m128i points = _mm_and_si128(_mm_loadu_si128(reinterpret_cast<const __m128i*>(zeros)), _mm_set1_epi8(15));
    const __m512i zero = _mm512_cvtepu8_epi32(points);
    const __m512i pairs = _mm512_or_si512(zero, _mm512_slli_epi32(zero, 16));
    const __m512i offsets = _mm512_sub_epi16(_mm512_set1_epi16(15), pairs);
    for (int64_t pair = 0; pair < kHalfPairs; ++pair, codes += kPairLanes, out += kPairLanes) {
      lookup_.widen(codes, offsets, out, out + kHalfPairs * kPairLanes);
    }
  }
#else
  inline void tile(const uint8_t* codes, const uint8_t* zeros, bf16* out) const {
    int32_t zero[kPairLanes];
    for (int64_t i = 0; i < kPairLanes; ++i) zero[i] = zeros[i / 2] & 15;
    for (int64_t pair = 0; pair < kHalfPairs; ++pair, codes += kPairLanes, out += kPairLanes) {
      bf16* high = out + kHalfPairs * kPairLanes;
      for (int64_t i = 0; i < kPairLanes; ++i) out[i].bits = bf16_of_integer((codes[i] & 15) - zero[i]);
      for (int64_t i = 0; i < kPairLanes; ++i) high[i].bits = bf16_of_integer((codes[i] >> 4) - zero[i]);
    }
  }
#endif
  static uint16_t value(uint8_t code, uint8_t zero) { return bf16_of_integer(code - (zero & 15)); }

#if defined(QUIRE_SIMD_AVX512)

 private:
  struct Integers {
    uint16_t numbers[32];
    Integers() {
      for (int i = 0; i < 32; ++i) numbers[i] = bf16_of_integer(i - 15);
    }
  };
  static HalfLookup integers() { return HalfLookup(Integers().numbers); }
  HalfLookup lookup_;
#endif
};

class Nf4Codes {
 public:
  static constexpr Code kCode = Code::nf4;
#if defined(QUIRE_SIMD_AVX512)
  Nf4Codes() : lookup_(numbers()) {}
  inline void tile(const uint8_t* codes, const uint8_t*, bf16* out) const {
    for (int64_t pair = 0; pair < kHalfPairs; ++pair, codes += kPairLanes, out += kPairLanes) {
      lookup_.widen(codes, _mm512_setzero_si512(), out, out + kHalfPairs * kPairLanes);
    }
  }
#else
  inline void tile(const uint8_t* codes, const uint8_t*, bf16* out) const {
    for (int64_t pair = 0; pair < kHalfPairs; ++pair, codes += kPairLanes, out += kPairLanes) {
      bf16* high = out + kHalfPairs * kPairLanes;
      for (int64_t i = 0; i < kPairLanes; ++i) out[i].bits = kNf4[codes[i] & 15];
      for (int64_t i = 0; i < kPairLanes; ++i) high[i].bits = kNf4[codes[i] >> 4];
    }
  }
#endif
  static uint16_t value(uint8_t code, uint8_t) { return kNf4[code]; }

#if defined(QUIRE_SIMD_AVX512)

 private:
  static HalfLookup numbers() {
    uint16_t twice[32];
    for (int i = 0; i < 32; ++i) twice[i] = kNf4[i % 16];
    return HalfLookup(twice);
  }
  HalfLookup lookup_;
#endif
};

}  // namespace
}  // namespace quire::QUIRE_TIER
