// Symmetric int8 by the largest magnitude, for rows of activations and of weights: written once on F16.
#pragma once

#include "simd/simd.h"

namespace quire::QUIRE_TIER {

// Rows whose largest magnitude is below this count as zero: scales stay normal numbers, reciprocals finite.
constexpr float kLeastAbsmax = 0x1p-96f;

struct RowScale {
  float scale, inverse;  // value = q * scale; both 0 for a row of zeros, NaN and 0 for one that is not finite
  bool is_finite;
};

static inline F16 round_half_even(F16 x) {
  const F16 magic = set1(12582912.0f);  // 1.5 * 2 ** 23
  return (x + magic) - magic;
}
static inline F16 magnitude(F16 x) { return max(x, zero() - x); }

// x - x is 0 for finite numbers and NaN for others.
static inline bool is_finite_sum(F16 poison) { return hsum(poison) == 0.0f; }

template <class T>
static inline RowScale row_scale(const T* x, int64_t size) {
  F16 largest = zero(), poison = zero();
  int64_t i = 0;
  for (; i + 16 <= size; i += 16) {
    const F16 v = load(x + i);
    largest = max(magnitude(v), largest);
    poison = poison + (v - v);
  }
  if (i < size) {
    const F16 v = load_n(x + i, size - i);
    largest = max(magnitude(v), largest);
    poison = poison + (v - v);
  }
  if (!is_finite_sum(poison)) return {__builtin_nanf(""), 0.0f, false};
  const float absmax = hmax(largest);
  if (absmax < kLeastAbsmax) return {0.0f, 0.0f, true};
  return {absmax / 127.0f, 127.0f / absmax, true};
}

// Writes q[0 .. size), zeros from there to `padded_size` (a multiple of 16, q has room for it), and
// starts[g] = factor * the sum of q over group g: what the dot products begin with, as weights are stored with an offset.
template <class T>
static inline void quantize_row(const T* x, int64_t size, RowScale scale, int8_t* q, int64_t padded_size,
                                int64_t group_size, int32_t factor, int32_t* starts) {
  const int64_t num_groups = ceil_div(size, group_size);
  if (scale.inverse == 0.0f) {
    __builtin_memset(q, 0, static_cast<uint64_t>(padded_size));
    for (int64_t g = 0; g < num_groups; ++g) starts[g] = 0;
    return;
  }
  const F16 inverse = set1(scale.inverse);
  int64_t i = 0;
  for (int64_t g = 0; g < num_groups; ++g) {
    const int64_t end = min_i64(size, (g + 1) * group_size);
    F16 sum = zero();  // of integers below 2 ** 24 together: exact
    for (; i + 16 <= end; i += 16) {
      const F16 rounded = round_half_even(load(x + i) * inverse);
      store_int8(q + i, rounded);
      sum = sum + rounded;
    }
    if (i < end) {
      const F16 rounded = round_half_even(load_n(x + i, end - i) * inverse);
      store_int8(q + i, rounded);
      sum = sum + rounded;
      i += 16;
    }
    starts[g] = factor * static_cast<int32_t>(hsum(sum));
  }
  if (i < padded_size) __builtin_memset(q + i, 0, static_cast<uint64_t>(padded_size - i));
}

}  // namespace quire::QUIRE_TIER
