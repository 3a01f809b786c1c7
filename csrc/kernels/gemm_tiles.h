// Products of bfloat16 on the tile unit.
//
// Activations are first copied into tiles, [16-row tile][K tile][rows][32], so that a tile is read from consecutive
// lines: rows of a matrix are often a multiple of 4 KB apart and would share one set of the level 1 cache.
//
// Up to 16 rows: the time is that of reading the weights. One row tile against four panels, a tile of each in turn:
// four streams from memory, fetched 4 KB ahead, and no sum leaves the registers.
//
// More rows: 2 x 2 tiles (4 sums, 2 of activations, 2 of weights) take 4 tile loads for 4 products of 16 cycles. A tile
// load takes 8 cycles from level 1 (48 KB) and about 25 from level 2 (2 MB), so at most every other one may come from
// there, the sums that K blocks reload included. K goes in blocks of up to 7 tiles and panels in fours:
//   up to 4 row tiles: pairs of panels outside, pairs of row tiles inside. The block's activations (28 KB) stay in
//     level 1 for all panels, a pair of panels (14 KB) for all rows: each tile comes from level 2 once.
//   more: pairs of row tiles outside, the two pairs of panels inside. The four panels (28 KB) stay for all row tiles,
//     two row tiles (14 KB) for both pairs: with the sums, 34 bytes a cycle from level 2. With the weights of one pair
//     of panels kept, in blocks of 8 tiles, it would be 48, more than level 2 gives.
// Weights of the next four panels are fetched to level 2 meanwhile, a tile of each in turn and the same number of lines
// at every step, so that memory is never idle: with up to 64 rows its time is what counts.
#pragma once

#include "kernels/gemm_epilogue.h"
#include "kernels/products.h"
#include "simd/tile.h"

namespace quire::QUIRE_TIER {

constexpr int64_t kTileBytes = 1024;
constexpr int64_t kTileRows = 16;
constexpr int64_t kQuad = 4;            // panels
constexpr int64_t kMaxBlockTiles = 7;   // of K
constexpr int64_t kTileRowsMax = 256;   // rows of a task
constexpr int64_t kTilePanelsMax = 32;  // panels of a task: activations are read from far away once for all of them
constexpr int64_t kStreamAhead = 4;     // tiles

// x as tiles, in memory shared by the threads.
struct PackedRows {
  char* data;
  int64_t rows_per_tile;  // 16, or all rows if fewer
  int64_t num_tiles;      // of K

  const char* at(int64_t row_tile, int64_t tile) const {
    return data + (row_tile * num_tiles + tile) * rows_per_tile * 64;
  }
};

constexpr int64_t kPackTiles = 64;  // of K, in a task

// Row tile and tiles of K of one task; missing rows and inputs are zero.
static inline void pack_tiles(const LinearArgs& args, const PackedRows& packed, int64_t task) {
  const int64_t chunks = ceil_div(packed.num_tiles, kPackTiles);
  const int64_t row_tile = task / chunks, first_tile = task % chunks * kPackTiles;
  const int64_t end_tile = min_i64(packed.num_tiles, first_tile + kPackTiles);
  for (int64_t r = 0; r < packed.rows_per_tile; ++r) {
    const int64_t row = row_tile * kTileRows + r;
    const int64_t row_bytes = row < args.num_rows ? args.input_size * 2 : 0;
    const char* x = static_cast<const char*>(args.x) + (row_bytes == 0 ? 0 : x_row(args, row)) * args.x_stride * 2;
    for (int64_t tile = first_tile; tile < end_tile; ++tile) {
      char* out = packed.data + ((row_tile * packed.num_tiles + tile) * packed.rows_per_tile + r) * 64;
      const int64_t bytes = row_bytes - tile * 64;
      if (bytes >= 64) {
        __builtin_memcpy(out, x + tile * 64, 64);
      } else {
        __builtin_memset(out, 0, 64);
        if (bytes > 0) __builtin_memcpy(out, x + tile * 64, bytes);
      }
    }
  }
}

// The lines of a block of four panels, a tile of each in turn.
class FetchAhead {
 public:
  void start(const char* const* panels, int64_t num_tiles) {
    for (int64_t p = 0; p < kQuad; ++p) panels_[p] = panels[p];
    end_ = static_cast<uint32_t>(num_tiles * kQuad * 16);
    line_ = 0;
  }
  // `lines` is a power of two.
  inline void next(uint32_t lines) {
    for (const uint32_t stop = line_ + lines; line_ < stop && line_ < end_;) {
      const char* from = panels_[line_ / 16 % kQuad] + line_ / 64 * kTileBytes + line_ % 16 * 64;
      const uint32_t n = lines < 16 ? lines : 16;
#pragma GCC unroll 1
      for (uint32_t i = 0; i < n; ++i) prefetch_l2(from + i * 64);
      line_ += n;
    }
  }

