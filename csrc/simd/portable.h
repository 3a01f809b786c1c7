// F16 in plain C++, for any processor; the compiler vectorises what it can.
#pragma once

namespace quire::QUIRE_TIER {

struct F16 {
  float v[16];
};

static inline float float_of(uint32_t bits) {
  float x;
  __builtin_memcpy(&x, &bits, 4);
  return x;
}
static inline uint32_t bits_of(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  return bits;
}
static inline float widen(bf16 x) { return float_of(static_cast<uint32_t>(x.bits) << 16); }
static inline float widen(float x) { return x; }
static inline void narrow(float x, float& out) { out = x; }
static inline void narrow(float x, bf16& out) {
  const uint32_t bits = bits_of(x);
  const uint32_t rounded = x != x ? bits | 0x400000u : bits + 0x7fffu + ((bits >> 16) & 1u);
  out.bits = static_cast<uint16_t>(rounded >> 16);
}

template <class Fn>
static inline F16 each_lane(Fn fn) {
  F16 out;
  for (int i = 0; i < 16; ++i) out.v[i] = fn(i);
  return out;
}
static inline F16 zero() { return {}; }
static inline F16 set1(float x) {
  return each_lane([=](int) { return x; });
}
template <class T>
static inline F16 load(const T* p) {
  return each_lane([=](int i) { return widen(p[i]); });
}
// Lanes from n on are zero; memory beyond them is not touched. 0 <= n <= 16.
template <class T>
static inline F16 load_n(const T* p, int64_t n) {
  return each_lane([=](int i) { return i < n ? widen(p[i]) : 0.0f; });
}
template <class T>
static inline void store(T* p, const F16& x) {
  for (int i = 0; i < 16; ++i) narrow(x.v[i], p[i]);
}
template <class T>
static inline void store_n(T* p, int64_t n, const F16& x) {
  for (int64_t i = 0; i < n; ++i) narrow(x.v[i], p[i]);
}

static inline F16 operator+(const F16& a, const F16& b) {
  return each_lane([&](int i) { return a.v[i] + b.v[i]; });
}
static inline F16 operator-(const F16& a, const F16& b) {
  return each_lane([&](int i) { return a.v[i] - b.v[i]; });
}
static inline F16 operator*(const F16& a, const F16& b) {
  return each_lane([&](int i) { return a.v[i] * b.v[i]; });
}
static inline F16 operator/(const F16& a, const F16& b) {
  return each_lane([&](int i) { return a.v[i] / b.v[i]; });
}
// a > b ? a : b, so b when either is NaN.
static inline F16 max(const F16& a, const F16& b) {
  return each_lane([&](int i) { return a.v[i] > b.v[i] ? a.v[i] : b.v[i]; });
}
// a < b ? a : b, so b when either is NaN.
static inline F16 min(const F16& a, const F16& b) {
  return each_lane([&](int i) { return a.v[i] < b.v[i] ? a.v[i] : b.v[i]; });
}
// Where x < limit: `below`, elsewhere (NaN too): `otherwise`.
static inline F16 select_less(const F16& x, const F16& limit, const F16& below, const F16& otherwise) {
  return each_lane([&](int i) { return x.v[i] < limit.v[i] ? below.v[i] : otherwise.v[i]; });
}
// a * b + c where a * b is exact in float32 (two bfloat16 numbers): one rounding, fused or not.
static inline F16 add_exact_product(const F16& a, const F16& b, const F16& c) {
  return each_lane([&](int i) { return a.v[i] * b.v[i] + c.v[i]; });
}
// 2 ** n for integers -126 <= n <= 127.
static inline F16 pow2(const F16& n) {
  return each_lane([&](int i) { return float_of(static_cast<uint32_t>(static_cast<int32_t>(n.v[i]) + 127) << 23); });
}
// Sixteen pairs of bfloat16 numbers: the first of each pair, and the second.
static inline void load_pairs(const bf16* p, F16& even, F16& odd) {
  for (int i = 0; i < 16; ++i) {
    even.v[i] = widen(p[2 * i]);
    odd.v[i] = widen(p[2 * i + 1]);
  }
}
// Lanes are folded in halves: 16 to 8, 8 to 4, 4 to 2, 2 to 1.
static inline float hsum(F16 x) {
  for (int half = 8; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) x.v[i] += x.v[i + half];
  }
  return x.v[0];
}
static inline float hmax(F16 x) {
  for (int half = 8; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) x.v[i] = x.v[i] > x.v[i + half] ? x.v[i] : x.v[i + half];
  }
  return x.v[0];
}

