// Columns of a matrix of 32-bit words as rows.
#pragma once

#include "simd/simd.h"

namespace quire::QUIRE_TIER {

// out[c][r] = rows[r][c] for 16 rows and `num_columns` columns of words, each of which may be two bfloat16 numbers.
#if defined(QUIRE_SIMD_AVX512)

static inline void transpose_16_rows(const char* rows, int64_t row_bytes, int64_t num_columns, char* out,
                                     int64_t out_bytes) {
  for (int64_t first = 0; first < num_columns; first += 16) {
    const int64_t num = min_i64(16, num_columns - first);
    const __mmask16 lanes = first_lanes(num);
    __m512i r[16], t[16];
    for (int i = 0; i < 16; ++i) r[i] = _mm512_maskz_loadu_epi32(lanes, rows + i * row_bytes + 4 * first);
    for (int i = 0; i < 16; i += 2) {
      t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
      t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    // Lane L of r[4 * i + j]: column 4 * L + j of rows 4 * i .. 4 * i + 3.
    for (int i = 0; i < 16; i += 4) {
      r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
      r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
      r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
      r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int j = 0; j < 4; ++j) {
      const __m512i even = _mm512_shuffle_i32x4(r[j], r[4 + j], 0x88), odd = _mm512_shuffle_i32x4(r[j], r[4 + j], 0xdd);
      const __m512i even_2 = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0x88);
      const __m512i odd_2 = _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0xdd);
      t[j] = _mm512_shuffle_i32x4(even, even_2, 0x88);
      t[4 + j] = _mm512_shuffle_i32x4(odd, odd_2, 0x88);
      t[8 + j] = _mm512_shuffle_i32x4(even, even_2, 0xdd);
      t[12 + j] = _mm512_shuffle_i32x4(odd, odd_2, 0xdd);
    }
    for (int64_t c = 0; c < num; ++c) _mm512_storeu_si512(out + (first + c) * out_bytes, t[c]);
  }
}

#else

static inline void transpose_16_rows(const char* rows, int64_t row_bytes, int64_t num_columns, char* out,
                                     int64_t out_bytes) {
  for (int64_t c = 0; c < num_columns; ++c) {
    for (int64_t r = 0; r < 16; ++r) __builtin_memcpy(out + c * out_bytes + 4 * r, rows + r * row_bytes + 4 * c, 4);
  }
}

#endif

}  // namespace quire::QUIRE_TIER
