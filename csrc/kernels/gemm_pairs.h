// Products of bfloat16 by vdpbf16ps, for more rows than are bound by memory. Same bits as every tier: simd/bf16_dot.h.
//
// A register block is 4 rows of two panels: 16 chains, over one tile, then total += even + odd. Inputs are broadcast to
// registers: by the instruction itself, each would be loaded for both panels. More rows would save loads, but their sums at the end of a tile then fill the schedulers, and
// the products of the next tile wait; so each row's sums stand among the products of the next row.
// The first rows of a task arrange the weights of a block as the chains take them while they use them; the other rows
// find them in level 1. The weights wanted next are fetched to level 1 meanwhile: the first rows would wait for level
// 2. Inputs are arranged once, by all threads, before the products.
//
// Ladder (GFLOP/s of one Zen 4 core whose instruction alone gives 236; 9728 x 896, 64 rows, weights from memory):
//   6 rows of two panels, intrinsics, weights arranged beforehand     172
//   own instruction, 4 rows, sums among products, fused arrangement   192
//   weights fetched to level 1 instead of level 2, blocks of 8 tiles  205
//   totals in registers                                               208
// Of one Zen 5 core whose instruction alone gives 447; 9728 x 896, 1024 rows:
//   as before                                                         320
//   inputs broadcast to registers, once for both panels               395
// Of the same core while other programs ran, whose instruction alone gave 452; 9728 x 896 and 896 x 4864, 512 rows:
//   as before                                                         416, 356
//   inputs arranged in the order of memory                            414, 368
//   a tile's steps unrolled                                           445, 441
#pragma once

#include "kernels/gemm_epilogue.h"
#include "kernels/gemm_vector.h"
#include "kernels/products.h"
#include "simd/bf16_dot.h"

namespace quire::QUIRE_TIER {

constexpr int64_t kPairRows = 4;        // of a register block
constexpr int64_t kWordsPerTile = 16;   // of a row: pairs of inputs
constexpr int64_t kPairSize = kTileSize;  // words of a tile of two panels
constexpr int64_t kPairBlockTiles = 8;  // of K, at most: arranged weights (16 KB) stay in level 1
constexpr int64_t kInputsAhead = 512;   // inputs of a row that are fetched while they are arranged
constexpr int64_t kPairTaskRows = 256;
constexpr int64_t kPairTaskPanels = 16;
constexpr int64_t kPairInputBytes = 256 << 10;  // inputs that stay in level 2 while all panels of a task pass

// The inputs as the chains take them: [rows / 4][tiles][4, or the rows left][16 words].
struct PairedRows {
  float* data;
  int64_t num_rows, num_tiles;

  int64_t num_blocks() const { return ceil_div(num_rows, kPairRows); }
  int64_t rows_of(int64_t block) const { return min_i64(kPairRows, num_rows - block * kPairRows); }
  float* at(int64_t block, int64_t tile) const {
    return data + (block * kPairRows * num_tiles + tile * rows_of(block)) * kWordsPerTile;
  }
};

// Tile after tile: what is written then lies one line behind the other.
static inline void arrange_rows(const LinearArgs& args, const PairedRows& rows, int64_t block) {
  const int64_t num_rows = rows.rows_of(block);
  const bf16* inputs[kPairRows];
  for (int64_t row = 0; row < num_rows; ++row) {
    inputs[row] = static_cast<const bf16*>(args.x) + x_row(args, block * kPairRows + row) * args.x_stride;
  }
  float* out = rows.at(block, 0);
  for (int64_t first = 0; first < args.input_size; first += kTileDepth) {
    for (int64_t row = 0; row < num_rows; ++row, out += kWordsPerTile) {
      prefetch_l2(inputs[row] + first + kInputsAhead);
      store_chain_pairs(out, inputs[row] + first, args.input_size - first);
    }
  }
}

// Two panels over some tiles of K.
struct PairBlock {
  const bf16 *weights[2];  // packed
  const char* next[2];     // weights wanted after these: fetched into level 1
  float* arranged;         // [tiles][8 steps][2 panels][2 chains][16]
  int64_t num_tiles;
  bool is_first;  // totals begin at zero
};

// The next weights of both panels, `lines` lines of each a tile.
class PairFetch {
 public:
  PairFetch(const PairBlock& block, int64_t offset, int64_t lines)
      : first_(block.next[0] + offset), second_(block.next[1] + offset), lines_(lines) {}
  inline void next() {
#pragma GCC unroll 1
    for (int64_t line = 0; line < lines_; ++line, first_ += kCacheLine, second_ += kCacheLine) {
      prefetch_l1(first_);
      prefetch_l1(second_);
    }
  }