 private:
  const char* panels_[kQuad];
  uint32_t end_ = 0, line_ = 0;
};

template <int P>
static inline void zero_sums() {
  tile_zero<0>();
  if constexpr (P > 1) tile_zero<1>();
  if constexpr (P > 2) tile_zero<2>();
  if constexpr (P > 3) tile_zero<3>();
}

// One row tile against P panels over all of K; sums[panel][rows][16]. `next` follow the panels, for fetching.
template <int P>
static void stream_tiles(const PackedRows& x, const char* const* panels, const char* const* next, float* sums) {
  const int64_t tile_stride = x.rows_per_tile * 64;
  zero_sums<P>();
  for (int64_t tile = 0; tile < x.num_tiles; ++tile) {
    const bool is_within = tile + kStreamAhead < x.num_tiles;
    const int64_t ahead = is_within ? tile + kStreamAhead : max_i64(0, tile + kStreamAhead - x.num_tiles);
    const char* const* from = is_within ? panels : next;
    auto fetch = [&](int p) {
      for (int64_t i = 0; i < 16; ++i) prefetch_l2(from[p] + ahead * kTileBytes + i * 64);
    };
    tile_load<4>(x.data + tile * tile_stride, 64);
    tile_load<5>(panels[0] + tile * kTileBytes, 64);
    fetch(0);
    tile_dot_bf16<0, 4, 5>();
    if constexpr (P > 1) {
      tile_load<6>(panels[1] + tile * kTileBytes, 64);
      fetch(1);
      tile_dot_bf16<1, 4, 6>();
    }
    if constexpr (P > 2) {
      tile_load<7>(panels[2] + tile * kTileBytes, 64);
      fetch(2);
      tile_dot_bf16<2, 4, 7>();
    }
    if constexpr (P > 3) {
      tile_load<5>(panels[3] + tile * kTileBytes, 64);
      fetch(3);
      tile_dot_bf16<3, 4, 5>();
    }
  }
  tile_store<0>(sums, 64);
  if constexpr (P > 1) tile_store<1>(sums + 256, 64);
  if constexpr (P > 2) tile_store<2>(sums + 512, 64);
  if constexpr (P > 3) tile_store<3>(sums + 768, 64);
}

// sums[row tile][panel] += x . weights over num_tiles tiles, RT row tiles and PT panels. On the way, a row tile and
// the sums of the next block are brought to level 1, and `lines` lines of weights a step to level 2.
struct Block2x2 {
  const char* x[2];
  const char* weights[2];
  float* sums[2][2];
  const char* x_next;  // null = none
  const float* sums_next[2][2];
  int64_t num_tiles;
  uint32_t lines;
  bool is_first;  // of K: sums start at zero
};

template <int RT, int PT>
static void block_tiles(const Block2x2& b, FetchAhead& ahead) {
  if (b.is_first) {
    zero_sums<4>();
  } else {
    tile_load<0>(b.sums[0][0], 64);
    if constexpr (PT > 1) tile_load<1>(b.sums[0][1], 64);
    if constexpr (RT > 1) tile_load<2>(b.sums[1][0], 64);
    if constexpr (RT > 1 && PT > 1) tile_load<3>(b.sums[1][1], 64);
  }
  // The 64 lines of the next sums, spread over the steps.
  const int64_t sum_lines = ceil_div(16, b.num_tiles);
  for (int64_t tile = 0; tile < b.num_tiles; ++tile) {
    const int64_t at = tile * kTileBytes;
    tile_load<6>(b.weights[0] + at, 64);
    tile_load<4>(b.x[0] + at, 64);
    tile_dot_bf16<0, 4, 6>();
    if (b.x_next != nullptr) {
      for (int64_t i = 0; i < 16; ++i) prefetch_l1(b.x_next + at + i * 64);
    }
    if constexpr (PT > 1) {
      tile_load<7>(b.weights[1] + at, 64);
      tile_dot_bf16<1, 4, 7>();
    }
    ahead.next(b.lines);
    if constexpr (RT > 1) {
      tile_load<5>(b.x[1] + at, 64);
      tile_dot_bf16<2, 5, 6>();
      if constexpr (PT > 1) tile_dot_bf16<3, 5, 7>();
    }
    for (int64_t i = tile * sum_lines; i < min_i64(16, (tile + 1) * sum_lines); ++i) {
      for (int s = 0; s < 4; ++s) prefetch_l1(b.sums_next[s / 2][s % 2] + i * 16);
    }
  }
  tile_store<0>(b.sums[0][0], 64);
  if constexpr (PT > 1) tile_store<1>(b.sums[0][1], 64);
  if constexpr (RT > 1) tile_store<2>(b.sums[1][0], 64);
  if constexpr (RT > 1 && PT > 1) tile_store<3>(b.sums[1][1], 64);
}

class TileTask {
 public:
  TileTask(Pool& pool, const LinearArgs& args, const PackedRows& x, const Division& d, int64_t task, int thread)
      : args_(args), x_(x) {
    const int64_t num_panels = num_work_panels(args);
    panel_ = task / d.num_row_blocks * d.panels_per_task;
    num_panels_ = min_i64(d.panels_per_task, num_panels - panel_);
    first_row_ = task % d.num_row_blocks * d.rows_per_task;
    num_rows_ = min_i64(d.rows_per_task, args.num_rows - first_row_);
    num_row_tiles_ = ceil_div(num_rows_, kTileRows);
    // With one row block, threads take groups of panels in turns; with more, the next task's weights are here already.
    next_panel_ = d.num_row_blocks == 1 ? panel_ + d.panels_per_task * pool.num_threads() : panel_;
    if (next_panel_ >= num_panels) next_panel_ = panel_;
    sums_ = static_cast<float*>(
        pool.scratch(thread, ceil_div(d.rows_per_task, kTileRows) * d.panels_per_task * kTileBytes));
  }

