// The inner products of attention by vdpbf16ps, for bfloat16: a step of both chains takes four numbers of a row and one
// instruction each (simd/bf16_dot.h). Rows are kept as pairs: for every four numbers k .. k + 3 two words, (k + 2, k)
// and (k + 3, k + 1). Keys and values that many rows read are packed first, in steps of four k and sixteen columns: the
// words of the even chain of every column, then those of the odd chain. Where the instruction is missing nothing but
// the answer that it is.
#pragma once

#include "kernels/attention_cache.h"
#include "simd/bf16_dot.h"

namespace quire::QUIRE_TIER {
namespace {

template <class T>
constexpr bool kHasPairs = false;

#if defined(QUIRE_TIER_AVX512_BF16)

template <>
constexpr bool kHasPairs<bf16> = true;

// Bytes of eight numbers to those of the pairs of both chains.
inline __m128i chain_order() { return _mm_setr_epi8(4, 5, 0, 1, 6, 7, 2, 3, 12, 13, 8, 9, 14, 15, 10, 11); }

// Of 16 numbers, the pairs of both chains.
inline void store_pairs(float* out, __m256i numbers) {
  const __m256i order = _mm256_broadcastsi128_si256(chain_order());
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm256_shuffle_epi8(numbers, order));
}

// Of a query, zeros past its end up to a whole number of 16. `out` has half as many floats.
inline void store_query_pairs(const bf16* query, int64_t size, float* out) {
  for (int64_t i = 0; i < size; i += 16) {
    const __mmask16 lanes = first_lanes(min_i64(16, size - i));
    store_pairs(out + i / 2, _mm256_maskz_loadu_epi16(lanes, query + i));
  }
}

// Rounds the weights of 16 tokens to bfloat16 and stores their pairs, 8 floats; returns them rounded. None may be
// subnormal.
inline F16 store_weight_pairs(float* out, F16 weights) {
  const __m256i rounded = (__m256i)_mm512_cvtneps_pbh(weights.v);
  store_pairs(out, rounded);
  return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(rounded), 16))};
}

// Rounds the weights of 32 tokens to bfloat16 and stores their pairs, 16 floats; returns `sum` with those at odd places
// and then those at even places added. None may be subnormal.
inline F16 store_weight_pairs(float* out, F16 first, F16 second, F16 sum) {
  const __m512i rounded = (__m512i)_mm512_cvtne2ps_pbh(second.v, first.v);
  _mm512_storeu_si512(out, _mm512_shuffle_epi8(rounded, _mm512_broadcast_i32x4(chain_order())));
  const __m512i ones = _mm512_set1_epi32(0x3f803f80);
  add_chain_pairs_inplace(sum.v, _mm512_castsi512_ps(rounded), _mm512_castsi512_ps(ones));
  return sum;
}

// Two rows of a tile, k / 2 and k / 2 + 1, as the chains take them. With one row left the second is zeros.
template <bool IsWhole, bool HasSecond>
inline void load_chains(const bf16* b, int64_t b_stride, int64_t num_lanes, F16& even, F16& odd) {
  const __mmask16 lanes = first_lanes(num_lanes);
  const __m512i first = IsWhole ? _mm512_loadu_si512(b) : _mm512_maskz_loadu_epi32(lanes, b);
  __m512i second = _mm512_setzero_si512();
  if (HasSecond) second = IsWhole ? _mm512_loadu_si512(b + b_stride) : _mm512_maskz_loadu_epi32(lanes, b + b_stride);
  even.v = _mm512_castsi512_ps(_mm512_mask_blend_epi16(0xaaaaaaaau, second, _mm512_slli_epi32(first, 16)));
  odd.v = _mm512_castsi512_ps(_mm512_mask_blend_epi16(0xaaaaaaaau, _mm512_srli_epi32(second, 16), first));
}

template <bool IsWhole, bool HasSecond, int Rows, int Columns>
inline void add_chains(const float* a, int64_t a_stride, const bf16* b, int64_t b_stride, int64_t num_lanes,
                       F16 (&even)[Rows][Columns], F16 (&odd)[Rows][Columns]) {
  F16 b_even[Columns], b_odd[Columns];
  for (int c = 0; c < Columns; ++c) {
    load_chains<IsWhole, HasSecond>(b + 32 * c, b_stride, num_lanes, b_even[c], b_odd[c]);
  }
  for (int r = 0; r < Rows; ++r) {
    const F16 a_even = set1(a[r * a_stride]), a_odd = set1(a[r * a_stride + 1]);
    for (int c = 0; c < Columns; ++c) {
      even[r][c] = add_chain_pairs(a_even, b_even[c], even[r][c]);
      odd[r][c] = add_chain_pairs(a_odd, b_odd[c], odd[r][c]);
    }
  }
}