 private:
  const char *first_, *second_;
  int64_t lines_;
};

// Functions that take sums are always inlined, and loops over them unrolled: only then are they registers.

// The chains of R rows of two panels over a tile, and their totals.
template <int R>
struct PairSums {
  __m512 even[R][2], odd[R][2], totals[R][2];
};
struct PairWeights {
  __m512 even[2], odd[2];
};

template <bool kArrange>
[[gnu::always_inline]] static inline void load_pair_weights(const bf16* first, const bf16* second, float* arranged,
                                                            PairWeights& weights) {
#pragma GCC unroll 2
  for (int p = 0; p < 2; ++p) {
    F16 even, odd;
    if constexpr (kArrange) {
      const bf16* panel = p == 0 ? first : second;
      load_chain_pairs(panel, panel + 32, even, odd);
      store(arranged + p * 32, even);
      store(arranged + p * 32 + 16, odd);
    } else {
      even = load(arranged + p * 32);
      odd = load(arranged + p * 32 + 16);
    }
    weights.even[p] = even.v;
    weights.odd[p] = odd.v;
  }
}

template <int R>
[[gnu::always_inline]] static inline void add_pair_products(PairSums<R>& sums, int r, const PairWeights& weights,
                                                            const float* inputs) {
  const __m512 even = _mm512_set1_ps(inputs[0]), odd = _mm512_set1_ps(inputs[1]);
#pragma GCC unroll 2
  for (int p = 0; p < 2; ++p) {
    add_chain_pairs_inplace(sums.even[r][p], even, weights.even[p]);
    add_chain_pairs_inplace(sums.odd[r][p], odd, weights.odd[p]);
  }
}

// totals[row][2 panels][16] += x[row] . weights.
template <int R, bool kArrange>
[[gnu::noinline]] static void dot_pair(const float* x, const PairBlock& block, PairFetch fetch, float* totals) {
  constexpr int kSteps = kTileDepth / 4;
  const bf16 *first = block.weights[0], *second = block.weights[1];
  float* arranged = block.arranged;
  const __mmask16 lanes = block.is_first ? 0 : 0xffff;
  PairSums<R> sums;
  PairWeights weights;
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
    for (int p = 0; p < 2; ++p) sums.totals[r][p] = _mm512_maskz_loadu_ps(lanes, totals + (2 * r + p) * kPanelSize);
  }
  for (int64_t tile = 0; tile < block.num_tiles; ++tile, x += R * kWordsPerTile) {
    fetch.next();
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      sums.even[r][0] = sums.even[r][1] = sums.odd[r][0] = sums.odd[r][1] = _mm512_setzero_ps();
    }
    const float* inputs = x;
    // Unrolled: with more rows than level 1 holds, inputs come from level 2, whose latency only a full window hides.
#pragma GCC unroll 8
    for (int step = 0; step < kSteps - 1; ++step, inputs += 2, first += 64, second += 64, arranged += 64) {
      load_pair_weights<kArrange>(first, second, arranged, weights);
#pragma GCC unroll 4
      for (int r = 0; r < R; ++r) add_pair_products(sums, r, weights, inputs + r * kWordsPerTile);
    }
    load_pair_weights<kArrange>(first, second, arranged, weights);
    first += 64;
    second += 64;
    arranged += 64;
#pragma GCC unroll 4
    for (int r = 0; r < R; ++r) {
      add_pair_products(sums, r, weights, inputs + r * kWordsPerTile);
#pragma GCC unroll 2
      for (int p = 0; p < 2; ++p) {
        sums.totals[r][p] = _mm512_add_ps(sums.totals[r][p], _mm512_add_ps(sums.even[r][p], sums.odd[r][p]));
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
    for (int p = 0; p < 2; ++p) _mm512_storeu_ps(totals + (2 * r + p) * kPanelSize, sums.totals[r][p]);
  }
}

template <bool kArrange>
static inline void dot_pair_rows(int64_t num_rows, const float* x, const PairBlock& block, const PairFetch& fetch,
                                 float* totals) {
  switch (num_rows) {
    case 1: return dot_pair<1, kArrange>(x, block, fetch, totals);
    case 2: return dot_pair<2, kArrange>(x, block, fetch, totals);
    case 3: return dot_pair<3, kArrange>(x, block, fetch, totals);
    default: return dot_pair<4, kArrange>(x, block, fetch, totals);
  }
}

class PairTask {
 public:
  PairTask(Pool& pool, const LinearArgs& args, const PairedRows& rows, const Division& d, int64_t task, int thread)
      : args_(args), rows_(rows) {
    panel_ = task / d.num_row_blocks * d.panels_per_task;
    num_panels_ = min_i64(d.panels_per_task, num_work_panels(args) - panel_);
    next_panel_ = panel_ + num_panels_ * pool.num_threads();
    first_row_ = task % d.num_row_blocks * d.rows_per_task;
    num_rows_ = min_i64(d.rows_per_task, args.num_rows - first_row_);
    const int64_t arranged_size = kPairBlockTiles * kPairSize;
    arranged_ = static_cast<float*>(
        pool.scratch(thread, (arranged_size + d.rows_per_task * round_up(d.panels_per_task, 2) * kPanelSize) * 4));
    totals_ = arranged_ + arranged_size;
  }