// Quantised GEMM. Sixteen integers as floats.
static inline F16 load_int32(const int32_t* p) {
  return each_lane([=](int i) { return static_cast<float>(p[i]); });
}
// Integers -128 <= x <= 127 as bytes.
static inline void store_int8(int8_t* p, const F16& x) {
  for (int i = 0; i < 16; ++i) p[i] = static_cast<int8_t>(static_cast<int32_t>(x.v[i]));
}

// Attention.

// As `load_pairs`; pairs from n on are zero and not touched. 0 <= n <= 16.
static inline void load_pairs_n(const bf16* p, int64_t n, F16& even, F16& odd) {
  for (int i = 0; i < 16; ++i) {
    even.v[i] = i < n ? widen(p[2 * i]) : 0.0f;
    odd.v[i] = i < n ? widen(p[2 * i + 1]) : 0.0f;
  }
}
// Each lane rounded to a bfloat16 number.
static inline F16 as_bf16(const F16& x) {
  return each_lane([&](int i) {
    bf16 rounded;
    narrow(x.v[i], rounded);
    return widen(rounded);
  });
}
// 0, 1, .. 15.
static inline F16 lane_numbers() {
  return each_lane([](int i) { return static_cast<float>(i); });
}

// Sampling.

// Bit i: a[i] < b[i].
static inline uint32_t less_mask(const F16& a, const F16& b) {
  uint32_t bits = 0;
  for (int i = 0; i < 16; ++i) bits |= static_cast<uint32_t>(a.v[i] < b.v[i]) << i;
  return bits;
}
// Lane i: `set` where bit i is 1, else `clear`.
static inline F16 select_bits(uint32_t bits, const F16& set, const F16& clear) {
  return each_lane([&](int i) { return (bits >> i & 1u) != 0 ? set.v[i] : clear.v[i]; });
}
// The lanes whose bits are 1, side by side, and their numbers plus `first`. May write 16 of each. Returns how many.
static inline int pack(uint32_t bits, const F16& x, int32_t first, float* values, int32_t* numbers) {
  int count = 0;
  for (; bits != 0; bits &= bits - 1) {
    const int lane = __builtin_ctz(bits);
    values[count] = x.v[lane];
    numbers[count++] = first + lane;
  }
  return count;
}
// Sixteen sums of unsigned 64-bit integers.
struct Fixed16 {
  uint64_t v[16];
};
static inline Fixed16 fixed_zero() { return {}; }
// The integer part of each lane, 0 <= x < 2 ** 52.
static inline Fixed16 to_fixed(const F16& x) {
  Fixed16 out;
  for (int i = 0; i < 16; ++i) out.v[i] = static_cast<uint64_t>(static_cast<int64_t>(x.v[i]));
  return out;
}
static inline Fixed16 operator+(const Fixed16& a, const Fixed16& b) {
  Fixed16 out;
  for (int i = 0; i < 16; ++i) out.v[i] = a.v[i] + b.v[i];
  return out;
}
static inline void store(uint64_t* p, const Fixed16& x) {
  for (int i = 0; i < 16; ++i) p[i] = x.v[i];
}

// Products.

// Past the caches where the tier can.
template <class T>
static inline void stream(T* p, const F16& x) {
  store(p, x);
}
static inline void store_fence() {}

// Attention's softmax.

// x * 2 ** n where `shifted` is n + 1.5 * 2 ** 23 and neither x nor the result is subnormal.
static inline F16 add_to_exponent(const F16& x, const F16& shifted) {
  return each_lane([&](int i) { return float_of(bits_of(x.v[i]) + (bits_of(shifted.v[i]) << 23)); });
}
// Zero where x < limit; elsewhere (NaN too) as `add_to_exponent`.
static inline F16 add_to_exponent_or_zero(const F16& y, const F16& shifted, const F16& x, const F16& limit) {
  return select_less(x, limit, zero(), add_to_exponent(y, shifted));
}
// Of the 32 numbers in a and then b, those at even places, and those at odd ones.
static inline void split_pairs(const F16& a, const F16& b, F16& even, F16& odd) {
  for (int i = 0; i < 8; ++i) {
    even.v[i] = a.v[2 * i];
    odd.v[i] = a.v[2 * i + 1];
    even.v[i + 8] = b.v[2 * i];
    odd.v[i + 8] = b.v[2 * i + 1];
  }
}

}  // namespace quire::QUIRE_TIER
