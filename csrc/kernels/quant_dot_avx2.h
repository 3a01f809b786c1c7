// AVX2. The instruction u8 x s8 saturates sums of two at 16 bits: safe for nibbles, whose pairs stay below 3811 and
// eight of them together below 2 ** 15; bytes are widened to 16 bits first.
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
static inline void add_to(int32_t* out, __m256i x) {
  __m256i* at = reinterpret_cast<__m256i*>(out);
  _mm256_storeu_si256(at, _mm256_add_epi32(_mm256_loadu_si256(at), x));
}

// R rows of one panel of bytes. Four sums a row, each of 4 columns with two halves of k.
template <int R>
static inline void dot_bytes(const int8_t* q, int64_t q_stride, const uint8_t* w, int64_t quads, int32_t* out) {
  __m256i sums[R][4];
  for (int r = 0; r < R; ++r) {
    for (int j = 0; j < 4; ++j) sums[r][j] = _mm256_setzero_si256();
  }
  for (int64_t k = 0; k < quads; ++k, q += 4, w += 64) {
    __m256i a[R];
    for (int r = 0; r < R; ++r) a[r] = _mm256_cvtepi8_epi16(_mm_set1_epi32(quad_at(q + r * q_stride)));
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
      const __m256i b = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(w + 16 * j)));
      for (int r = 0; r < R; ++r) sums[r][j] = _mm256_add_epi32(sums[r][j], _mm256_madd_epi16(b, a[r]));
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int j = 0; j < 2; ++j) {
      const __m256i halves = _mm256_hadd_epi32(sums[r][2 * j], sums[r][2 * j + 1]);
      add_to(out + r * kDotCols + 8 * j, _mm256_permute4x64_epi64(halves, 0xd8));
    }
  }
}

// R rows of one panel of codes so small that kQuads quads can be summed in 16 bits.
template <int kQuads, int R>
static inline void dot_narrow(const int8_t* q, int64_t q_stride, const uint8_t* w, int64_t quads, int32_t* out) {
  const __m256i ones = _mm256_set1_epi16(1);
  __m256i sums[R][2];
  for (int r = 0; r < R; ++r) sums[r][0] = sums[r][1] = _mm256_setzero_si256();
  for (int64_t k = 0; k < quads; k += kQuads) {
    __m256i pairs[R][2];
    for (int r = 0; r < R; ++r) pairs[r][0] = pairs[r][1] = _mm256_setzero_si256();
    for (int i = 0; i < kQuads; ++i, q += 4, w += 64) {
      const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w));
      const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w + 32));
      for (int r = 0; r < R; ++r) {
        const __m256i a = _mm256_set1_epi32(quad_at(q + r * q_stride));
        pairs[r][0] = _mm256_add_epi16(pairs[r][0], _mm256_maddubs_epi16(low, a));
        pairs[r][1] = _mm256_add_epi16(pairs[r][1], _mm256_maddubs_epi16(high, a));
      }
    }
    for (int r = 0; r < R; ++r) {
      sums[r][0] = _mm256_add_epi32(sums[r][0], _mm256_madd_epi16(pairs[r][0], ones));
      sums[r][1] = _mm256_add_epi32(sums[r][1], _mm256_madd_epi16(pairs[r][1], ones));
    }
  }
  for (int r = 0; r < R; ++r) {
    add_to(out + r * kDotCols, sums[r][0]);
    add_to(out + r * kDotCols + 8, sums[r][1]);
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
    for (; m + 2 <= block.rows; m += 2) dot_rows<kQuads, 2>(block, m, p);
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
