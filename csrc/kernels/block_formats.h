// The block formats: where a file's blocks hold codes and scales, and how a record of 16 outputs is unpacked.
//
// A record is the blocks of 16 outputs, kBlocks of each, one after the other along the inputs. Codes are planes of 64
// bytes: word t of a block's codes for 16 outputs, each with 4 consecutive inputs in its bytes. Then come the scales.
//
//   kBlockInputs, kBlockBytes    of a block in a file
//   kBlocks                      of each output in a record
//   kCodesAt, kPlanes            the first byte of a block's codes, and their words
//   kScaleBytes                  of a record, which is a multiple of 64 bytes long
//   kOffset                      weight = scale * (code - kOffset), or scale * code + minimum
//   kMaxCode                     the largest unpacked code
//   kParts                       of 32 inputs, each with a scale of its own: 1 or 2
//   kHasMins
//   kHasPowerScales              scales are powers of two, possibly too small for a normal float32 number
//   word(w, t)                   word t of a block's codes as it is packed
//   put_scales(block, n, b, s)   packs the scales of block b of output n; false when one is not finite
//   quad<g, h>(record, t)        codes of quad 4 h + t (t < 4) of the record's group g of 32 inputs: [16 outputs][4]
//   factors(record, a, b)        scales and minima [parts][16]
#pragma once

#include "quire/block_quant.h"
#include "simd/bytes.h"

namespace quire::QUIRE_TIER {

constexpr int64_t kGroupInputs = 32;
constexpr int64_t kGroupBytes = kGroupInputs * kPanelSize;  // unpacked
constexpr int64_t kPlaneBytes = 64;
constexpr int64_t kHalves = 2 * kPanelSize;                 // bytes of a half-precision number for each output

template <class F>
constexpr int64_t kRecordInputs = F::kBlockInputs * F::kBlocks;
template <class F>
constexpr int64_t kCodeBytes = F::kBlocks * F::kPlanes * kPlaneBytes;
template <class F>
constexpr int64_t kRecordBytes = kCodeBytes<F> + F::kScaleBytes;

template <int N>
struct Number {
  static constexpr int value = N;
};
// fn(Number<0>) .. fn(Number<N - 1>): loops whose counter is a template argument.
template <int N, int I = 0, class Fn>
[[gnu::always_inline]] static inline void each(const Fn& fn) {
  if constexpr (I < N) {
    fn(Number<I>{});
    each<N, I + 1>(fn);
  }
}

static inline B64 plane(const uint8_t* planes, int64_t i) { return load_bytes(planes + i * kPlaneBytes); }

// A record's codes as bytes: [groups][8 quads][16 outputs][4].
template <class F>
static inline void unpack(const uint8_t* record, uint8_t* codes) {
  each<kRecordInputs<F> / kGroupInputs>([&](auto g) {
    each<2>([&](auto h) {
      for (int64_t t = 0; t < 4; ++t, codes += kPlaneBytes) {
        store_bytes(codes, F::template quad<g.value, h.value>(record, t));
      }
    });
  });
}

static inline void put_half(const uint8_t* from, int64_t n, uint8_t* to) { __builtin_memcpy(to + 2 * n, from, 2); }

struct PlainWords {
  static constexpr bool kChangesWords = false, kHasPowerScales = false;
  static uint32_t word(uint32_t w, int64_t) { return w; }
};

// 32 inputs and a scale.
struct SmallBlocks : PlainWords {
  static constexpr int64_t kBlockInputs = 32, kBlocks = 2, kScaleBytes = kBlocks * kHalves;
  static constexpr int64_t kCodesAt = 2;
  static constexpr int kParts = 1;
  static constexpr bool kHasMins = false;

  static bool put_scales(const uint8_t* block, int64_t n, int64_t b, uint8_t* s) {
    put_half(block, n, s + b * kHalves);
    return is_finite_half(block);
  }
};
template <class F>
static inline void small_scales(const uint8_t* record, float* a) {
  for (int64_t b = 0; b < F::kBlocks; ++b) store(a + b * kPanelSize, load_halves(record + kCodeBytes<F> + b * kHalves));
}

// 32 inputs, a scale and a minimum.
struct SmallBlocksWithMins : SmallBlocks {
  static constexpr int64_t kScaleBytes = 2 * kBlocks * kHalves, kCodesAt = 4;
  static constexpr int32_t kOffset = 0;
  static constexpr bool kHasMins = true;

