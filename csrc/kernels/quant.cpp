// Linear layers on int8 and int4 weights. Two phases: rows of x are quantised once, then tasks of columns take them.
// Sums of products are exact integers; what rounds is written once on F16, so every tier gives the same bits.
#include "quire/quant.h"

#include "kernels/products.h"
#include "kernels/quant_dot.h"
#include "kernels/quant_few.h"
#include "kernels/quant_pack.h"
#include "kernels/quant_rows.h"
#include "kernels/quant_tasks.h"
#include "simd/simd.h"

namespace quire::QUIRE_TIER {
namespace {

// The rows of x as int8, in memory shared by all tasks of a call.
struct QuantizedRows {
  int8_t* q;  // [rows up to a multiple of kRowsPadding][stride]
  int64_t stride;
  float* scales;    // [rows]
  int32_t* starts;  // [rows][num_groups]
  int64_t num_groups;
};

// Rows an odd number of cache lines apart, so that they fall into different sets of the cache.
int64_t quantized_stride(int64_t input_size) { return (ceil_div(input_size, 64) | 1) * 64; }

// Bytes of the parts of `QuantizedRows`.
int64_t q_bytes(const QuantLinearArgs& args) {
  return round_up(args.num_rows, kRowsPadding) * quantized_stride(args.input_size);
}
int64_t scales_bytes(const QuantLinearArgs& args) { return round_up(args.num_rows * 4, 64); }

QuantizedRows rows_in(char* memory, const QuantLinearArgs& args, int64_t num_groups) {
  char* scales = memory + q_bytes(args);
  return {reinterpret_cast<int8_t*>(memory), quantized_stride(args.input_size), reinterpret_cast<float*>(scales),
          reinterpret_cast<int32_t*>(scales + scales_bytes(args)), num_groups};
}

template <class T>
void quantize_one(const QuantLinearArgs& args, const QuantizedRows& rows, int64_t m, int64_t group_size,
                  int32_t factor) {
  const T* x = static_cast<const T*>(args.x) + x_row(args, m) * args.x_stride;
  const RowScale scale = row_scale(x, args.input_size);
  rows.scales[m] = scale.scale;
  quantize_row(x, args.input_size, scale, rows.q + m * rows.stride, round_up(args.input_size, 64), group_size, factor,
               rows.starts + m * rows.num_groups);
}

// What the panels of a part have in common.
struct PartProduct {
  const QuantLinearArgs& args;
  const QuantizedRows& rows;
  const Part& part;

  const int8_t* q() const { return rows.q + part.first_row * rows.stride; }
  const int32_t* starts() const { return rows.starts + part.first_row * rows.num_groups; }
  InputRows input_rows() const { return {q(), rows.stride, part.rows}; }
  F16 x_scale(int64_t m) const { return set1(rows.scales[part.first_row + m]); }
};

// Formats. Of each, run(product, panels, memory, sums): what is summed of the rows and the panels, [rows][kDotCols];
// run_few: of a few rows and one panel; value: an output of it.

struct Int8 {
  static constexpr int32_t kFactor = -128;
  static constexpr int64_t kScaleBytes = 4;
  static constexpr int64_t kFewRows = kFewByteRows;
  using Sum = int32_t;
  static int64_t panel_bytes(const QuantLinearArgs& args) { return int8_panel_bytes(args.input_size); }
  static int64_t group_size(const QuantLinearArgs& args) { return args.input_size; }
  static int64_t num_groups(const QuantLinearArgs&) { return 1; }
  static int64_t scratch_bytes(const QuantLinearArgs&, int64_t) { return 0; }
  static int64_t tile_quads(const QuantLinearArgs&) { return kInt8TileK / 4; }

  static void run(const PartProduct& of, const Panels& panels, char*, int32_t* sums) {
    const int64_t size = panel_bytes(of.args), quads = size / (4 * kPanelSize);
    for (int64_t m = 0; m < of.part.rows; ++m) {
      for (int64_t n = 0; n < panels.count * kPanelSize; ++n) sums[m * kDotCols + n] = of.starts()[m];
    }
    DotBlock block{};
    block.q_stride = of.rows.stride;
    block.rows = of.part.rows;
    block.w_offsets = panels.offsets(size);
    block.panels = panels.count;
    block.sums = sums;
    const uint8_t *w = of.args.packed + panels.first * size, *next = of.args.packed + panels.next * size;
    for (int64_t k = 0; k < quads; k += kBlockQuads) {
      block.q = of.q() + k * 4;
      block.w = w + k * 64;
      block.quads = min_i64(kBlockQuads, quads - k);
      block.next = k + kBlockQuads >= quads ? next : block.w + kBlockQuads * 64;
      dot_block(block);
    }
  }