  // K in parts whose inputs stay in level 2, each for all pairs of panels.
  void run() {
    const int64_t fitting = max_i64(kPairBlockTiles, kPairInputBytes / (num_rows_ * kWordsPerTile * 4));
    const int64_t part = ceil_div(rows_.num_tiles, ceil_div(rows_.num_tiles, fitting));
    for (int64_t tile = 0; tile < rows_.num_tiles; tile += part) {
      const int64_t end = min_i64(rows_.num_tiles, tile + part);
      for (int64_t p = 0; p < num_panels_; p += 2) run_part(p, tile, end);
    }
  }

 private:
  void run_part(int64_t p, int64_t first_tile, int64_t end_tile) {
    float* totals = totals_ + p * num_rows_ * kPanelSize;
    const int64_t tiles = end_tile - first_tile;
    const int64_t block_tiles = ceil_div(tiles, ceil_div(tiles, kPairBlockTiles));
    for (int64_t tile = first_tile; tile < end_tile; tile += block_tiles) {
      const int64_t next = tile + block_tiles;
      PairBlock block{};
      block.arranged = arranged_;
      block.is_first = tile == 0;
      block.num_tiles = min_i64(block_tiles, end_tile - tile);
      for (int64_t i = 0; i < 2; ++i) {
        block.weights[i] = tile_at(panel_ + p + i, tile);
        const bf16* wanted = next < end_tile           ? tile_at(panel_ + p + i, next)
                             : p + 2 < num_panels_     ? tile_at(panel_ + p + 2 + i, first_tile)
                             : next < rows_.num_tiles ? tile_at(panel_ + i, next)
                                                       : tile_at(next_panel_ + i, 0);
        block.next[i] = reinterpret_cast<const char*>(wanted);
      }
      run_block(block, tile, totals);
    }
    if (end_tile < rows_.num_tiles) return;
    const int64_t num_panels = min_i64(2, num_panels_ - p);
    finish(args_, totals, kPanelSize, 2 * kPanelSize, panel_ + p, num_panels, first_row_, num_rows_);
  }

  // The first row blocks fetch the next weights, as evenly as whole lines allow.
  void run_block(const PairBlock& block, int64_t tile, float* totals) {
    constexpr int64_t kTileLines = kTileSize * 2 / kCacheLine;
    const int64_t num_blocks = ceil_div(num_rows_, kPairRows);
    const int64_t lines = ceil_div(kTileLines, num_blocks);
    for (int64_t i = 0; i < num_blocks; ++i, totals += kPairRows * 2 * kPanelSize) {
      const int64_t of_all = first_row_ / kPairRows + i;
      const PairFetch fetch(block, i * lines * block.num_tiles * kCacheLine, i * lines < kTileLines ? lines : 0);
      const float* x = rows_.at(of_all, tile);
      if (i == 0) {
        dot_pair_rows<true>(rows_.rows_of(of_all), x, block, fetch, totals);
      } else {
        dot_pair_rows<false>(rows_.rows_of(of_all), x, block, fetch, totals);
      }
    }
  }

  // Beyond the last panel, the last one: a pair may have only one panel.
  const bf16* tile_at(int64_t panel, int64_t tile) const {
    const int64_t packed = packed_panel(args_, min_i64(panel, num_work_panels(args_) - 1));
    return static_cast<const bf16*>(args_.weight) + (packed * rows_.num_tiles + tile) * kTileSize;
  }

  const LinearArgs& args_;
  const PairedRows& rows_;
  int64_t panel_, num_panels_, next_panel_, first_row_, num_rows_;
  float *arranged_, *totals_;
};

// See products.h. Few rows are bound by memory, and go to vectors.
class PairProduct {
 public:
  static constexpr int64_t kSerialInputs = 0;
  static bool is_few(const LinearArgs& args) { return args.num_rows <= kStreamRows; }
  static int64_t memory_bytes(const LinearArgs& args) {
    return is_few(args) ? 0 : args.num_rows * ceil_div(args.input_size, kTileDepth) * kWordsPerTile * 4;
  }

  PairProduct(const LinearArgs& args, char* memory, int num_threads)
      : args_(args),
        rows_{reinterpret_cast<float*>(memory), args.num_rows, ceil_div(args.input_size, kTileDepth)},
        division_(is_few(args) ? divide(args, num_threads, kVectorRows, kStreamPanels)
                               : divide(args, num_threads, kPairTaskRows, kPairTaskPanels)) {
    if (is_few(args)) return;
    division_.panels_per_task = round_up(division_.panels_per_task, 2);
    division_.num_groups = ceil_div(num_work_panels(args), division_.panels_per_task);
  }

  int64_t num_arranging() const { return is_few(args_) ? 0 : rows_.num_blocks(); }
  void arrange(int64_t task) const { arrange_rows(args_, rows_, task); }
  int64_t num_tasks() const { return division_.num_tasks(); }
  void run(Pool& pool, int64_t task, int thread) const {
    if (is_few(args_)) {
      VectorTask<bf16>(pool, args_, division_, task, thread).run();
    } else {
      PairTask(pool, args_, rows_, division_, task, thread).run();
    }
  }

 private:
  LinearArgs args_;
  PairedRows rows_;
  Division division_;
};

}  // namespace quire::QUIRE_TIER