  static bool put_scales(const uint8_t* block, int64_t n, int64_t b, uint8_t* s) {
    put_half(block, n, s + b * kHalves);
    put_half(block + 2, n, s + (kBlocks + b) * kHalves);
    return is_finite_half(block) && is_finite_half(block + 2);
  }
};
template <class F>
static inline void small_mins(const uint8_t* record, float* b) {
  small_scales<F>(record + F::kBlocks * kHalves, b);
}

// Nibbles of a group of 32 inputs in four words: the low ones are quads 0 .. 3, the high ones 4 .. 7.
template <int kHalf>
static inline B64 nibbles(const uint8_t* planes, int64_t t) {
  return bits<4 * kHalf, 0, 4>(plane(planes, t));
}

// Bytes with the sign bit flipped: code + 128.
struct Q8_0 : SmallBlocks {
  static constexpr int64_t kBlockBytes = 34, kPlanes = 8;
  static constexpr int32_t kOffset = 128, kMaxCode = 255;
  static constexpr bool kChangesWords = true;
  static uint32_t word(uint32_t w, int64_t) { return w ^ 0x80808080u; }
  template <int g, int h>
  static B64 quad(const uint8_t* record, int64_t t) {
    return plane(record, g * 8 + h * 4 + t);
  }
  static void factors(const uint8_t* record, float* a, float*) { small_scales<Q8_0>(record, a); }
};

struct Q4_0 : SmallBlocks {
  static constexpr int64_t kBlockBytes = 18, kPlanes = 4;
  static constexpr int32_t kOffset = 8, kMaxCode = 15;
  template <int g, int h>
  static B64 quad(const uint8_t* record, int64_t t) {
    return nibbles<h>(record, g * 4 + t);
  }
  static void factors(const uint8_t* record, float* a, float*) { small_scales<Q4_0>(record, a); }
};

struct Q4_1 : SmallBlocksWithMins {
  static constexpr int64_t kBlockBytes = 20, kPlanes = 4;
  static constexpr int32_t kMaxCode = 15;
  template <int g, int h>
  static B64 quad(const uint8_t* record, int64_t t) {
    return nibbles<h>(record, g * 4 + t);
  }
  static void factors(const uint8_t* record, float* a, float* b) {
    small_scales<Q4_1>(record, a);
    small_mins<Q4_1>(record, b);
  }
};

// Bit 4 q + i of a word to bit q of byte i: the fifth bits of 32 inputs, in the places of their quads.
static inline uint32_t bits_by_quad(uint32_t w) {
  uint32_t out = 0;
  for (int i = 0; i < 4; ++i) {
    uint32_t x = w >> i & 0x11111111u;
    x = (x | x >> 3) & 0x03030303u;
    x = (x | x >> 6) & 0x000f000fu;
    x = (x | x >> 12) & 0xffu;
    out |= x << 8 * i;
  }
  return out;
}

// A word of fifth bits, bit q of a byte that of quad q, then four of nibbles.
template <int g, int h>
static inline B64 five_bits(const uint8_t* record, int64_t t) {
  const uint8_t* block = record + g * 5 * kPlaneBytes;
  return nibbles<h>(block, 1 + t) | bit_at(plane(block, 0), 4 * h + t, 4);
}

struct Q5_0 : SmallBlocks {
  static constexpr int64_t kBlockBytes = 22, kPlanes = 5;
  static constexpr int32_t kOffset = 16, kMaxCode = 31;
  static constexpr bool kChangesWords = true;
  static uint32_t word(uint32_t w, int64_t t) { return t == 0 ? bits_by_quad(w) : w; }
  template <int g, int h>
  static B64 quad(const uint8_t* record, int64_t t) {
    return five_bits<g, h>(record, t);
  }
  static void factors(const uint8_t* record, float* a, float*) { small_scales<Q5_0>(record, a); }
};

struct Q5_1 : SmallBlocksWithMins {
  static constexpr int64_t kBlockBytes = 24, kPlanes = 5;
  static constexpr int32_t kMaxCode = 31;
  static constexpr bool kChangesWords = true;
  static uint32_t word(uint32_t w, int64_t t) { return t == 0 ? bits_by_quad(w) : w; }
  template <int g, int h>
  static B64 quad(const uint8_t* record, int64_t t) {
    return five_bits<g, h>(record, t);
  }
  static void factors(const uint8_t* record, float* a, float* b) {
    small_scales<Q5_1>(record, a);
    small_mins<Q5_1>(record, b);
  }
};

// The values of IQ4_NL and IQ4_XS, plus 128.
constexpr Table16 kNonLinear = {{1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241}};

struct IQ4_NL : SmallBlocks {
  static constexpr int64_t kBlockBytes = 18, kPlanes = 4;
  static constexpr int32_t kOffset = 128, kMaxCode = 255;
  template <int g, int h>
  static B64 quad(const uint8_t* record, int64_t t) {
    return lookup(kNonLinear, nibbles<h>(record, g * 4 + t));
  }
  static void factors(const uint8_t* record, float* a, float*) { small_scales<IQ4_NL>(record, a); }
};

// Twice the values of a float of one sign, two exponent and one mantissa bits, plus 12; the scale is a power of two.
constexpr Table16 kFloat4 = {{12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0}};

struct MXFP4 : PlainWords {
  static constexpr int64_t kBlockInputs = 32, kBlockBytes = 17, kBlocks = 4, kCodesAt = 1, kPlanes = 4;
  static constexpr int64_t kScaleBytes = kBlocks * kPanelSize;
  static constexpr int32_t kOffset = 12, kMaxCode = 24;
  static constexpr int kParts = 1;
  static constexpr bool kHasMins = false;
  // A scale is 2 ** (exponent - kExponentOffset).
  static constexpr bool kHasPowerScales = true;
  static constexpr int kExponentOffset = 128;