// out[r][0 .. 16 * Columns - 1] = (Adds ? out : 0) + a . b, as `multiply` of attention_tile.h; `a` holds pairs.
template <bool Adds, bool IsWhole, int Rows, int Columns>
inline void multiply_pairs(const float* a, int64_t a_stride, const bf16* b, int64_t b_stride, int64_t k,
                           int64_t num_lanes, int64_t ahead, float* out, int64_t out_stride) {
  for (int64_t tile = 0; tile < k; tile += 32) {
    const int64_t end = min_i64(k, tile + 32);
    F16 even[Rows][Columns], odd[Rows][Columns];
    for (int r = 0; r < Rows; ++r) {
      for (int c = 0; c < Columns; ++c) even[r][c] = odd[r][c] = zero();
    }
    int64_t i = tile;
    for (; i + 4 <= end; i += 4) {
      const bf16* rows = b + i / 2 * b_stride;
      if (ahead != 0) {
        for (int c = 0; c < Columns; ++c) {
          prefetch_l2(reinterpret_cast<const char*>(rows + 32 * c) + ahead);
          prefetch_l2(reinterpret_cast<const char*>(rows + b_stride + 32 * c) + ahead);
        }
      }
      add_chains<IsWhole, true>(a + i / 2, a_stride, rows, b_stride, num_lanes, even, odd);
    }
    if (i < end) add_chains<IsWhole, false>(a + i / 2, a_stride, b + i / 2 * b_stride, b_stride, num_lanes, even, odd);
    for (int r = 0; r < Rows; ++r) {
      for (int c = 0; c < Columns; ++c) {
        float* const to = out + r * out_stride + 16 * c;
        const F16 before = Adds || tile > 0 ? load(to) : zero();
        store(to, before + (even[r][c] + odd[r][c]));
      }
    }
  }
}

constexpr int64_t kStep = 32;  // floats of a packed step

// Steps of one tile of right operands: k of them for each pair of sixteen columns, and a single one where they are odd.
constexpr int64_t packed_tile_size(int64_t k, int64_t num_columns) {
  return ceil_div(k, 4) * ceil_div(num_columns, 16) * kStep;
}

// Packs the first `num_lanes` of sixteen columns of b[k / 2][columns][2], with k even, the others as zeros. `b_stride`:
// elements from pair to pair; `width`: columns / 16 that a step has.
template <bool IsWhole>
inline void pack_columns(const bf16* b, int64_t b_stride, int64_t k, int64_t num_lanes, int64_t width, float* out) {
  int64_t i = 0;
  F16 even, odd;
  for (; i + 4 <= k; i += 4, out += width * kStep) {
    load_chains<IsWhole, true>(b + i / 2 * b_stride, b_stride, num_lanes, even, odd);
    store(out, even);
    store(out + 16, odd);
  }
  if (i == k) return;
  load_chains<IsWhole, false>(b + i / 2 * b_stride, b_stride, num_lanes, even, odd);
  store(out, even);
  store(out + 16, odd);
}

// Packs a tile of `num_columns`.
inline void pack_tile(const bf16* b, int64_t b_stride, int64_t k, int64_t num_columns, float* out) {
  const int64_t num_steps = ceil_div(k, 4);
  for (int64_t column = 0; column < num_columns; column += 16) {
    const int64_t width = column / 32 * 32 + 16 < num_columns ? 2 : 1, num_lanes = num_columns - column;
    float* to = out + (column / 32 * 2 * num_steps + column / 16 % 2) * kStep;
    if (num_lanes >= 16) {
      pack_columns<true>(b + 2 * column, b_stride, k, 16, width, to);
    } else {
      pack_columns<false>(b + 2 * column, b_stride, k, num_lanes, width, to);
    }
  }
}

constexpr int64_t kTileSteps = 8;   // of 32 k
constexpr int64_t kTileWords = 16;  // of a row: pairs of a tile
constexpr int64_t kPackedRows = 4;  // whose chains and totals stay in registers, beside two columns of weights

