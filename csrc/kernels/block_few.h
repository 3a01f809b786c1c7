// A few rows times one panel of blocks, read from end to end: one stream from memory.
//
// Codes are unpacked in registers, each once for all rows, and never stored. The floats are those of block_dot.h in the
// same order, with the totals of a panel in registers.
#pragma once

#include "kernels/block_dot.h"
#include "kernels/block_rows.h"

namespace quire::QUIRE_TIER {

// Rows that read one panel after the other. With a tile unit the panels of a few rows are read in turns, too: measured
// best there. Without VNNI the products are slower than memory.
#if defined(QUIRE_SIMD_AVX512) && !defined(QUIRE_TIER_AMX)
constexpr int64_t kFewRows = 4;
#else
constexpr int64_t kFewRows = 0;
#endif

// A panel of `num_records` records, and what is wanted after its end.
struct BlockPanel {
  const uint8_t* records;
  int64_t num_records;
  const uint8_t* next;
};

}  // namespace quire::QUIRE_TIER

#if defined(QUIRE_SIMD_AVX512) && !defined(QUIRE_TIER_AMX)

namespace quire::QUIRE_TIER {
namespace {

constexpr int64_t kPanelAhead = 4096;  // bytes

template <class F, int R>
class FewRows {
 public:
  FewRows(const BlockRows& rows, int64_t first_row)
      : q_(rows.q + first_row * rows.stride), q_stride_(rows.stride), x_scales_(rows.scales_of(first_row)),
        x_scales_stride_(rows.groups), x_sums_(rows.sums_of(first_row)), x_sums_stride_(rows.groups * kParts * 4) {}

  // totals[R][kDotCols] = the products with the panel, in the first 16 of each row.
  void multiply(const BlockPanel& panel, float* totals) {
    const int64_t size = panel.num_records * kBytes;
    F16 sums[R];
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) sums[r] = zero();
    for (int64_t at = 0; at < size; at += kBytes) {
      const int64_t ahead = at + kPanelAhead;
      add_record(panel.records + at, ahead < size ? panel.records + ahead : panel.next + (ahead - size), sums);
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) store(totals + r * kDotCols, sums[r]);
  }

 private:
  static constexpr int kParts = F::kParts;
  static constexpr int64_t kBytes = kCodeBytes<F> + F::kScaleBytes, kLines = kBytes / kCacheLine;
  static constexpr int kGroups = kRecordInputs<F> / kGroupInputs;

  [[gnu::always_inline]] inline void add_record(const uint8_t* record, const uint8_t* ahead, F16 (&totals)[R]) {
    float a[kGroups * kParts * kPanelSize], b[kGroups * kParts * kPanelSize];
    F::factors(record, a, b);
    each<kGroups>([&](auto g) __attribute__((always_inline)) {
      for (int64_t line = g.value * kLines / kGroups; line < (g.value + 1) * kLines / kGroups; ++line) {
        prefetch_l1(ahead + line * kCacheLine);
      }
      constexpr int64_t kFirst = g.value * kParts * kPanelSize;
      add_group<g.value>(record, a + kFirst, b + kFirst, totals);
    });
  }

  template <int g>
  [[gnu::always_inline]] inline void add_group(const uint8_t* record, const float* a, const float* b, F16 (&totals)[R]) {
    __m512i sums[kParts][R];
#pragma GCC unroll 2
    for (int part = 0; part < kParts; ++part) {
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) sums[part][r] = start(r, part);
    }
    each<2>([&](auto h) __attribute__((always_inline)) {
#pragma GCC unroll 4
      for (int t = 0; t < 4; ++t) {
        const __m512i codes = F::template quad<g, h.value>(record, t).v;
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) add_dot(sums[h.value * kParts / 2][r], codes, q_ + r * q_stride_ + 16 * h.value + 4 * t);
      }
    });
    q_ += kGroupInputs;
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      F16 f = F16{_mm512_cvtepi32_ps(sums[0][r])} * load(a);
      if constexpr (kParts == 2) f = f + F16{_mm512_cvtepi32_ps(sums[1][r])} * load(a + kPanelSize);
      if constexpr (F::kHasMins) {
#pragma GCC unroll 2
        for (int part = 0; part < kParts; ++part) f = f + load(b + part * kPanelSize) * float_at(x_sum(r, part));
      }
      totals[r] = totals[r] + f * set1(x_scales_[r * x_scales_stride_]);
    }
    ++x_scales_;
    x_sums_ += kParts * 4;
  }

  const char* x_sum(int r, int part) const { return x_sums_ + r * x_sums_stride_ + part * 4; }
  __m512i start(int r, int part) const {
    if constexpr (F::kHasMins) return _mm512_setzero_si512();
    return quad_at(reinterpret_cast<const int8_t*>(x_sum(r, part)));
  }

  const int8_t* q_;
  int64_t q_stride_;
  const float* x_scales_;
  int64_t x_scales_stride_;
  const char* x_sums_;
  int64_t x_sums_stride_;
};

}  // namespace

template <class F, int R>
[[gnu::noinline]] static void multiply_panel(const BlockRows& rows, int64_t first_row, const BlockPanel& panel,
                                             float* totals) {
  FewRows<F, R>(rows, first_row).multiply(panel, totals);
}

template <class F>
using MultiplyPanel = void (*)(const BlockRows&, int64_t, const BlockPanel&, float*);

template <class F>
static MultiplyPanel<F> multiply_panel_of(int64_t num_rows) {
  switch (num_rows) {
    case 1: return multiply_panel<F, 1>;
    case 2: return multiply_panel<F, 2>;
    case 3: return multiply_panel<F, 3>;
    default: return multiply_panel<F, 4>;
  }
}

}  // namespace quire::QUIRE_TIER

#endif
