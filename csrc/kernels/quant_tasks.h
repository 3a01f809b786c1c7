// How products with quantised weights are cut into tasks, and how their outputs are written.
#pragma once

#include "kernels/gemm_epilogue.h"
#include "kernels/quant_dot.h"

namespace quire::QUIRE_TIER {

constexpr int64_t kMaxTaskRows = 240;            // their sums stay in the second cache; a multiple of 16 and of 6
constexpr int64_t kQuantizedPerTask = 16384;     // elements of x
constexpr int64_t kWeightBytesPerTask = 262144;  // enough to stream, while few rows are served
constexpr int64_t kFetchAhead = 4096;            // bytes of a panel

static inline int64_t sums_bytes(int64_t rows) { return round_up(rows, kRowsPadding) * kDotCols * 4; }

// Rows of which all panels of a task are read, one behind the other, before the outputs are written; the sums of more
// would not stay in the caches.
constexpr int64_t kStreamedRows = 16;

// How the result is cut: tasks of whole column groups (kDotPanels panels) by rows. No bit of it depends on this.
struct Tasks {
  int64_t num_groups, groups_per_task, column_tasks, rows_per_task, row_tasks;

  Tasks(const QuantLinearArgs& args, int64_t panel_bytes, int num_threads) {
    const int64_t wanted = 4 * num_threads;
    num_groups = ceil_div(num_work_panels(args), kDotPanels);
    rows_per_task = round_up(ceil_div(args.num_rows, ceil_div(args.num_rows, kMaxTaskRows)), 48);
    row_tasks = ceil_div(args.num_rows, rows_per_task);
    const int64_t streamed = max_i64(1, kWeightBytesPerTask / (panel_bytes * kDotPanels));
    groups_per_task = max_i64(1, min_i64(streamed, num_groups / wanted));
    column_tasks = ceil_div(num_groups, groups_per_task);
  }
  int64_t count() const { return column_tasks * row_tasks; }
};

// Some rows and panels of work of one task. Of gated weights, panels are the gates of 16 outputs and their ups in turns.
struct Part {
  int64_t first_row, rows, first_panel, panels;
};

// Panels that are read together, by their places in the packed weight.
struct Panels {
  int64_t first;
  PanelOffsets others;  // from the first
  int64_t count;
  int64_t next;  // read after the first one

  // In something of `size` for each panel.
  PanelOffsets offsets(int64_t size) const { return {others.odd * size, others.pair * size}; }
};

// All panels of a part, side by side; what follows are the next kDotPanels.
static inline Panels panels_of(const QuantLinearArgs& args, const Part& part) {
  const int64_t first = args.is_gated ? part.first_panel / 2 : part.first_panel;
  const PanelOffsets others = args.is_gated ? PanelOffsets{args.output_size / kPanelSize, 1} : consecutive(1);
  return {first, others, part.panels, first + others.next_block()};
}

// fn(p, panels): one panel after the other in the order in which they lie, hence of gated ones the gates, then the ups.
template <class Fn>
static inline void each_panel(const QuantLinearArgs& args, const Part& part, const Fn& fn) {
  const Panels all = panels_of(args, part);
  const int64_t kinds = args.is_gated ? 2 : 1;
  for (int64_t kind = 0; kind < kinds; ++kind) {
    for (int64_t p = kind; p < part.panels; p += kinds) {
      const bool is_last_gate = kind + 1 < kinds && p + kinds >= part.panels;
      const int64_t next = is_last_gate ? 1 : p + kinds;
      fn(p, Panels{all.first + all.others.at(p), {}, 1, all.first + all.others.at(next)});
    }
  }
}

// What a part computes before it writes its outputs: groups of kDotPanels panels, in each [rows][kDotCols].
template <class T>
class PartSums {
 public:
  PartSums(T* sums, int64_t rows) : sums_(sums), group_(round_up(rows, kRowsPadding) * kDotCols) {}
  static int64_t bytes(int64_t rows, int64_t panels) { return ceil_div(panels, kDotPanels) * sums_bytes(rows); }
  T* of(int64_t m, int64_t p) const {
    return sums_ + p / kDotPanels * group_ + m * kDotCols + p % kDotPanels * kPanelSize;
  }

 private:
  T* sums_;
  int64_t group_;
};

// out = value(m, panel) + bias for the columns of the part, or silu(gate) * up; value gives F16 of 16 columns.
template <class T, bool kIsGated, class Value>
static inline void write_out(const QuantLinearArgs& args, const Part& part, const Value& value) {
  constexpr int64_t kStep = kIsGated ? 2 : 1;
  for (int64_t m = 0; m < part.rows; ++m) {
    T* out = static_cast<T*>(args.out) + (part.first_row + m) * args.out_stride;
    for (int64_t p = 0; p < part.panels; p += kStep) {
      const int64_t column = (part.first_panel + p) / kStep * kPanelSize;
      const int64_t n = min_i64(kPanelSize, args.output_size - column);
      F16 v = with_bias(args, value(m, p), column, n);
      if constexpr (kIsGated) {
        const F16 up = with_bias(args, value(m, p + 1), args.output_size + column, n);
        v = rounded(silu(rounded(v, args.x_dtype)), args.x_dtype) * rounded(up, args.x_dtype);
      }
      n == kPanelSize ? store_result(out + column, v) : store_n(out + column, n, v);
    }
  }
}

template <class Value>
static inline void write_part(const QuantLinearArgs& args, const Part& part, const Value& value) {
  if (args.out_dtype == DType::bf16) {
    args.is_gated ? write_out<bf16, true>(args, part, value) : write_out<bf16, false>(args, part, value);
  } else {
    args.is_gated ? write_out<float, true>(args, part, value) : write_out<float, false>(args, part, value);
  }
}

}  // namespace quire::QUIRE_TIER