  // At most 16 rows, at most four panels.
  void run_stream() {
    configure(x_.rows_per_tile);
    const char *panels[kQuad], *next[kQuad];
    for (int64_t p = 0; p < kQuad; ++p) {
      panels[p] = weights_at(panel_ + min_i64(p, num_panels_ - 1), 0);
      next[p] = weights_at(min_i64(next_panel_ + p, num_work_panels(args_) - 1), 0);
    }
    switch (num_panels_) {
      case 1: stream_tiles<1>(x_, panels, next, sums_); break;
      case 2: stream_tiles<2>(x_, panels, next, sums_); break;
      case 3: stream_tiles<3>(x_, panels, next, sums_); break;
      default: stream_tiles<4>(x_, panels, next, sums_);
    }
    tile_release();
    finish(args_, sums_, kTileSums, kPanelSize, panel_, num_panels_, 0, num_rows_);
  }

  void run_blocks() {
    configure(kTileRows);
    const int64_t num_blocks = ceil_div(x_.num_tiles, kMaxBlockTiles);
    const int64_t block_tiles = ceil_div(x_.num_tiles, num_blocks);
    const int64_t num_quads = ceil_div(num_panels_, kQuad);
    for (int64_t tile = 0; tile < x_.num_tiles; tile += block_tiles) {
      const int64_t tiles = min_i64(block_tiles, x_.num_tiles - tile);
      for (int64_t quad = 0; quad < num_quads; ++quad) {
        if (quad + 1 < num_quads) {
          fetch_quad(panel_ + (quad + 1) * kQuad, tile, tiles);
        } else if (tile + tiles < x_.num_tiles) {
          fetch_quad(panel_, tile + tiles, min_i64(block_tiles, x_.num_tiles - tile - tiles));
        } else {
          fetch_quad(next_panel_, 0, block_tiles);
        }
        run_quad(quad * kQuad, tile, tiles);
      }
    }
    tile_release();
    for (int64_t row_tile = 0; row_tile < num_row_tiles_; ++row_tile) {
      const int64_t row = row_tile * kTileRows;
      finish(args_, sums_at(row_tile, 0), kTileSums, kPanelSize, panel_, num_panels_, first_row_ + row,
             min_i64(kTileRows, num_rows_ - row));
    }
  }

 private:
  static constexpr int64_t kTileSums = 256;

  static void configure(int64_t num_rows) {
    TileConfig config;
    for (int tile = 0; tile < 5; ++tile) config.set(tile, static_cast<int>(num_rows), 64);
    // The second row tile of a block is whole; without one, registers 5 to 7 hold weights.
    for (int tile = 5; tile < 8; ++tile) config.set(tile, 16, 64);
    tile_configure(config);
  }

  const char* weights_at(int64_t panel, int64_t tile) const {
    return static_cast<const char*>(args_.weight) + (packed_panel(args_, panel) * x_.num_tiles + tile) * kTileBytes;
  }
  float* sums_at(int64_t row_tile, int64_t panel) const { return sums_ + (row_tile * num_panels_ + panel) * kTileSums; }