  // From 253 on the largest values are past float32; 255 stands for NaN.
  static bool put_scales(const uint8_t* block, int64_t n, int64_t b, uint8_t* s) {
    s[b * kPanelSize + n] = block[0];
    return block[0] < 253;
  }
  template <int g, int h>
  static B64 quad(const uint8_t* record, int64_t t) {
    return lookup(kFloat4, nibbles<h>(record, g * 4 + t));
  }
  // Scales below 2 ** -126 count as zero.
  static void factors(const uint8_t* record, float* a, float*) {
    const F16 least = set1(-126.0f);
    for (int64_t b = 0; b < kBlocks; ++b) {
      const F16 n = load_unsigned(record + kCodeBytes<MXFP4> + b * kPanelSize) - set1(kExponentOffset);
      store(a + b * kPanelSize, select_less(n, least, zero(), pow2(max(n, least))));
    }
  }
};

// 256 inputs: a scale of all, and small integer scales of 16 or 32 inputs each.
struct SuperBlocks : PlainWords {
  static constexpr int64_t kBlockInputs = 256, kBlocks = 1;
};

// kScales integer scales behind the scale of all.
template <class F, int64_t kScales>
static inline void signed_factors(const uint8_t* record, float* a) {
  const uint8_t* s = record + kCodeBytes<F>;
  const F16 d = load_halves(s);
  s += kHalves;
  for (int64_t i = 0; i < kScales; ++i) store(a + i * kPanelSize, d * load_signed(s + i * kPanelSize));
}

// Halves of 128 inputs: 32 bytes with two bits of four groups of 32 inputs each.
template <int g, int h>
static inline B64 two_bits(const uint8_t* planes, int64_t t) {
  return bits<g % 4 * 2, 0, 2>(plane(planes, g / 4 * 8 + h * 4 + t));
}

struct Q2_K : SuperBlocks {
  static constexpr int64_t kBlockBytes = 84, kCodesAt = 16, kPlanes = 16, kScaleBytes = 2 * kHalves + 16 * kPanelSize;
  static constexpr int32_t kOffset = 0, kMaxCode = 3;
  static constexpr int kParts = 2;
  static constexpr bool kHasMins = true;

