// Products with weights kept as codes: see quire/coded.h. Every output is one chain of sums over K, tile after tile and
// group after group, whatever the number of rows and threads.
#include "quire/coded.h"

#include "kernels/coded_parts.h"
#include "kernels/coded_tiles.h"
#include "kernels/gemm_vector.h"

namespace quire::QUIRE_TIER {
namespace {

constexpr int64_t kCodesAhead = 4096;  // bytes of a panel
constexpr int64_t kFewRowsPanels = 4;  // of a task with few rows

// The codes of one panel of 16 outputs, group after group of inputs, and what is wanted after their end.
struct CodedPanel {
  const uint8_t* codes;
  const uint8_t* zeros;  // null = none
  const float* scales;
  int64_t num_tiles, group_tiles;
  const uint8_t* next;
};

// totals[R][16] = x . the panel, read from end to end: one stream from memory. Of every tile x has the inputs of R rows.
template <class Codes, int R>
void multiply_panel(const Codes& widener, const float* x, const CodedPanel& panel, float* totals) {
  constexpr int64_t kTileBytes = coded_tile_bytes(Codes::kCode);
  alignas(64) bf16 numbers[kTileSize];
  alignas(64) float sums[R * kPanelSize];
  const int64_t size = panel.num_tiles * kTileBytes;
  __builtin_memset(totals, 0, sizeof(sums));
  for (int64_t tile = 0, group = 0; tile < panel.num_tiles; ++group) {
    const int64_t end = min_i64(panel.num_tiles, tile + panel.group_tiles), place = group * kPanelSize;
    __builtin_memset(sums, 0, sizeof(sums));
    for (; tile < end; ++tile, x += R * kInputFloats<bf16>) {
      const int64_t at = tile * kTileBytes, ahead = at + kCodesAhead;
      const uint8_t* wanted = ahead < size ? panel.codes + ahead : panel.next + (ahead - size);
      for (int64_t line = 0; line < kTileBytes; line += kCacheLine) prefetch_l1(wanted + line);
      widener.tile(panel.codes + at, panel.zeros == nullptr ? nullptr : panel.zeros + place, numbers);
      constexpr int W = kWide;
      for (int first = 0; first < kPanelSize; first += W * kLanes) {
        Lanes of_tile[W][R];
        dot_tile(x, kInputFloats<bf16>, numbers, first, of_tile);
#pragma GCC unroll 2
        for (int w = 0; w < W; ++w) {
#pragma GCC unroll 16
          for (int r = 0; r < R; ++r) {
            float* sum = sums + r * kPanelSize + first + w * kLanes;
            lanes_store(sum, lanes_add(lanes_load(sum), of_tile[w][r]));
          }
        }
      }
    }
    const F16 scale = load(panel.scales + place);
    for (int64_t i = 0; i < R * kPanelSize; i += kPanelSize) store(totals + i, load(totals + i) + load(sums + i) * scale);
  }
}

template <class Codes>
using MultiplyPanel = void (*)(const Codes&, const float*, const CodedPanel&, float*);

template <class Codes>
MultiplyPanel<Codes> multiply_panel_of(int64_t num_rows) {
  switch (num_rows) {
    case 1: return multiply_panel<Codes, 1>;
    case 2: return multiply_panel<Codes, 2>;
    case 3: return multiply_panel<Codes, 3>;
    default: return multiply_panel<Codes, 4>;
  }
}

constexpr int64_t kFewCodedRows = 4;

// The rows of some panels. A block of up to 8 tiles of one group is widened for a panel, and serves all rows.
template <class Codes>
class CodedTask {
 public:
  CodedTask(Pool& pool, const CodedLinearArgs& args, const Division& d, int64_t task, int thread) : args_(args) {
    num_tiles_ = ceil_div(args.input_size, kTileDepth);
    group_tiles_ = args.group_size == 0 ? num_tiles_ : args.group_size / kTileDepth;
    num_groups_ = ceil_div(num_tiles_, group_tiles_);
    panel_ = task / d.num_row_blocks * d.panels_per_task;
    num_panels_ = min_i64(d.panels_per_task, num_work_panels(args) - panel_);
    first_row_ = task % d.num_row_blocks * d.rows_per_task;
    num_rows_ = min_i64(d.rows_per_task, args.num_rows - first_row_);
    next_panel_ = min_i64(panel_ + num_panels_ * pool.num_threads(), num_work_panels(args) - 1);
    is_few_ = num_rows_ <= kFewCodedRows;
    const int64_t wide_size = is_few_ ? num_rows_ * num_tiles_ * kInputFloats<bf16> : d.rows_per_task * kBlockDepth;
    const int64_t sums_size = d.panels_per_task * d.rows_per_task * kPanelSize;
    wide_ = static_cast<float*>(pool.scratch(thread, (wide_size + 2 * sums_size) * 4 + kBlockTiles * kTileSize * 2));
    totals_ = wide_ + wide_size;
    sums_ = totals_ + sums_size;
    tiles_ = reinterpret_cast<bf16*>(sums_ + sums_size);
  }