  static F16 value(const PartProduct& of, const Panels& panels, const int32_t* sums, int64_t m, int64_t p) {
    const float* scales = static_cast<const float*>(of.args.scales) + (panels.first + panels.others.at(p)) * kPanelSize;
    return load_int32(sums) * (of.x_scale(m) * load(scales));
  }

  static void run_few(const PartProduct& of, const Panels& panel, int32_t* sums) {
    const int64_t size = panel_bytes(of.args);
    const WeightPanel weights{of.args.packed + panel.first * size, size, of.args.packed + panel.next * size};
    dot_few_bytes(of.input_rows(), weights, of.starts(), sums);
  }
};

struct Int4 {
  static constexpr int32_t kFactor = -8;
  static constexpr int64_t kScaleBytes = 2;
  static constexpr int64_t kFewRows = kFewNibbleRows;
  using Sum = float;
  static int64_t panel_bytes(const QuantLinearArgs& args) { return int4_panel_bytes(args.input_size); }
  static int64_t group_size(const QuantLinearArgs& args) { return args.group_size; }
  static int64_t num_groups(const QuantLinearArgs& args) { return ceil_div(args.input_size, args.group_size); }
  static int64_t scratch_bytes(const QuantLinearArgs& args, int64_t rows) {
    return sums_bytes(rows) + kDotCols * args.group_size;
  }
  static int64_t tile_quads(const QuantLinearArgs& args) { return min_i64(16, args.group_size / 4); }

  static const bf16* scales_of(const PartProduct& of, int64_t panel) {
    return static_cast<const bf16*>(of.args.scales) + panel * of.rows.num_groups * kPanelSize;
  }

  static void run(const PartProduct& of, const Panels& panels, char* memory, float* totals) {
    const int64_t size = panel_bytes(of.args), units = of.args.group_size / kInt4UnitK;
    const int64_t group_bytes = units * kInt4UnitBytes;
    for (int64_t m = 0; m < of.part.rows; ++m) {
      __builtin_memset(totals + m * kDotCols, 0, static_cast<uint64_t>(panels.count * kPanelSize * 4));
    }
    const uint8_t *packed = of.args.packed + panels.first * size, *next = of.args.packed + panels.next * size;
    GroupBlock block{};
    block.q_stride = of.rows.stride;
    block.rows = of.part.rows;
    block.packed_offsets = panels.offsets(size);
    block.panels = panels.count;
    block.units = units;
    block.starts_stride = of.rows.num_groups;
    block.scales_offsets = panels.offsets(of.rows.num_groups * kPanelSize);
    block.totals = totals;
    block.sums = reinterpret_cast<int32_t*>(memory);
    block.unpacked = reinterpret_cast<uint8_t*>(memory + sums_bytes(of.part.rows));
    for (int64_t g = 0; g < of.rows.num_groups; ++g) {
      block.q = of.q() + g * of.args.group_size;
      block.packed = packed + g * group_bytes;
      block.starts = of.starts() + g;
      block.scales = scales_of(of, panels.first) + g * kPanelSize;
      // What comes kFetchAhead bytes later in each panel, and after its end in the panels that are read next.
      const int64_t ahead = g * group_bytes + kFetchAhead;
      block.next = ahead < size ? packed + ahead : next + (ahead - size);
      dot_group(block);
    }
  }

  static F16 value(const PartProduct& of, const Panels&, const float* totals, int64_t m, int64_t) {
    return load(totals) * of.x_scale(m);
  }

  static void run_few(const PartProduct& of, const Panels& panel, float* totals) {
    const int64_t size = panel_bytes(of.args);
    const WeightPanel weights{of.args.packed + panel.first * size, size, of.args.packed + panel.next * size};
    const GroupScales groups{of.args.group_size / kInt4UnitK, scales_of(of, panel.first), of.starts(), of.rows.num_groups};
    dot_few_nibbles(of.input_rows(), weights, groups, totals);
  }
};

// See products.h.
template <class Format>
class QuantProduct {
 public:
  static constexpr int64_t kSerialInputs = kQuantizedPerTask;
  static int64_t memory_bytes(const QuantLinearArgs& args) {
    return q_bytes(args) + scales_bytes(args) + args.num_rows * Format::num_groups(args) * 4;
  }