  static bool put_scales(const uint8_t* block, int64_t n, int64_t, uint8_t* s) {
    put_half(block + 80, n, s);
    put_half(block + 82, n, s + kHalves);
    for (int64_t i = 0; i < 16; ++i) s[2 * kHalves + i * kPanelSize + n] = block[i];
    return is_finite_half(block + 80) && is_finite_half(block + 82);
  }
  template <int g, int h>
  static B64 quad(const uint8_t* record, int64_t t) {
    return two_bits<g, h>(record, t);
  }
  // Bytes of a scale and a minimum, four bits each.
  static void factors(const uint8_t* record, float* a, float* b) {
    const uint8_t* s = record + kCodeBytes<Q2_K>;
    const F16 d = load_halves(s), least = load_halves(s + kHalves) * set1(-1.0f);
    s += 2 * kHalves;
    for (int64_t i = 0; i < 16; i += 4) {
      uint8_t scales[64], mins[64];
      const B64 both = load_bytes(s + i * kPanelSize);
      store_bytes(scales, bits<0, 0, 4>(both));
      store_bytes(mins, bits<4, 0, 4>(both));
      for (int64_t j = 0; j < 4; ++j) {
        store(a + (i + j) * kPanelSize, d * load_unsigned(scales + j * kPanelSize));
        store(b + (i + j) * kPanelSize, least * load_unsigned(mins + j * kPanelSize));
      }
    }
  }
};

// Codes of three bits: two as in Q2_K, behind words of the third of all groups.
struct Q3_K : SuperBlocks {
  static constexpr int64_t kBlockBytes = 110, kCodesAt = 0, kPlanes = 24;
  static constexpr int64_t kScaleBytes = 320;  // a scale and 16 of 6 bits, up to whole planes
  static constexpr int32_t kOffset = 4, kMaxCode = 7;
  static constexpr int kParts = 2;
  static constexpr bool kHasMins = false;

  // 16 scales of 6 bits, plus 32: the low nibbles of bytes 0 .. 7, the high ones, and two bits each from 8 on.
  static bool put_scales(const uint8_t* block, int64_t n, int64_t, uint8_t* s) {
    const uint8_t* scales = block + 96;
    put_half(block + 108, n, s);
    for (int64_t i = 0; i < 16; ++i) {
      const int lower = scales[i % 8] >> i / 8 * 4 & 15, upper = scales[8 + i % 4] >> i / 4 * 2 & 3;
      s[kHalves + i * kPanelSize + n] = static_cast<uint8_t>((lower | upper << 4) - 32);
    }
    return is_finite_half(block + 108);
  }
  template <int g, int h>
  static B64 quad(const uint8_t* record, int64_t t) {
    return two_bits<g, h>(record + 8 * kPlaneBytes, t) | bits<g, 2, 1>(plane(record, h * 4 + t));
  }
  static void factors(const uint8_t* record, float* a, float*) { signed_factors<Q3_K, 16>(record, a); }
};

// Scale and minimum of each of 8 groups, 6 bits each, in 12 bytes: the low six bits of bytes 0 .. 7 are scales and minima
// of groups 0 .. 3; those of 4 .. 7 are a nibble of bytes 8 .. 11 and the upper two bits of bytes 0 .. 7.
struct SixBitScales : SuperBlocks {
  static constexpr int64_t kScaleBytes = 2 * kHalves + 16 * kPanelSize;
  static constexpr int32_t kOffset = 0;
  static constexpr int kParts = 1;
  static constexpr bool kHasMins = true;

