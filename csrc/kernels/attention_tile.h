// The inner products of attention: a few rows of float32 numbers against keys or values as they lie in a page.
//
// The order of additions, the same in every tier and for any number of rows. bf16: k in tiles of 32; within one, the
// even k and the odd k are added up from zero one by one, and their sum is added to the result, as the tile unit does.
// f32: one by one.
#pragma once

#include "kernels/attention_cache.h"
#include "kernels/attention_pairs.h"

namespace quire::QUIRE_TIER {
namespace {

constexpr int64_t kTile = 32;

// Rows and columns of sixteen lanes whose chains stay in registers. A few rows alone would wait for their own sums.
#if defined(QUIRE_SIMD_AVX512)
template <class T>
constexpr int kRegisterRows = kHasPairs<T> ? 6 : 8;
#else
template <class T>
constexpr int kRegisterRows = 2;
#endif
template <class T, int Rows>
constexpr int kColumnsFor = kHasPairs<T> || 2 * Rows <= kRegisterRows<T> ? 2 : 1;

template <int N>
struct Int {
  static constexpr int value = N;
};

// Calls fn(Int<num>) for a group of at most kRegisterRows rows.
template <class T, class Fn>
inline void with_row_count(int64_t num, const Fn& fn) {
  if (num == kRegisterRows<T>) return fn(Int<kRegisterRows<T>>{});
  switch (num) {
    case 1: fn(Int<1>{}); break;
#if defined(QUIRE_SIMD_AVX512)
    case 2: fn(Int<2>{}); break;
    case 3: fn(Int<3>{}); break;
    case 4: fn(Int<4>{}); break;
    case 5: fn(Int<5>{}); break;
    case 6: fn(Int<(kHasPairs<T> ? 1 : 6)>{}); break;
    case 7: fn(Int<(kHasPairs<T> ? 1 : 7)>{}); break;
#endif
    default: break;
  }
}

// Calls fn(Int<n>, first row) for groups of kRegisterRows rows; what is left over is two groups of similar size or one.
template <class T, class Fn>
inline void for_row_groups(int64_t num_rows, const Fn& fn) {
  constexpr int64_t kRows = kRegisterRows<T>;
  int64_t row = 0;
  for (; num_rows - row >= 2 * kRows || num_rows - row == kRows; row += kRows) fn(Int<kRows>{}, row);
  while (row < num_rows) {
    const int64_t left = num_rows - row, num = left > kRows ? left - left / 2 : left;
    with_row_count<T>(num, [&](auto rows) { fn(rows, row); });
    row += num;
  }
}

template <bool IsWhole>
inline void load_column(const bf16* p, int64_t n, F16& even, F16& odd) {
  if (IsWhole) {
    load_pairs(p, even, odd);
  } else {
    load_pairs_n(p, n, even, odd);
  }
}

inline void prefetch_ahead(const void* p, int64_t ahead) { prefetch_l2(static_cast<const char*>(p) + ahead); }

// sum[r][c] += a[r][0 .. k - 1] . b, with k even. b[k / 2][columns][2]: `b_stride` elements from pair to pair.
// With IsWhole false there is one column, of `num_lanes` lanes. What lies `ahead` bytes from b is fetched meanwhile.
template <bool IsWhole, int Rows, int Columns>
inline void accumulate(const float* a, int64_t a_stride, const bf16* b, int64_t b_stride, int64_t k, int64_t num_lanes,
                       int64_t ahead, F16 (&sum)[Rows][Columns]) {
  for (int64_t tile = 0; tile < k; tile += kTile) {
    const int64_t end = min_i64(k, tile + kTile);
    F16 even[Rows][Columns], odd[Rows][Columns];
    for (int r = 0; r < Rows; ++r) {
      for (int c = 0; c < Columns; ++c) even[r][c] = odd[r][c] = zero();
    }
    for (int64_t i = tile; i < end; i += 2) {
      F16 b_even[Columns], b_odd[Columns];
      for (int c = 0; c < Columns; ++c) {
        load_column<IsWhole>(b + i / 2 * b_stride + 32 * c, num_lanes, b_even[c], b_odd[c]);
        prefetch_ahead(b + i / 2 * b_stride + 32 * c, ahead);
      }
      for (int r = 0; r < Rows; ++r) {
        const F16 a_even = set1(a[r * a_stride + i]), a_odd = set1(a[r * a_stride + i + 1]);
        for (int c = 0; c < Columns; ++c) {
          even[r][c] = add_exact_product(a_even, b_even[c], even[r][c]);
          odd[r][c] = add_exact_product(a_odd, b_odd[c], odd[r][c]);
        }
      }
    }
    for (int r = 0; r < Rows; ++r) {
      for (int c = 0; c < Columns; ++c) sum[r][c] = sum[r][c] + (even[r][c] + odd[r][c]);
    }
  }
}

// The same for float32: b[k][columns].
template <bool IsWhole, int Rows, int Columns>
inline void accumulate(const float* a, int64_t a_stride, const float* b, int64_t b_stride, int64_t k, int64_t num_lanes,
                       int64_t ahead, F16 (&sum)[Rows][Columns]) {
  for (int64_t i = 0; i < k; ++i) {
    F16 columns[Columns];
    for (int c = 0; c < Columns; ++c) {
      columns[c] = IsWhole ? load(b + i * b_stride + 16 * c) : load_n(b + i * b_stride + 16 * c, num_lanes);
      prefetch_ahead(b + i * b_stride + 16 * c, ahead);
    }
    for (int r = 0; r < Rows; ++r) {
      for (int c = 0; c < Columns; ++c) sum[r][c] = sum[r][c] + set1(a[r * a_stride + i]) * columns[c];
    }
  }
}

// out[r][0 .. 16 * Columns - 1] = (Adds ? out : 0) + a . b.
template <bool Adds, bool IsWhole, int Rows, int Columns, class T>
inline void multiply(const float* a, int64_t a_stride, const T* b, int64_t b_stride, int64_t k, int64_t num_lanes,
                     int64_t ahead, float* out, int64_t out_stride) {
#if defined(QUIRE_TIER_AVX512_BF16)
  if constexpr (kHasPairs<T>) {
    multiply_pairs<Adds, IsWhole, Rows, Columns>(a, a_stride, b, b_stride, k, num_lanes, ahead, out, out_stride);
    return;
  }
#endif
  F16 sum[Rows][Columns];
  for (int r = 0; r < Rows; ++r) {
    for (int c = 0; c < Columns; ++c) sum[r][c] = Adds ? load(out + r * out_stride + 16 * c) : zero();
  }
  accumulate<IsWhole>(a, a_stride, b, b_stride, k, num_lanes, ahead, sum);
  for (int r = 0; r < Rows; ++r) {
    for (int c = 0; c < Columns; ++c) store(out + r * out_stride + 16 * c, sum[r][c]);
  }
}

// out[num_rows][num_columns] = (Adds ? out : 0) + a[num_rows][k] . b[k][num_columns]. Rows of `out` have room for a
// whole number of sixteen lanes; lanes past `num_columns` become zero. Rows of `a` are floats, or pairs with kHasPairs.
template <bool Adds, class T>
inline void multiply_rows(const float* a, int64_t a_stride, int64_t num_rows, const T* b, int64_t b_stride, int64_t k,
                          int64_t num_columns, int64_t ahead, float* out, int64_t out_stride) {
  for_row_groups<T>(num_rows, [&](auto rows, int64_t row) {
    constexpr int num = decltype(rows)::value, wide = kColumnsFor<T, num>;
    const float* a_row = a + row * a_stride;
    float* out_row = out + row * out_stride;
    int64_t column = 0;
    for (; column + 16 * wide <= num_columns; column += 16 * wide) {
      multiply<Adds, true, num, wide>(a_row, a_stride, b + kPair<T> * column, b_stride, k, 16, ahead, out_row + column,
                                      out_stride);
    }
    for (; column + 16 <= num_columns; column += 16) {
      multiply<Adds, true, num, 1>(a_row, a_stride, b + kPair<T> * column, b_stride, k, 16, ahead, out_row + column,
                                   out_stride);
    }
    if (column < num_columns) {
      multiply<Adds, false, num, 1>(a_row, a_stride, b + kPair<T> * column, b_stride, k, num_columns - column, ahead,
                                    out_row + column, out_stride);
    }
  });
}

}  // namespace
}  // namespace quire::QUIRE_TIER
