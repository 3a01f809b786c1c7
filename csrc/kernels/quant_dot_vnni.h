// AVX-512 VNNI: up to six rows of four panels in registers, so that weights are read from L1 once per six rows.
//
// Ladder (share of one core's rate of the instruction, 4096 x 4096, 64 rows, benchmarks/kernels/bench_quant.py):
//   intrinsics                                 0.5: sums are copied and spilled
//   own instruction, sums tied to registers    0.99
#pragma once

#include <immintrin.h>

namespace quire::QUIRE_TIER {

constexpr int64_t kVnniRows = 6;  // 24 sums, four weights and one quad of q: 29 of 32 registers

typedef int32_t __attribute__((may_alias, aligned(1))) Quad;

// sum += the four products of each lane. Not the intrinsic: GCC 12 copies the sum first, and runs out of registers.
static inline void add_dot(__m512i& sum, __m512i w, __m512i q) {
  asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(w), "v"(q));
}
static inline void add_dot(__m512i& sum, __m512i w, const int8_t* q) {
  asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(w), "m"(*reinterpret_cast<const Quad*>(q)));
}
static inline __m512i quad_at(const int8_t* q) { return _mm512_set1_epi32(*reinterpret_cast<const Quad*>(q)); }

// Functions that take `sums` are always inlined, and loops over them unrolled: only then are they registers.

// sums += R rows by P panels of bytes. While at it, the next weights of F panels from `next` on are fetched. With many
// row blocks F is 1, and they go to level 1: the first row block would wait for level 2. With few, memory is slower.
template <int R, int P, int F>
[[gnu::always_inline]] static inline void add_products(__m512i (&sums)[R][P], const int8_t* q, int64_t q_stride,
                                                       const uint8_t* w, const PanelOffsets& offsets, int64_t quads,
                                                       const uint8_t* next) {
  for (int64_t k = 0; k < quads; ++k, q += 4, w += 64) {
    __m512i b[P];
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p) b[p] = _mm512_loadu_si512(w + offsets.at(p));
#pragma GCC unroll 8
    for (int f = 0; f < F; ++f) {
      const uint8_t* wanted = next + offsets.at(f) + k * 64;
      F == 1 ? prefetch_l1(wanted) : prefetch_l2(wanted);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const __m512i a = quad_at(q + r * q_stride);
#pragma GCC unroll 8
      for (int p = 0; p < P; ++p) add_dot(sums[r][p], b[p], a);
    }
  }
}

// The same for nibbles, unpacked in registers; the next weights of all panels are fetched.
template <int R, int P>
[[gnu::always_inline]] static inline void add_packed_products(__m512i (&sums)[R][P], const int8_t* q,
                                                              int64_t q_stride, const uint8_t* w,
                                                              const PanelOffsets& offsets, int64_t units,
                                                              const uint8_t* next) {
  const __m512i mask = _mm512_set1_epi8(15);
  for (int64_t u = 0; u < units; ++u, q += kInt4UnitK) {
    for (int i = 0; i < 4; ++i, w += 64, next += 64) {
#pragma GCC unroll 8
      for (int p = 0; p < P; ++p) {
        const __m512i pairs = _mm512_loadu_si512(w + offsets.at(p));
        prefetch_l2(next + offsets.at(p));
        const __m512i low = _mm512_and_si512(pairs, mask);
        const __m512i high = _mm512_and_si512(_mm512_srli_epi16(pairs, 4), mask);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
          add_dot(sums[r][p], low, q + r * q_stride + 4 * i);
          add_dot(sums[r][p], high, q + r * q_stride + 4 * i + 16);
        }
      }
    }
  }
}

namespace {

template <int R, int P, int F>
struct VnniDot {
  [[gnu::noinline]] static void run(const DotBlock& block, int64_t m, int64_t p0, const uint8_t* next) {
    int32_t* out = block.sums + m * kDotCols + p0 * kPanelSize;
    __m512i sums[R][P];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int p = 0; p < P; ++p) sums[r][p] = _mm512_loadu_si512(out + r * kDotCols + p * kPanelSize);
    }
    add_products<R, P, F>(sums, block.q + m * block.q_stride, block.q_stride, block.w + block.w_offsets.at(p0),
                          block.w_offsets, block.quads, next);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 8
      for (int p = 0; p < P; ++p) _mm512_storeu_si512(out + r * kDotCols + p * kPanelSize, sums[r][p]);
    }
  }
};

