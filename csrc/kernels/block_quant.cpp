// Linear layers on weights in block formats. Two phases: rows of x are quantised once, then tasks of columns take them.
#include "quire/block_quant.h"

#include "kernels/block_few.h"
#include "kernels/block_pack.h"
#include "kernels/products.h"
#include "kernels/quant_tasks.h"

namespace quire::QUIRE_TIER {
namespace {

template <class F>
int64_t num_records(int64_t input_size) {
  return ceil_div(input_size, kRecordInputs<F>);
}
template <class F>
int64_t panel_bytes(int64_t input_size) {
  return num_records<F>(input_size) * kRecordBytes<F>;
}
template <class F>
constexpr int64_t kRecordGroups = kRecordInputs<F> / kGroupInputs;
template <class F>
constexpr int64_t kChunkRecords = kChunkGroups / kRecordGroups<F>;
// Codes that are bytes in the file are multiplied where they lie.
template <class F>
constexpr bool kIsUnpacked = F::kPlanes * kPlaneBytes < F::kBlockInputs * kPanelSize;

template <class F>
constexpr int64_t kRecordLines = kRecordBytes<F> / kCacheLine;
template <class F>
constexpr int64_t kUnpackLines = kRecordLines<F> / 2;  // fetched while a record is unpacked

// Memory of a task.
struct Scratch {
  float* totals;      // [groups of kDotPanels panels][rows][kDotCols]
  int32_t* sums;      // [2][kBlockRows][kDotCols]
  uint8_t* codes;     // [kDotPanels][kPanelCodes]
  float *a, *b;       // [kDotPanels][kPanelFactors]

  static constexpr int64_t kSumsBytes = 2 * kBlockRows * kDotCols * 4, kCodesBytes = kDotPanels * kPanelCodes;
  static constexpr int64_t kFactorsBytes = kDotPanels * kPanelFactors * 4;

  static int64_t bytes(int64_t totals_bytes) { return totals_bytes + kSumsBytes + kCodesBytes + 2 * kFactorsBytes; }
  Scratch(void* memory, int64_t totals_bytes) {
    char* at = static_cast<char*>(memory);
    const auto take = [&](int64_t bytes) {
      char* part = at;
      at += bytes;
      return part;
    };
    totals = reinterpret_cast<float*>(take(totals_bytes));
    sums = reinterpret_cast<int32_t*>(take(kSumsBytes));
    codes = reinterpret_cast<uint8_t*>(take(kCodesBytes));
    a = reinterpret_cast<float*>(take(kFactorsBytes));
    b = reinterpret_cast<float*>(take(kFactorsBytes));
  }
};

// See products.h.
template <class F>
class BlockProduct {
 public:
  static constexpr int64_t kSerialInputs = kQuantizedPerTask;

  static int64_t memory_bytes(const QuantLinearArgs& args) {
    return q_bytes(args) + scales_bytes(args) + args.num_rows * num_groups(args) * F::kParts * 4;
  }

  BlockProduct(const QuantLinearArgs& args, char* memory, int num_threads)
      : args_(args), tasks_(args, panel_bytes<F>(args.input_size), num_threads),
        rows_per_arranging_(max_i64(1, kQuantizedPerTask / args.input_size)) {
    rows_.q = reinterpret_cast<int8_t*>(memory);
    rows_.stride = q_stride(args);
    rows_.scales = reinterpret_cast<float*>(memory + q_bytes(args));
    rows_.sums = memory + q_bytes(args) + scales_bytes(args);
    rows_.groups = num_groups(args);
    rows_.parts = F::kParts;
  }

