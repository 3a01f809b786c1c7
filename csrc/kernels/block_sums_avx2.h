// Sums of products with codes on AVX2: see block_few.h, and quant_dot_avx2.h for the instructions.
#pragma once

#include "kernels/quant_dot_avx2.h"

namespace quire::QUIRE_TIER {

// Rows for which codes are unpacked anew for every four of them. Small blocks: faster for any number; of super-blocks that
// takes so many instructions, and two parts so many registers, that more rows had better share it.
template <class F>
constexpr int64_t kFewBlockRows = F::kParts == 2 ? 3 : F::kBlockInputs == 256 ? 8 : kMaxTaskRows;

template <class F, int R>
class CodeSums {
 public:
  // Of bytes, the product with their offset is never added.
  void start(int r, int32_t start) { sums_[r][0] = sums_[r][1] = _mm256_set1_epi32(kIsBytes ? 0 : start); }

  template <class Quad>
  [[gnu::always_inline]] inline void add(const Quad& quad, const int8_t* q, int64_t q_stride) {
    if constexpr (kIsBytes) {
#pragma GCC unroll 4
      for (int t = 0; t < 4; ++t) {
        const B64 codes = quad(t);
        add_bytes<R>(q + 4 * t, q_stride, codes.lo, codes.hi, sums_);
      }
    } else {
#pragma GCC unroll 4
      for (int first = 0; first < 4; first += kFitting) add_narrow(quad, first, q, q_stride);
    }
  }

  F16 value(int r) const { return {_mm256_cvtepi32_ps(sums_[r][0]), _mm256_cvtepi32_ps(sums_[r][1])}; }

 private:
  static constexpr bool kIsBytes = F::kMaxCode > 63;
  static_assert(!kIsBytes || (F::kOffset == 128 && !F::kHasMins), "bytes have an offset of 128");
  // Quads whose sums of two products, below 2 * 127 * code, stay below 2 ** 15 together.
  static constexpr int kFitting = F::kMaxCode <= 31 ? 4 : 2;

  template <class Quad>
  [[gnu::always_inline]] inline void add_narrow(const Quad& quad, int first, const int8_t* q, int64_t q_stride) {
    __m256i pairs[R][2];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) pairs[r][0] = pairs[r][1] = _mm256_setzero_si256();
#pragma GCC unroll 4
    for (int t = first; t < first + kFitting; ++t) {
      const B64 codes = quad(t);
      add_pairs<R>(q + 4 * t, q_stride, codes.lo, codes.hi, pairs);
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        const __m256i products = _mm256_madd_epi16(pairs[r][half], _mm256_set1_epi16(1));
        sums_[r][half] = _mm256_add_epi32(sums_[r][half], products);
      }
    }
  }

  __m256i sums_[R][2];
};

}  // namespace quire::QUIRE_TIER
