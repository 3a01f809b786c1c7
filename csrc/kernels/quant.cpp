// Linear layers on int8 and int4 weights. Two phases: rows of x are quantised once, then tasks of columns take them.
// Sums of products are exact integers; what rounds is written once on F16, so every tier gives the same bits.
#include "quire/quant.h"

#include "kernels/products.h"
#include "kernels/quant_dot.h"
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

// sums[m][columns] = the start of row m.
void fill_sums(int32_t* sums, const Part& part, const QuantizedRows& rows) {
  for (int64_t m = 0; m < part.rows; ++m) {
    const int32_t start = rows.starts[part.first_row + m];
    for (int64_t n = 0; n < kDotCols; ++n) sums[m * kDotCols + n] = start;
  }
}

void int8_part(const QuantLinearArgs& args, const QuantizedRows& rows, const Part& part, int32_t* sums) {
  const int64_t panel_bytes = int8_panel_bytes(args.input_size);
  const int64_t quads = ceil_div(args.input_size, kInt8TileK) * (kInt8TileK / 4);
  fill_sums(sums, part, rows);
  DotBlock block{};
  block.q_stride = rows.stride;
  block.rows = part.rows;
  const Place place(args, part, panel_bytes), of_scales(args, part, kPanelSize);
  block.w_offsets = place.offsets;
  block.panels = part.panels;
  block.sums = sums;
  const uint8_t* w = args.packed + place.first;
  for (int64_t k = 0; k < quads; k += kBlockQuads) {
    block.q = rows.q + part.first_row * rows.stride + k * 4;
    block.w = w + k * 64;
    block.quads = min_i64(kBlockQuads, quads - k);
    const bool is_last = k + kBlockQuads >= quads;
    block.next = is_last ? w + place.offsets.next_block() : block.w + kBlockQuads * 64;
    dot_block(block);
  }
  const float* scales = static_cast<const float*>(args.scales) + of_scales.first;
  write_part(args, part, [&](int64_t m, int64_t p) {
    const F16 scale = set1(rows.scales[part.first_row + m]) * load(scales + of_scales.offsets.at(p));
    return load_int32(sums + m * kDotCols + p * kPanelSize) * scale;
  });
}

void int4_part(const QuantLinearArgs& args, const QuantizedRows& rows, const Part& part, int32_t* sums) {
  const int64_t panel_bytes = int4_panel_bytes(args.input_size);
  const int64_t units = args.group_size / kInt4UnitK, group_bytes = units * kInt4UnitBytes;
  float* totals = reinterpret_cast<float*>(sums) + sums_bytes(part.rows) / 4;
  __builtin_memset(totals, 0, static_cast<uint64_t>(part.rows * kDotCols * 4));
  const Place place(args, part, panel_bytes), of_scales(args, part, rows.num_groups * kPanelSize);
  const uint8_t* packed = args.packed + place.first;
  const bf16* scales = static_cast<const bf16*>(args.scales) + of_scales.first;
  GroupBlock block{};
  block.q_stride = rows.stride;
  block.rows = part.rows;
  block.packed_offsets = place.offsets;
  block.panels = part.panels;
  block.units = units;
  block.starts_stride = rows.num_groups;
  block.scales_offsets = of_scales.offsets;
  block.totals = totals;
  block.sums = sums;
  block.unpacked = reinterpret_cast<uint8_t*>(totals) + sums_bytes(part.rows);
  for (int64_t g = 0; g < rows.num_groups; ++g) {
    block.q = rows.q + part.first_row * rows.stride + g * args.group_size;
    block.packed = packed + g * group_bytes;
    block.starts = rows.starts + part.first_row * rows.num_groups + g;
    block.scales = scales + g * kPanelSize;
    // What comes kFetchAhead bytes later in each panel, and after its end in the panels of the next column group.
    const int64_t ahead = g * group_bytes + kFetchAhead;
    block.next = packed + (ahead < panel_bytes ? ahead : ahead - panel_bytes + place.offsets.next_block());
    dot_group(block);
  }
  write_part(args, part, [&](int64_t m, int64_t p) {
    return load(totals + m * kDotCols + p * kPanelSize) * set1(rows.scales[part.first_row + m]);
  });
}

struct Int8 {
  static constexpr int32_t kFactor = -128;
  static constexpr int64_t kScaleBytes = 4;
  static int64_t panel_bytes(const QuantLinearArgs& args) { return int8_panel_bytes(args.input_size); }
  static int64_t group_size(const QuantLinearArgs& args) { return args.input_size; }
  static int64_t num_groups(const QuantLinearArgs&) { return 1; }
  static int64_t scratch_bytes(const QuantLinearArgs&) { return 0; }
  static int64_t tile_quads(const QuantLinearArgs&) { return kInt8TileK / 4; }
  static constexpr auto run_part = int8_part;
};

struct Int4 {
  static constexpr int32_t kFactor = -8;
  static constexpr int64_t kScaleBytes = 2;
  static int64_t panel_bytes(const QuantLinearArgs& args) { return int4_panel_bytes(args.input_size); }
  static int64_t group_size(const QuantLinearArgs& args) { return args.group_size; }
  static int64_t num_groups(const QuantLinearArgs& args) { return ceil_div(args.input_size, args.group_size); }
  static int64_t scratch_bytes(const QuantLinearArgs& args) { return kDotCols * args.group_size; }
  static int64_t tile_quads(const QuantLinearArgs& args) { return min_i64(16, args.group_size / 4); }
  static constexpr auto run_part = int4_part;
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
    const int64_t scratch_bytes = 2 * sums_bytes(part.rows) + Format::scratch_bytes(args_);
    int32_t* sums = static_cast<int32_t*>(pool.scratch(thread, scratch_bytes));
    const DotScope scope(part.rows, Format::tile_quads(args_));
    const int64_t num_panels = num_work_panels(args_), first = task % tasks_.column_tasks * tasks_.groups_per_task;
    const int64_t end = min_i64(tasks_.num_groups, first + tasks_.groups_per_task);
    for (int64_t group = first; group < end; ++group) {
      part.first_panel = group * kDotPanels;
      part.panels = min_i64(kDotPanels, num_panels - part.first_panel);
      Format::run_part(args_, rows_, part, sums);
    }
  }

 private:
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