  int64_t num_arranging() const { return ceil_div(args_.num_rows, rows_per_arranging_); }
  void arrange(int64_t task) const {
    const int64_t end = min_i64(args_.num_rows, (task + 1) * rows_per_arranging_);
    for (int64_t m = task * rows_per_arranging_; m < end; ++m) {
      const int64_t place = x_row(args_, m) * args_.x_stride;
      if (args_.x_dtype == DType::bf16) {
        quantize_groups<F>(static_cast<const bf16*>(args_.x) + place, args_.input_size, rows_, m);
      } else {
        quantize_groups<F>(static_cast<const float*>(args_.x) + place, args_.input_size, rows_, m);
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
    const bool is_few = part.rows <= kFewBlockRows<F>;
    const int64_t step = is_few && part.rows <= kStreamedRows ? part.panels : kDotPanels;
    const int64_t totals_bytes = PartSums<float>::bytes(part.rows, step);
    const Scratch scratch(pool.scratch(thread, Scratch::bytes(totals_bytes)), totals_bytes);
    const DotScope scope(part.rows, kGroupQuads / F::kParts);
    const PartSums<float> totals(scratch.totals, part.rows);
    for (const int64_t end = part.first_panel + part.panels; part.first_panel < end; part.first_panel += step) {
      part.panels = min_i64(step, end - part.first_panel);
      if (is_few) {
        each_panel(args_, part, [&](int64_t p, const Panels& panel) { run_few(part, panel, totals.of(0, p)); });
      } else {
        run_chunks(part, panels_of(args_, part), scratch, totals.of(0, 0));
      }
      write(part, totals);
    }
  }

 private:
  static int64_t num_groups(const QuantLinearArgs& args) { return num_records<F>(args.input_size) * kRecordGroups<F>; }
  // Rows an odd number of cache lines apart, so that they fall into different sets of the cache.
  static int64_t q_stride(const QuantLinearArgs& args) {
    return (ceil_div(num_groups(args) * kGroupInputs, kCacheLine) | 1) * kCacheLine;
  }
  static int64_t q_bytes(const QuantLinearArgs& args) { return round_up(args.num_rows, kRowsPadding) * q_stride(args); }
  static int64_t scales_bytes(const QuantLinearArgs& args) {
    return round_up(args.num_rows * num_groups(args) * 4, kCacheLine);
  }

  void write(const Part& part, const PartSums<float>& totals) const {
    write_part(args_, part, [&](int64_t m, int64_t p) { return load(totals.of(m, p)); });
  }

  const uint8_t* panel_at(int64_t panel) const { return args_.packed + panel * panel_bytes<F>(args_.input_size); }

  // totals[rows][kDotCols] = the products of a few rows with one panel.
  void run_few(const Part& part, const Panels& panel, float* totals) const {
    const BlockPanel blocks{panel_at(panel.first), num_records<F>(args_.input_size), panel_at(panel.next)};
    multiply_panel<F>(rows_, part.first_row, part.rows, blocks, totals);
  }

  // totals[rows][kDotCols] = the products of the rows with all inputs of the panels.
  void run_chunks(const Part& part, const Panels& panels, const Scratch& scratch, float* totals) const {
    for (int64_t m = 0; m < part.rows; ++m) {
      __builtin_memset(totals + m * kDotCols, 0, static_cast<uint64_t>(panels.count * kPanelSize * 4));
    }
    const int64_t records = num_records<F>(args_.input_size);
    for (int64_t record = 0; record < records; record += kChunkRecords<F>) {
      run_chunk(part, panels, scratch, totals, record, min_i64(kChunkRecords<F>, records - record));
    }
  }

  void run_chunk(const Part& part, const Panels& panels, const Scratch& scratch, float* totals, int64_t record,
                 int64_t records) const {
    const PanelOffsets offsets = panels.offsets(panel_bytes<F>(args_.input_size));
    const uint8_t* packed = panel_at(panels.first) + record * kRecordBytes<F>;
    unpack_chunk(packed, offsets, panels.count, wanted_after(panels, record), records, scratch);
    const int64_t group = record * kRecordGroups<F>;
    BlockChunk chunk{};
    chunk.q = rows_.q + part.first_row * rows_.stride + group * kGroupInputs;
    chunk.q_stride = rows_.stride;
    chunk.rows = part.rows;
    chunk.x_scales = rows_.scales_of(part.first_row) + group;
    chunk.x_scales_stride = rows_.groups;
    chunk.x_sums = rows_.sums_of(part.first_row) + group * F::kParts * 4;
    chunk.x_sums_stride = rows_.groups * F::kParts * 4;
    chunk.groups = records * kRecordGroups<F>;
    for (int64_t g = 0; g < chunk.groups; ++g) {
      chunk.codes[g] = kIsUnpacked<F>
                           ? scratch.codes + g * kGroupBytes
                           : packed + g / kRecordGroups<F> * kRecordBytes<F> + g % kRecordGroups<F> * kGroupBytes;
    }
    chunk.codes_offsets = kIsUnpacked<F> ? consecutive(kPanelCodes) : offsets;
    chunk.next = wanted_after(panels, record) + records * kUnpackLines<F> * kCacheLine;
    chunk.next_offsets = offsets;
    chunk.next_lines = ceil_div(records * (kRecordLines<F> - kUnpackLines<F>), chunk.groups);
    chunk.panels = panels.count;
    chunk.a = scratch.a;
    chunk.b = scratch.b;
    chunk.totals = totals;
    chunk.sums = scratch.sums;
    dot_chunk<F>(chunk);
  }

  // What is wanted kFetchAhead bytes after `record` of the first panel, or after the end of that panel.
  const uint8_t* wanted_after(const Panels& panels, int64_t record) const {
    const int64_t size = panel_bytes<F>(args_.input_size), ahead = record * kRecordBytes<F> + kFetchAhead;
    return ahead < size ? panel_at(panels.first) + ahead : panel_at(panels.next) + (ahead - size);
  }

  // Codes and factors of the records at `packed` to `scratch`, while a part of what is wanted next is fetched; dot_chunk
  // fetches the rest. All of it at once would fill the queue of reads, and the core would wait for it.
  void unpack_chunk(const uint8_t* packed, const PanelOffsets& offsets, int64_t num_panels, const uint8_t* next,
                    int64_t records, const Scratch& scratch) const {
    for (int64_t i = 0; i < records; ++i, next += kUnpackLines<F> * kCacheLine) {
      for (int64_t p = 0; p < num_panels; ++p) {
        const uint8_t* from = packed + offsets.at(p) + i * kRecordBytes<F>;
        for (int64_t line = 0; line < kUnpackLines<F>; ++line) prefetch_l2(next + offsets.at(p) + line * kCacheLine);
        const int64_t group = i * kRecordGroups<F>, factor = p * kPanelFactors + group * F::kParts * kPanelSize;
        if constexpr (kIsUnpacked<F>) unpack<F>(from, scratch.codes + p * kPanelCodes + group * kGroupBytes);
        F::factors(from, scratch.a + factor, scratch.b + factor);
      }
    }
  }

  QuantLinearArgs args_;
  BlockRows rows_;
  Tasks tasks_;
  int64_t rows_per_arranging_;
};

template <class F>
void linear(Pool& pool, const QuantLinearArgs& args) {
  run_one<BlockProduct<F>>(pool, args);
}

template <class F>
void grouped_linear(Pool& pool, const Grouped<QuantLinearArgs>& grouped) {
  run_groups<BlockProduct<F>>(pool, grouped, [&](int64_t group) {
    const QuantLinearArgs& all = grouped.linear;
    QuantLinearArgs args = rows_of_group(grouped, group, all.x_stride * bytes_of(all.x_dtype),
                                         all.out_stride * bytes_of(all.out_dtype));
    args.packed = all.packed + group * packed_panels(all) * panel_bytes<F>(all.input_size);
    return args;
  });
}

template <class F>
constexpr BlockFormatKernels kernels_of() {
  return {{F::kBlockInputs, F::kBlockBytes, kRecordInputs<F>, kRecordBytes<F>},
          linear<F>, grouped_linear<F>, pack_blocks<F>, gather_blocks<F>};
}

}  // namespace

extern const BlockKernels block_kernels;
const BlockKernels block_kernels = {{kernels_of<Q8_0>(), kernels_of<Q4_0>(), kernels_of<Q4_1>(), kernels_of<Q5_0>(),
                                     kernels_of<Q5_1>(), kernels_of<Q2_K>(), kernels_of<Q3_K>(), kernels_of<Q4_K>(),
                                     kernels_of<Q5_K>(), kernels_of<Q6_K>(), kernels_of<IQ4_NL>(),
                                     kernels_of<IQ4_XS>(), kernels_of<MXFP4>()}};

}  // namespace quire::QUIRE_TIER
