// A few rows times one panel of blocks, read from end to end: one stream from memory.
//
// Codes are unpacked in registers, each once for all rows, and never stored. The floats are those of block_dot.h in the
// same order, with the totals of a panel in registers.
#pragma once

#include "kernels/block_dot.h"
#include "kernels/block_rows.h"
#include "kernels/quant_tasks.h"

namespace quire::QUIRE_TIER {

// A panel of `num_records` records, and what is wanted after its end.
struct BlockPanel {
  const uint8_t* records;
  int64_t num_records;
  const uint8_t* next;
};

}  // namespace quire::QUIRE_TIER

// With a tile unit the panels of a few rows are read in turns, too: measured best there.
#if defined(QUIRE_SIMD_AVX512) && !defined(QUIRE_TIER_AMX)
#include "kernels/block_sums_vnni.h"
#elif defined(QUIRE_TIER_AVX2)
#include "kernels/block_sums_avx2.h"
#else

namespace quire::QUIRE_TIER {

template <class F>
constexpr int64_t kFewBlockRows = 0;

template <class F>
static inline void multiply_panel(const BlockRows&, int64_t, int64_t, const BlockPanel&, float*) {}

}  // namespace quire::QUIRE_TIER

#endif

#if defined(QUIRE_SIMD_AVX512) && !defined(QUIRE_TIER_AMX) || defined(QUIRE_TIER_AVX2)

namespace quire::QUIRE_TIER {
namespace {

constexpr int64_t kPanelAhead = 4096;  // bytes
constexpr int64_t kRowsAtOnce = 4;

// kFewBlockRows and CodeSums are the tier's:
//
//   start(row, start)            what the sums of a row begin with
//   add(quad, q, q_stride)       q . the codes quad(0) .. quad(3), of every row
//   value(row)                   the sums of 16 outputs

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
    CodeSums<F, R> sums[kParts];
#pragma GCC unroll 2
    for (int part = 0; part < kParts; ++part) {
#pragma GCC unroll 8
      for (int r = 0; r < R; ++r) sums[part].start(r, start(r, part));
    }
    each<2>([&](auto h) __attribute__((always_inline)) {
      const auto quad = [&](int t) __attribute__((always_inline)) { return F::template quad<g, h.value>(record, t); };
      sums[h.value * kParts / 2].add(quad, q_ + 16 * h.value, q_stride_);
    });
    q_ += kGroupInputs;
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      F16 f = sums[0].value(r) * load(a);
      if constexpr (kParts == 2) f = f + sums[1].value(r) * load(a + kPanelSize);
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
  int32_t start(int r, int part) const {
    int32_t start = 0;
    if constexpr (!F::kHasMins) __builtin_memcpy(&start, x_sum(r, part), 4);
    return start;
  }

  const int8_t* q_;
  int64_t q_stride_;
  const float* x_scales_;
  int64_t x_scales_stride_;
  const char* x_sums_;
  int64_t x_sums_stride_;
};

template <class F, int R>
[[gnu::noinline]] void multiply_rows(const BlockRows& rows, int64_t first_row, const BlockPanel& panel, float* totals) {
  FewRows<F, R>(rows, first_row).multiply(panel, totals);
}

}  // namespace

// totals[num_rows][kDotCols] = the products with the panel; of further rows it is in the caches.
template <class F>
static inline void multiply_panel(const BlockRows& rows, int64_t first_row, int64_t num_rows, const BlockPanel& panel,
                                  float* totals) {
  const int64_t num_blocks = ceil_div(num_rows, kRowsAtOnce);
  for (int64_t i = 0; i < num_blocks; ++i) {
    const int64_t row = i * num_rows / num_blocks, count = (i + 1) * num_rows / num_blocks - row;
    float* of_rows = totals + row * kDotCols;
    switch (count) {
      case 1: multiply_rows<F, 1>(rows, first_row + row, panel, of_rows); break;
      case 2: multiply_rows<F, 2>(rows, first_row + row, panel, of_rows); break;
      case 3: multiply_rows<F, 3>(rows, first_row + row, panel, of_rows); break;
      default: multiply_rows<F, 4>(rows, first_row + row, panel, of_rows);
    }
  }
}

}  // namespace quire::QUIRE_TIER

#endif
