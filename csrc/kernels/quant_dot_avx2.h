// AVX2. The instruction u8 x s8 adds two products in 16 bits, at most 2 ** 15 - 1 of them. Nibbles are taken as they are:
// eight sums of two fit. Of bytes the offset of 128 is left out, and the magnitude of a weight multiplied with the input
// that has the weight's sign: 2 * 128 * 127 fits.
#pragma once

#include <immintrin.h>

namespace quire::QUIRE_TIER {

constexpr int64_t kBlockQuads = 64;

struct DotScope {
  DotScope(int64_t, int64_t) {}
};

static inline int32_t quad_at(const int8_t* q) {
  int32_t quad;
  __builtin_memcpy(&quad, q, 4);
  return quad;
}
template <class T>
static inline __m256i load_codes(const T* p) {
  return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
}
template <class T>
static inline void store_codes(T* p, __m256i x) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x);
}
static inline void add_to(int32_t* out, __m256i x) { store_codes(out, _mm256_add_epi32(load_codes(out), x)); }
// What a sum is so far. A compiler that orders additions of integers keeps all products for it, and spills them.
static inline void keep_order(__m256i& sum) { asm("" : "+x"(sum)); }

// sums[r][half] += q . (bytes - 128): 4 k of R rows and of 8 outputs in each half.
template <int R>
[[gnu::always_inline]] static inline void add_bytes(const int8_t* q, int64_t q_stride, __m256i low, __m256i high,
                                                    __m256i (&sums)[R][2]) {
  const __m256i offset = _mm256_set1_epi8(-128), ones = _mm256_set1_epi16(1);
  const __m256i halves[2] = {low, high};
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half) {
    const __m256i weights = _mm256_xor_si256(halves[half], offset);
    const __m256i magnitudes = _mm256_abs_epi8(weights);
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      const __m256i inputs = _mm256_sign_epi8(_mm256_set1_epi32(quad_at(q + r * q_stride)), weights);
      const __m256i products = _mm256_madd_epi16(_mm256_maddubs_epi16(magnitudes, inputs), ones);
      sums[r][half] = _mm256_add_epi32(sums[r][half], products);
      keep_order(sums[r][half]);
    }
  }
}

// pairs[r][half] += q . codes, in sums of two products.
template <int R>
[[gnu::always_inline]] static inline void add_pairs(const int8_t* q, int64_t q_stride, __m256i low, __m256i high,
                                                    __m256i (&pairs)[R][2]) {
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    const __m256i inputs = _mm256_set1_epi32(quad_at(q + r * q_stride));
    pairs[r][0] = _mm256_add_epi16(pairs[r][0], _mm256_maddubs_epi16(low, inputs));
    pairs[r][1] = _mm256_add_epi16(pairs[r][1], _mm256_maddubs_epi16(high, inputs));
    keep_order(pairs[r][0]);
    keep_order(pairs[r][1]);
  }
}

// 128 times the sum of `quads` quads, a multiple of 4.
static inline __m256i offset_of(const int8_t* q, int64_t quads) {
  __m128i sum = _mm_setzero_si128();
  for (int64_t k = 0; k < quads; k += 4) {
    const __m128i pairs = _mm_maddubs_epi16(_mm_set1_epi8(1), _mm_loadu_si128(reinterpret_cast<const __m128i*>(q + 4 * k)));
    sum = _mm_add_epi32(sum, _mm_madd_epi16(pairs, _mm_set1_epi16(128)));
  }
  sum = _mm_hadd_epi32(sum, sum);
  return _mm256_broadcastd_epi32(_mm_hadd_epi32(sum, sum));
}

// R rows of one panel of bytes.
template <int R>
static inline void dot_bytes(const int8_t* q, int64_t q_stride, const uint8_t* w, int64_t quads, int32_t* out) {
  __m256i sums[R][2];
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) sums[r][0] = sums[r][1] = offset_of(q + r * q_stride, quads);
  for (int64_t k = 0; k < quads; ++k, q += 4, w += 64) add_bytes<R>(q, q_stride, load_codes(w), load_codes(w + 32), sums);
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    add_to(out + r * kDotCols, sums[r][0]);
    add_to(out + r * kDotCols + 8, sums[r][1]);
  }
}

// R rows of one panel of codes so small that kQuads quads can be summed in 16 bits.
template <int kQuads, int R>
static inline void dot_narrow(const int8_t* q, int64_t q_stride, const uint8_t* w, int64_t quads, int32_t* out) {
  const __m256i ones = _mm256_set1_epi16(1);
  for (int64_t k = 0; k < quads; k += kQuads) {
    __m256i pairs[R][2];
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) pairs[r][0] = pairs[r][1] = _mm256_setzero_si256();
#pragma GCC unroll 8
    for (int i = 0; i < kQuads; ++i, q += 4, w += 64) {
      add_pairs<R>(q, q_stride, load_codes(w), load_codes(w + 32), pairs);
    }
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      add_to(out + r * kDotCols, _mm256_madd_epi16(pairs[r][0], ones));
      add_to(out + r * kDotCols + 8, _mm256_madd_epi16(pairs[r][1], ones));
    }
  }
}

// kQuads: as above; 0 = bytes of any size.
template <int kQuads, int R>
static inline void dot_rows(const DotBlock& block, int64_t m, int64_t p) {
  const int8_t* q = block.q + m * block.q_stride;
  const uint8_t* w = block.w + block.w_offsets.at(p);
  int32_t* out = block.sums + m * kDotCols + p * kPanelSize;
  if constexpr (kQuads > 0) {
    dot_narrow<kQuads, R>(q, block.q_stride, w, block.quads, out);
  } else {
    dot_bytes<R>(q, block.q_stride, w, block.quads, out);
  }
}

// Quads are a multiple of kQuads.
template <int kQuads>
static inline void dot_panels(const DotBlock& block) {
  if (block.next != nullptr) {
    for (int64_t p = 0; p < block.panels; ++p) {
      for (int64_t k = 0; k < block.quads; ++k) prefetch_l2(block.next + block.w_offsets.at(p) + k * 64);
    }
  }
  for (int64_t p = 0; p < block.panels; ++p) {
    int64_t m = 0;
    for (; m + 4 <= block.rows; m += 4) dot_rows<kQuads, 4>(block, m, p);
    if (m + 2 <= block.rows) {
      dot_rows<kQuads, 2>(block, m, p);
      m += 2;
    }
    if (m < block.rows) dot_rows<kQuads, 1>(block, m, p);
  }
}

static inline void dot_block(const DotBlock& block) { dot_panels<0>(block); }
static inline void dot_group(const GroupBlock& group) {
  dot_unpacked_group(group, [](const DotBlock& block) { dot_panels<8>(block); });
}

// Sums of two products are below 2 * 127 * code, those of twice kQuads such sums below 2 ** 15.
template <int kMaxCode, int64_t kQuads>
static inline void dot_codes(const DotBlock& block) {
  constexpr int kFitting = kMaxCode <= 15 ? 8 : kMaxCode <= 31 ? 4 : kMaxCode <= 63 ? 2 : 0;
  dot_panels<min_i64(kFitting, kQuads)>(block);
}

}  // namespace quire::QUIRE_TIER