// Functions that take sums are always inlined, and loops over them unrolled: only then are they registers.
template <int Rows, int Columns>
struct PackedSums {
  __m512 even[Rows][Columns], odd[Rows][Columns], totals[Rows][Columns];
};

template <int Rows, int Columns>
[[gnu::always_inline]] inline void clear(__m512 (&sums)[Rows][Columns]) {
#pragma GCC unroll 4
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 2
    for (int c = 0; c < Columns; ++c) sums[r][c] = _mm512_setzero_ps();
  }
}

// A step of the chains of all rows; with `is_last` their sums too, each row's among the products of the next.
template <int Rows, int Columns>
[[gnu::always_inline]] inline void add_packed_step(const float* a, int64_t a_stride, const float* b, bool is_last,
                                                   PackedSums<Rows, Columns>& sums) {
  __m512 b_even[Columns], b_odd[Columns];
#pragma GCC unroll 2
  for (int c = 0; c < Columns; ++c) {
    b_even[c] = _mm512_loadu_ps(b + c * kStep);
    b_odd[c] = _mm512_loadu_ps(b + c * kStep + 16);
  }
#pragma GCC unroll 4
  for (int r = 0; r < Rows; ++r) {
    const __m512 a_even = _mm512_set1_ps(a[r * a_stride]), a_odd = _mm512_set1_ps(a[r * a_stride + 1]);
#pragma GCC unroll 2
    for (int c = 0; c < Columns; ++c) {
      add_chain_pairs_inplace(sums.even[r][c], a_even, b_even[c]);
      add_chain_pairs_inplace(sums.odd[r][c], a_odd, b_odd[c]);
      if (!is_last) continue;
      sums.totals[r][c] = _mm512_add_ps(sums.totals[r][c], _mm512_add_ps(sums.even[r][c], sums.odd[r][c]));
    }
  }
}

// out[r][0 .. 16 * Columns - 1] = a . b over `num_steps` packed steps, `b_stride` floats from tile to tile.
template <int Rows, int Columns>
[[gnu::noinline]] static void multiply_steps(const float* a, int64_t a_stride, const float* b, int64_t b_stride,
                                             int64_t num_steps, float* out, int64_t out_stride) {
  PackedSums<Rows, Columns> sums;
  clear(sums.totals);
  for (; num_steps >= kTileSteps; num_steps -= kTileSteps, a += kTileWords, b += b_stride) {
    clear(sums.even);
    clear(sums.odd);
#pragma GCC unroll 8
    for (int64_t i = 0; i < kTileSteps; ++i) {
      add_packed_step(a + 2 * i, a_stride, b + i * Columns * kStep, i + 1 == kTileSteps, sums);
    }
  }
  if (num_steps > 0) {
    clear(sums.even);
    clear(sums.odd);
    for (int64_t i = 1; i < num_steps; ++i, a += 2, b += Columns * kStep) add_packed_step(a, a_stride, b, false, sums);
    add_packed_step(a, a_stride, b, true, sums);
  }
#pragma GCC unroll 4
  for (int r = 0; r < Rows; ++r) {
#pragma GCC unroll 2
    for (int c = 0; c < Columns; ++c) _mm512_storeu_ps(out + r * out_stride + 16 * c, sums.totals[r][c]);
  }
}

// The same of any number of rows.
template <int Columns>
inline void multiply_packed_rows(const float* a, int64_t a_stride, int64_t num_rows, const float* b, int64_t b_stride,
                                 int64_t num_steps, float* out, int64_t out_stride) {
  for (; num_rows > 0; num_rows -= kPackedRows, a += kPackedRows * a_stride, out += kPackedRows * out_stride) {
    switch (num_rows) {
      case 1: multiply_steps<1, Columns>(a, a_stride, b, b_stride, num_steps, out, out_stride); break;
      case 2: multiply_steps<2, Columns>(a, a_stride, b, b_stride, num_steps, out, out_stride); break;
      case 3: multiply_steps<3, Columns>(a, a_stride, b, b_stride, num_steps, out, out_stride); break;
      default: multiply_steps<4, Columns>(a, a_stride, b, b_stride, num_steps, out, out_stride); break;
    }
  }
}

#endif

}  // namespace
}  // namespace quire::QUIRE_TIER