  void run() {
    is_few_ ? run_panels() : run_groups();
    finish(args_, totals_, num_rows_ * kPanelSize, kPanelSize, panel_, num_panels_, first_row_, num_rows_);
  }

 private:
  // Of few rows: panels in the order in which they lie, of gated ones the gates, then the ups.
  void run_panels() {
    for (int64_t row = 0; row < num_rows_; ++row) {
      const bf16* x = static_cast<const bf16*>(args_.x) + x_row(args_, first_row_ + row) * args_.x_stride;
      float* out = wide_ + row * kInputFloats<bf16>;
      for (int64_t i = 0; i < args_.input_size; i += kTileDepth, out += num_rows_ * kInputFloats<bf16>) {
        store_inputs(x + i, min_i64(kTileDepth, args_.input_size - i), out);
      }
    }
    const MultiplyPanel<Codes> multiply = multiply_panel_of<Codes>(num_rows_);
    const int64_t kinds = args_.is_gated ? 2 : 1;
    for (int64_t kind = 0; kind < kinds; ++kind) {
      for (int64_t p = kind; p < num_panels_; p += kinds) {
        const bool is_last = p + kinds >= num_panels_;
        const int64_t next = !is_last ? panel_ + p + kinds : kind + 1 < kinds ? panel_ + kind + 1 : next_panel_;
        const uint8_t* zeros = args_.zeros == nullptr ? nullptr : args_.zeros + of_group(p, 0);
        const CodedPanel panel{codes_at(panel_ + p, 0), zeros, args_.scales + of_group(p, 0), num_tiles_, group_tiles_,
                               codes_at(next, 0)};
        multiply(codes_, wide_, panel, totals_ + p * num_rows_ * kPanelSize);
      }
    }
  }

  void run_groups() {
    __builtin_memset(totals_, 0, sums_bytes());
    for (int64_t group = 0; group < num_groups_; ++group) {
      const int64_t end = min_i64(num_tiles_, (group + 1) * group_tiles_);
      __builtin_memset(sums_, 0, sums_bytes());
      for (int64_t tile = group * group_tiles_; tile < end; tile += kBlockTiles) {
        add_block(group, tile, min_i64(kBlockTiles, end - tile));
      }
      add_group(group);
    }
  }

  const uint8_t* codes_at(int64_t panel, int64_t tile) const {
    const int64_t at = packed_panel(args_, panel) * num_tiles_ + tile;
    return static_cast<const uint8_t*>(args_.weight) + at * coded_tile_bytes(Codes::kCode);
  }
  uint64_t sums_bytes() const { return static_cast<uint64_t>(num_panels_ * num_rows_ * kPanelSize * 4); }

  // Where the scales of a panel of work lie, in an array that has some for each panel and group.
  int64_t of_group(int64_t p, int64_t group) const {
    return (packed_panel(args_, panel_ + p) * num_groups_ + group) * kPanelSize;
  }

  void add_block(int64_t group, int64_t tile, int64_t num_tiles) {
    constexpr int64_t kTileBytes = coded_tile_bytes(Codes::kCode);
    const int64_t first = tile * kTileDepth;
    const int64_t depth = min_i64(num_tiles * kTileDepth, args_.input_size - first);
    widen_block<bf16>(args_, first_row_, num_rows_, first, depth, wide_);
    for (int64_t p = 0; p < num_panels_; ++p) {
      const uint8_t* codes = codes_at(panel_ + p, tile);
      const uint8_t* zeros = args_.zeros == nullptr ? nullptr : args_.zeros + of_group(p, group);
      for (int64_t i = 0; i < num_tiles; ++i, codes += kTileBytes) {
        for (int64_t line = 0; line < kTileBytes; line += kCacheLine) prefetch_l2(codes + kCodesAhead + line);
        codes_.tile(codes, zeros, tiles_ + i * kTileSize);
      }
      for (int64_t row = 0; row < num_rows_; row += kMaxRows) {
        dot_tiles_of<bf16>(min_i64(kMaxRows, num_rows_ - row))(wide_ + row * kBlockTiles * kInputFloats<bf16>, tiles_,
                                                               num_tiles, sums_ + (p * num_rows_ + row) * kPanelSize,
                                                               nullptr, 0);
      }
    }
  }