  static bool put_scales(const uint8_t* block, int64_t n, int64_t, uint8_t* s) {
    const uint8_t* from = block + 4;
    put_half(block, n, s);
    put_half(block + 2, n, s + kHalves);
    uint8_t *scales = s + 2 * kHalves + n, *mins = scales + 8 * kPanelSize;
    for (int64_t i = 0; i < 4; ++i) {
      scales[i * kPanelSize] = from[i] & 63;
      mins[i * kPanelSize] = from[i + 4] & 63;
      scales[(i + 4) * kPanelSize] = static_cast<uint8_t>((from[i + 8] & 15) | from[i] >> 6 << 4);
      mins[(i + 4) * kPanelSize] = static_cast<uint8_t>(from[i + 8] >> 4 | from[i + 4] >> 6 << 4);
    }
    return is_finite_half(block) && is_finite_half(block + 2);
  }
};
template <class F>
static inline void six_bit_factors(const uint8_t* record, float* a, float* b) {
  const uint8_t* s = record + kCodeBytes<F>;
  const F16 d = load_halves(s), least = load_halves(s + kHalves) * set1(-1.0f);
  s += 2 * kHalves;
  for (int64_t i = 0; i < 8; ++i) {
    store(a + i * kPanelSize, d * load_unsigned(s + i * kPanelSize));
    store(b + i * kPanelSize, least * load_unsigned(s + (i + 8) * kPanelSize));
  }
}

// Four times 32 bytes, whose low nibbles are a group of 32 inputs and whose high ones are the next.
struct Q4_K : SixBitScales {
  static constexpr int64_t kBlockBytes = 144, kCodesAt = 16, kPlanes = 32;
  static constexpr int32_t kMaxCode = 15;
  template <int g, int h>
  static B64 quad(const uint8_t* record, int64_t t) {
    return bits<g % 2 * 4, 0, 4>(plane(record, g / 2 * 8 + h * 4 + t));
  }
  static void factors(const uint8_t* record, float* a, float* b) { six_bit_factors<Q4_K>(record, a, b); }
};

// 32 bytes whose bit g is the fifth bit in group g, then nibbles as in Q4_K.
struct Q5_K : SixBitScales {
  static constexpr int64_t kBlockBytes = 176, kCodesAt = 16, kPlanes = 40;
  static constexpr int32_t kMaxCode = 31;
  template <int g, int h>
  static B64 quad(const uint8_t* record, int64_t t) {
    const int64_t place = h * 4 + t;
    return bits<g % 2 * 4, 0, 4>(plane(record, 8 + g / 2 * 8 + place)) | bits<g, 4, 1>(plane(record, place));
  }
  static void factors(const uint8_t* record, float* a, float* b) { six_bit_factors<Q5_K>(record, a, b); }
};

// Halves of 128 inputs: 64 bytes of nibbles, whose low ones are groups 0 and 1 and whose high ones are groups 2 and 3;
// behind those of both halves, 32 bytes of upper two bits for each.
struct Q6_K : SuperBlocks {
  static constexpr int64_t kBlockBytes = 210, kCodesAt = 0, kPlanes = 48;
  static constexpr int64_t kScaleBytes = 320;  // a scale and 16 bytes, up to whole planes
  static constexpr int32_t kOffset = 32, kMaxCode = 63;
  static constexpr int kParts = 2;
  static constexpr bool kHasMins = false;

  static bool put_scales(const uint8_t* block, int64_t n, int64_t, uint8_t* s) {
    put_half(block + 208, n, s);
    for (int64_t i = 0; i < 16; ++i) s[kHalves + i * kPanelSize + n] = block[192 + i];
    return is_finite_half(block + 208);
  }
  template <int g, int h>
  static B64 quad(const uint8_t* record, int64_t t) {
    const int64_t place = h * 4 + t, half = g / 4;
    const B64 lower = bits<g % 4 / 2 * 4, 0, 4>(plane(record, half * 16 + g % 2 * 8 + place));
    return lower | bits<g % 4 * 2, 4, 2>(plane(record, 32 + half * 8 + place));
  }
  static void factors(const uint8_t* record, float* a, float*) { signed_factors<Q6_K, 16>(record, a); }
};

struct IQ4_XS : SuperBlocks {
  static constexpr int64_t kBlockBytes = 136, kCodesAt = 8, kPlanes = 32;
  static constexpr int64_t kScaleBytes = 192;  // a scale and 8 bytes, up to whole planes
  static constexpr int32_t kOffset = 128, kMaxCode = 255;
  static constexpr int kParts = 1;
  static constexpr bool kHasMins = false;

  // Scales of 6 bits, plus 32: two bits each in bytes 2 and 3, nibbles from byte 4 on.
  static bool put_scales(const uint8_t* block, int64_t n, int64_t, uint8_t* s) {
    put_half(block, n, s);
    for (int64_t i = 0; i < 8; ++i) {
      const int lower = block[4 + i / 2] >> i % 2 * 4 & 15, upper = block[2 + i / 4] >> i % 4 * 2 & 3;
      s[kHalves + i * kPanelSize + n] = static_cast<uint8_t>((lower | upper << 4) - 32);
    }
    return is_finite_half(block);
  }
  template <int g, int h>
  static B64 quad(const uint8_t* record, int64_t t) {
    return lookup(kNonLinear, nibbles<h>(record, g * 4 + t));
  }
  static void factors(const uint8_t* record, float* a, float*) { signed_factors<IQ4_XS, 8>(record, a); }
};

}  // namespace quire::QUIRE_TIER
