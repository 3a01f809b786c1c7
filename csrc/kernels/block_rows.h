// Rows of activations as int8, with a scale for every 32 inputs. Written once on F16.
#pragma once

#include "kernels/block_formats.h"
#include "kernels/quant_rows.h"

namespace quire::QUIRE_TIER {

// In memory shared by all tasks of a call.
struct BlockRows {
  int8_t* q;  // [rows up to a multiple of kRowsPadding][stride]
  int64_t stride;
  float* scales;  // [rows][groups]
  // Of every part of a group, 4 bytes: where the format has minima, the sum of q as a float; elsewhere what the dot
  // product begins with, - offset * that sum, as an integer.
  char* sums;
  int64_t groups, parts;

  float* scales_of(int64_t row) const { return scales + row * groups; }
  char* sums_of(int64_t row) const { return sums + row * groups * parts * 4; }
};

template <class F>
static inline void put_sum(char* to, float sum) {
  if constexpr (F::kHasMins) {
    __builtin_memcpy(to, &sum, 4);
  } else {
    const int32_t start = -F::kOffset * static_cast<int32_t>(sum);
    __builtin_memcpy(to, &start, 4);
  }
}

template <class T>
static inline bool is_finite_row(const T* x, int64_t size) {
  F16 poison = zero();
  for (int64_t i = 0; i < size; i += 16) {
    const F16 v = load(x + i);
    poison = poison + (v - v);
  }
  return is_finite_sum(poison);
}

// One group of 32 finite numbers.
template <class F, class T>
static inline void quantize_group(const T* x, int8_t* q, float* scale, char* sums) {
  const F16 first = load(x), second = load(x + 16);
  const float absmax = hmax(max(magnitude(first), magnitude(second)));
  const bool is_zero = absmax < kLeastAbsmax;
  const F16 inverse = set1(is_zero ? 0.0f : 127.0f / absmax);
  *scale = is_zero ? 0.0f : absmax / 127.0f;
  const F16 low = round_half_even(first * inverse), high = round_half_even(second * inverse);
  store_int8(q, low);
  store_int8(q + 16, high);
  if constexpr (F::kParts == 2) {
    put_sum<F>(sums, hsum(low));
    put_sum<F>(sums + 4, hsum(high));
  } else {
    put_sum<F>(sums, hsum(low + high));
  }
}

// `size` inputs, a multiple of 32, and zeros up to rows.groups. A row with NaN or infinity: the first scale is NaN.
template <class F, class T>
static inline void quantize_groups(const T* x, int64_t size, const BlockRows& rows, int64_t m) {
  int8_t* q = rows.q + m * rows.stride;
  float* scales = rows.scales_of(m);
  char* sums = rows.sums_of(m);
  const int64_t filled = is_finite_row(x, size) ? size / kGroupInputs : 0;
  for (int64_t g = 0; g < filled; ++g) {
    quantize_group<F>(x + g * kGroupInputs, q + g * kGroupInputs, scales + g, sums + g * F::kParts * 4);
  }
  const int64_t rest = rows.groups - filled;
  __builtin_memset(q + filled * kGroupInputs, 0, static_cast<uint64_t>(rest * kGroupInputs));
  __builtin_memset(scales + filled, 0, static_cast<uint64_t>(rest * 4));
  __builtin_memset(sums + filled * F::kParts * 4, 0, static_cast<uint64_t>(rest * F::kParts * 4));
  if (filled == 0) scales[0] = __builtin_nanf("");
}

}  // namespace quire::QUIRE_TIER
