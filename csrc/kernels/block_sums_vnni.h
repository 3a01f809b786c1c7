// Sums of products with codes, with VNNI: see block_few.h.
#pragma once

namespace quire::QUIRE_TIER {

// Super-blocks take so many instructions that three rows and more are not faster for one stream from memory.
template <class F>
constexpr int64_t kFewBlockRows = F::kBlockInputs == 256 ? 2 : 4;

template <class F, int R>
class CodeSums {
 public:
  void start(int r, int32_t start) { sums_[r] = _mm512_set1_epi32(start); }

  template <class Quad>
  [[gnu::always_inline]] inline void add(const Quad& quad, const int8_t* q, int64_t q_stride) {
#pragma GCC unroll 4
    for (int t = 0; t < 4; ++t) {
      const B64 codes = quad(t);
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) add_dot(sums_[r], codes.v, q + r * q_stride + 4 * t);
    }
  }

  F16 value(int r) const { return {_mm512_cvtepi32_ps(sums_[r])}; }

 private:
  __m512i sums_[R];
};

}  // namespace quire::QUIRE_TIER