  void fetch_quad(int64_t panel, int64_t tile, int64_t num_tiles) {
    const char* panels[kQuad];
    for (int64_t p = 0; p < kQuad; ++p) panels[p] = weights_at(min_i64(panel + p, num_work_panels(args_) - 1), tile);
    ahead_.start(panels, num_tiles);
  }

  // Four panels (fewer at the end) against all row tiles of the task, over one block of K.
  void run_quad(int64_t panel, int64_t tile, int64_t num_tiles) {
    const int64_t panel_pairs = ceil_div(min_i64(kQuad, num_panels_ - panel), 2);
    const int64_t row_pairs = ceil_div(num_row_tiles_, 2);
    const bool rows_inside = num_row_tiles_ <= 4;
    const int64_t num_steps = panel_pairs * row_pairs;
    // 64 lines for each tile of K to fetch, in as many turns as there are steps: a power of two in each.
    uint32_t lines = 64;
    while (lines > 1 && lines / 2 * num_steps >= 64) lines /= 2;
    Block2x2 block;
    block.num_tiles = num_tiles;
    block.lines = lines;
    block.is_first = tile == 0;
    auto place = [&](int64_t step, int64_t& row_tile, int64_t& first) {
      row_tile = 2 * (rows_inside ? step % row_pairs : step / panel_pairs);
      first = panel + 2 * (rows_inside ? step / row_pairs : step % panel_pairs);
    };
    for (int64_t step = 0; step < num_steps; ++step) {
      int64_t row_tile, first, next_row_tile, next_first;
      place(step, row_tile, first);
      place(min_i64(step + 1, num_steps - 1), next_row_tile, next_first);
      // Inner rows are in level 1 already; otherwise each pair of panels brings one of the next two row tiles.
      const int64_t fetched = row_tile + 2 + (first - panel) / 2;
      block.x_next =
          rows_inside || fetched >= num_row_tiles_ ? nullptr : x_.at(first_row_ / kTileRows + fetched, tile);
      for (int i = 0; i < 2; ++i) {
        const int64_t r = min_i64(row_tile + i, num_row_tiles_ - 1), p = min_i64(first + i, num_panels_ - 1);
        const int64_t next_r = min_i64(next_row_tile + i, num_row_tiles_ - 1);
        block.x[i] = x_.at(first_row_ / kTileRows + r, tile);
        block.weights[i] = weights_at(panel_ + p, tile);
        for (int j = 0; j < 2; ++j) {
          block.sums[i][j] = sums_at(r, min_i64(first + j, num_panels_ - 1));
          block.sums_next[i][j] = sums_at(next_r, min_i64(next_first + j, num_panels_ - 1));
        }
      }
      const bool two_rows = row_tile + 1 < num_row_tiles_, two_panels = first + 1 < num_panels_;
      if (two_rows) {
        two_panels ? block_tiles<2, 2>(block, ahead_) : block_tiles<2, 1>(block, ahead_);
      } else {
        two_panels ? block_tiles<1, 2>(block, ahead_) : block_tiles<1, 1>(block, ahead_);
      }
    }
  }

  const LinearArgs& args_;
  const PackedRows& x_;
  FetchAhead ahead_;
  int64_t panel_, num_panels_, first_row_, num_rows_, num_row_tiles_, next_panel_;
  float* sums_;
};

// See products.h.
class TileProduct {
 public:
  static constexpr int64_t kSerialInputs = 32768;
  static int64_t memory_bytes(const LinearArgs& args) {
    const PackedRows x = rows_of(args, nullptr);
    return ceil_div(args.num_rows, kTileRows) * x.num_tiles * x.rows_per_tile * 64;
  }

  TileProduct(const LinearArgs& args, char* memory, int num_threads) : args_(args), x_(rows_of(args, memory)) {
    division_ = divide(args, num_threads, kTileRowsMax, is_stream() ? kQuad : kTilePanelsMax);
  }

  int64_t num_arranging() const {
    return ceil_div(args_.num_rows, kTileRows) * ceil_div(x_.num_tiles, kPackTiles);
  }
  void arrange(int64_t task) const { pack_tiles(args_, x_, task); }
  int64_t num_tasks() const { return division_.num_tasks(); }
  void run(Pool& pool, int64_t task, int thread) const {
    TileTask run(pool, args_, x_, division_, task, thread);
    is_stream() ? run.run_stream() : run.run_blocks();
  }

 private:
  static PackedRows rows_of(const LinearArgs& args, char* memory) {
    return {memory, min_i64(kTileRows, args.num_rows), ceil_div(args.input_size, kTileDepth)};
  }
  bool is_stream() const { return args_.num_rows <= kTileRows; }

  LinearArgs args_;
  PackedRows x_;
  Division division_;
};

}  // namespace quire::QUIRE_TIER