  QuantProduct(const QuantLinearArgs& args, char* memory, int num_threads)
      : args_(args), rows_(rows_in(memory, args, Format::num_groups(args))),
        tasks_(args, Format::panel_bytes(args), num_threads),
        rows_per_arranging_(max_i64(1, kQuantizedPerTask / args.input_size)) {}

  int64_t num_arranging() const { return ceil_div(args_.num_rows, rows_per_arranging_); }
  void arrange(int64_t task) const {
    const int64_t end = min_i64(args_.num_rows, (task + 1) * rows_per_arranging_);
    for (int64_t m = task * rows_per_arranging_; m < end; ++m) {
      if (args_.x_dtype == DType::bf16) {
        quantize_one<bf16>(args_, rows_, m, Format::group_size(args_), Format::kFactor);
      } else {
        quantize_one<float>(args_, rows_, m, Format::group_size(args_), Format::kFactor);
      }
    }
  }

  int64_t num_tasks() const { return tasks_.count(); }
  void run(Pool& pool, int64_t task, int thread) const {
    Part part{};
    part.first_row = task / tasks_.column_tasks * tasks_.rows_per_task;
    part.rows = min_i64(tasks_.rows_per_task, args_.num_rows - part.first_row);
    part.first_panel = task % tasks_.column_tasks * tasks_.groups_per_task * kDotPanels;
    part.panels = min_i64(tasks_.groups_per_task * kDotPanels, num_work_panels(args_) - part.first_panel);
    const bool is_few = part.rows <= Format::kFewRows;
    const int64_t step = is_few && part.rows <= kStreamedRows ? part.panels : kDotPanels;
    const int64_t sums_size = PartSums<Sum>::bytes(part.rows, step);
    const int64_t scratch_bytes = sums_size + Format::scratch_bytes(args_, part.rows);
    char* memory = static_cast<char*>(pool.scratch(thread, scratch_bytes));
    const PartSums<Sum> sums(reinterpret_cast<Sum*>(memory), part.rows);
    memory += sums_size;
    const DotScope scope(part.rows, Format::tile_quads(args_));
    const PartProduct product{args_, rows_, part};
    for (const int64_t end = part.first_panel + part.panels; part.first_panel < end; part.first_panel += step) {
      part.panels = min_i64(step, end - part.first_panel);
      if (is_few) {
        each_panel(args_, part, [&](int64_t p, const Panels& panel) {
          Format::run_few(product, panel, sums.of(0, p));
        });
      } else {
        Format::run(product, panels_of(args_, part), memory, sums.of(0, 0));
      }
      write(product, sums);
    }
  }

 private:
  using Sum = typename Format::Sum;

  void write(const PartProduct& product, const PartSums<Sum>& sums) const {
    const Panels panels = panels_of(args_, product.part);
    write_part(args_, product.part, [&](int64_t m, int64_t p) {
      return Format::value(product, panels, sums.of(m, p), m, p);
    });
  }

  QuantLinearArgs args_;
  QuantizedRows rows_;
  Tasks tasks_;
  int64_t rows_per_arranging_;
};

template <class Format>
void linear(Pool& pool, const QuantLinearArgs& args) {
  run_one<QuantProduct<Format>>(pool, args);
}

template <class Format>
QuantLinearArgs args_of_group(const Grouped<QuantLinearArgs>& grouped, int64_t group) {
  const QuantLinearArgs& all = grouped.linear;
  const int64_t num_panels = packed_panels(all);
  const int64_t scales_bytes = num_panels * kPanelSize * Format::num_groups(all) * Format::kScaleBytes;
  QuantLinearArgs args = rows_of_group(grouped, group, all.x_stride * bytes_of(all.x_dtype),
                                       all.out_stride * bytes_of(all.out_dtype));
  args.packed = all.packed + group * num_panels * Format::panel_bytes(all);
  args.scales = static_cast<const char*>(all.scales) + group * scales_bytes;
  return args;
}

template <class Format>
void grouped_linear(Pool& pool, const Grouped<QuantLinearArgs>& grouped) {
  run_groups<QuantProduct<Format>>(pool, grouped,
                                   [&](int64_t group) { return args_of_group<Format>(grouped, group); });
}

}  // namespace

extern const QuantKernels quant_kernels;
const QuantKernels quant_kernels = {linear<Int8>, linear<Int4>, grouped_linear<Int8>, grouped_linear<Int4>,
                                    pack_int8,    pack_int4,    gather_int8,          gather_int4};

}  // namespace quire::QUIRE_TIER