  void add_group(int64_t group) {
    for (int64_t p = 0; p < num_panels_; ++p) {
      const F16 scale = load(args_.scales + of_group(p, group));
      for (int64_t row = 0; row < num_rows_; ++row) {
        float* total = totals_ + (p * num_rows_ + row) * kPanelSize;
        store(total, load(total) + load(sums_ + (p * num_rows_ + row) * kPanelSize) * scale);
      }
    }
  }

  const CodedLinearArgs& args_;
  const Codes codes_{};
  int64_t num_tiles_, group_tiles_, num_groups_, panel_, num_panels_, first_row_, num_rows_, next_panel_;
  bool is_few_;
  float *wide_, *totals_, *sums_;
  bf16* tiles_;
};

// See products.h. Inputs are arranged where the weight has them in another order.
template <class Codes>
class CodedProduct {
 public:
  static constexpr int64_t kSerialInputs = 32768;
  static int64_t memory_bytes(const CodedLinearArgs& args) {
    return args.order == nullptr ? 0 : args.num_rows * args.input_size * 2;
  }

  CodedProduct(const CodedLinearArgs& args, char* memory, int num_threads)
      : args_(args), given_(args), ordered_(reinterpret_cast<bf16*>(memory)) {
    if (args.order != nullptr) {
      args_.x = memory;
      args_.x_stride = args.input_size;
      args_.x_rows = nullptr;
    }
    division_ = divide(args, num_threads, kVectorRows, args.num_rows <= kStreamRows ? kFewRowsPanels : kVectorPanels);
  }

  int64_t num_arranging() const { return given_.order == nullptr ? 0 : given_.num_rows; }
  void arrange(int64_t row) const {
    const bf16* x = static_cast<const bf16*>(given_.x) + x_row(given_, row) * given_.x_stride;
    bf16* out = ordered_ + row * given_.input_size;
    for (int64_t i = 0; i < given_.input_size; ++i) out[i] = x[given_.order[i]];
  }
  int64_t num_tasks() const { return division_.num_tasks(); }
  void run(Pool& pool, int64_t task, int thread) const {
    CodedTask<Codes>(pool, args_, division_, task, thread).run();
  }

 private:
  CodedLinearArgs args_, given_;
  bf16* ordered_;
  Division division_;
};

void linear(Pool& pool, const CodedLinearArgs& args) {
  if (args.num_rows == 0 || args.output_size == 0) return;
  switch (args.code) {
    case Code::e4m3: return run_one<CodedProduct<E4m3Codes>>(pool, args);
    case Code::int8: return run_one<CodedProduct<Int8Codes>>(pool, args);
    case Code::int4: return run_one<CodedProduct<Int4Codes>>(pool, args);
    case Code::nf4: return run_one<CodedProduct<Nf4Codes>>(pool, args);
  }
}

CodedLinearArgs args_of_group(const Grouped<CodedLinearArgs>& grouped, int64_t group) {
  const CodedLinearArgs& all = grouped.linear;
  const int64_t num_panels = packed_panels(all), num_tiles = ceil_div(all.input_size, kTileDepth);
  const int64_t num_groups = all.group_size == 0 ? 1 : ceil_div(all.input_size, all.group_size);
  CodedLinearArgs args = rows_of_group(grouped, group, all.x_stride * 2, all.out_stride * bytes_of(all.out_dtype));
  args.weight = static_cast<const char*>(all.weight) + group * num_panels * num_tiles * coded_tile_bytes(all.code);
  const int64_t skipped = group * num_panels * num_groups * kPanelSize;
  args.scales += skipped;
  if (args.zeros != nullptr) args.zeros += skipped;
  if (args.order != nullptr) args.order += group * all.input_size;
  return args;
}

void grouped_linear(Pool& pool, const Grouped<CodedLinearArgs>& grouped) {
  if (grouped.linear.output_size == 0) return;
  const auto args_of = [&](int64_t group) { return args_of_group(grouped, group); };
  switch (grouped.linear.code) {
    case Code::e4m3: return run_groups<CodedProduct<E4m3Codes>>(pool, grouped, args_of);
    case Code::int8: return run_groups<CodedProduct<Int8Codes>>(pool, grouped, args_of);
    case Code::int4: return run_groups<CodedProduct<Int4Codes>>(pool, grouped, args_of);
    case Code::nf4: return run_groups<CodedProduct<Nf4Codes>>(pool, grouped, args_of);
  }
}

}  // namespace

extern const CodedKernels coded_kernels;
const CodedKernels coded_kernels = {linear, grouped_linear, pack_codes, gather_codes};

}  // namespace quire::QUIRE_TIER