template <int R, int P>
struct VnniGroup {
  [[gnu::noinline]] static void run(const GroupBlock& block, int64_t m, int64_t p0) {
    __m512i sums[R][P];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const __m512i start = _mm512_set1_epi32(block.starts[(m + r) * block.starts_stride]);
#pragma GCC unroll 8
      for (int p = 0; p < P; ++p) sums[r][p] = start;
    }
    add_packed_products<R, P>(sums, block.q + m * block.q_stride, block.q_stride,
                              block.packed + block.packed_offsets.at(p0), block.packed_offsets, block.units,
                              block.next + block.packed_offsets.at(p0));
    float* totals = block.totals + m * kDotCols + p0 * kPanelSize;
#pragma GCC unroll 8
    for (int p = 0; p < P; ++p, totals += kPanelSize) {
      const F16 scale = load(block.scales + block.scales_offsets.at(p0 + p));
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) {
        float* total = totals + r * kDotCols;
        store(total, load(total) + F16{_mm512_cvtepi32_ps(sums[r][p])} * scale);
      }
    }
  }
};

}  // namespace

// fn<R>() for a number of rows known at run time, 1 .. kVnniRows.
template <template <int> class Fn, class... Args>
static inline void with_rows(int64_t rows, const Args&... args) {
  switch (rows) {
    case 1: return Fn<1>::run(args...);
    case 2: return Fn<2>::run(args...);
    case 3: return Fn<3>::run(args...);
    case 4: return Fn<4>::run(args...);
    case 5: return Fn<5>::run(args...);
    default: return Fn<6>::run(args...);
  }
}
template <int R>
using DotOnePanel = VnniDot<R, 1, 0>;
template <int R>
using DotFetchNone = VnniDot<R, 4, 0>;
template <int R>
using DotFetchOne = VnniDot<R, 4, 1>;
template <int R>
using DotFetchTwo = VnniDot<R, 4, 2>;
template <int R>
using DotFetchFour = VnniDot<R, 4, 4>;

static inline void vnni_dot_block(const DotBlock& block) {
  // Row blocks of equal size, and the next weights fetched over the first of them.
  const int64_t num_blocks = ceil_div(block.rows, kVnniRows);
  const int64_t rows_per_block = ceil_div(block.rows, num_blocks);
  const int64_t fetched = block.next == nullptr ? 0 : num_blocks == 1 ? 4 : num_blocks <= 3 ? 2 : 1;
  for (int64_t i = 0, m = 0; m < block.rows; ++i, m += rows_per_block) {
    const int64_t rows = min_i64(rows_per_block, block.rows - m);
    const uint8_t* next = block.next + block.w_offsets.at(i * fetched);
    if (block.panels < kDotPanels) {
      for (int64_t p = 0; p < block.panels; ++p) with_rows<DotOnePanel>(rows, block, m, p, next);
    } else if (fetched == 0 || i * fetched >= kDotPanels) {
      with_rows<DotFetchNone>(rows, block, m, int64_t{0}, next);
    } else if (fetched == 4) {
      with_rows<DotFetchFour>(rows, block, m, int64_t{0}, next);
    } else if (fetched == 2) {
      with_rows<DotFetchTwo>(rows, block, m, int64_t{0}, next);
    } else {
      with_rows<DotFetchOne>(rows, block, m, int64_t{0}, next);
    }
  }
}

template <int R>
using GroupOnePanel = VnniGroup<R, 1>;
template <int R>
using GroupPanels = VnniGroup<R, 4>;

static inline void vnni_dot_group(const GroupBlock& block) {
  const int64_t rows_per_block = ceil_div(block.rows, ceil_div(block.rows, kVnniRows));
  for (int64_t m = 0; m < block.rows; m += rows_per_block) {
    const int64_t rows = min_i64(rows_per_block, block.rows - m);
    if (block.panels == kDotPanels) {
      with_rows<GroupPanels>(rows, block, m, int64_t{0});
    } else {
      for (int64_t p = 0; p < block.panels; ++p) with_rows<GroupOnePanel>(rows, block, m, p);
    }
  }
}

}  // namespace quire::QUIRE_TIER
