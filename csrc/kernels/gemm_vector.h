// Products on vector registers: bfloat16 and float32 weights, every tier.
//
// A register block is R rows of one panel: an even and an odd chain for each row, over one tile (32 inputs), then
// total += even + odd, with the totals in level 1 cache. Activations are widened to float32 beforehand, so that a chain
// step is one multiply-add with a broadcast from memory; weights are widened once for R rows.
// Where the processor multiplies pairs of bfloat16 numbers (avx512_bf16), a step of both chains takes four inputs and
// one instruction each: see simd/bf16_dot.h. Activations are then kept as pairs, 16 words for a tile. More rows than are
// bound by memory are gemm_pairs.h's.
// Few rows (one register block): panels one after the other, from end to end: one stream from memory, fetched ahead. Each
// panel follows the one before, so a task's weights are read in the order in which they lie.
// More rows: blocks of 8 tiles; the weights of a block (8 KB) stay in level 1 while all register blocks pass.
#pragma once

#include <cstddef>
#include <utility>

#include "kernels/gemm_epilogue.h"
#include "kernels/gemm_lanes.h"
#include "kernels/products.h"
#include "simd/bf16_dot.h"

namespace quire::QUIRE_TIER {

constexpr int64_t kBlockTiles = 8;
constexpr int64_t kBlockDepth = kBlockTiles * kTileDepth;
constexpr int64_t kVectorRows = 256;   // of a task: their widened block is 256 KB of level 2 cache
constexpr int64_t kVectorPanels = 16;  // of a task
constexpr int64_t kStreamPanels = 4;   // of a task with few rows
constexpr int64_t kStreamRows = kMaxRows < 8 ? kMaxRows : 8;  // more are bound by arithmetic
constexpr int64_t kAheadBytes = 4096;

// Floats that hold a tile's inputs of one row: widened, or as pairs of bfloat16.
#if defined(QUIRE_TIER_AVX512_BF16)
template <class T>
constexpr int64_t kInputFloats = sizeof(T) == 2 ? kTileDepth / 2 : kTileDepth;
#else
template <class T>
constexpr int64_t kInputFloats = kTileDepth;
#endif

// Both chains of R rows over one tile, for W registers of a panel's lanes from `first` on. Row r of x is at
// x + r * x_stride.
template <class T, int R, int W>
static inline void chains(const float* x, int64_t x_stride, const T* weights, int first, Lanes (*even)[R],
                          Lanes (*odd)[R]) {
#pragma GCC unroll 4
  for (int pair = 0; pair < kTileDepth / 2; ++pair) {
#pragma GCC unroll 2
    for (int w = 0; w < W; ++w) {
      Lanes even_weights, odd_weights;
      load_pair(weights, pair, first + w * kLanes, even_weights, odd_weights);
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const float* inputs = x + r * x_stride + 2 * pair;
        even[w][r] = chain<T>(lanes_of(inputs[0]), even_weights, even[w][r]);
        odd[w][r] = chain<T>(lanes_of(inputs[1]), odd_weights, odd[w][r]);
      }
    }
  }
}

#if defined(QUIRE_TIER_AVX512_BF16)

template <int R>
static inline void chains_of_pairs(const float* x, int64_t x_stride, const bf16* weights, Lanes* even, Lanes* odd) {
#pragma GCC unroll 2
  for (int step = 0; step < kTileDepth / 4; ++step) {
    F16 even_weights, odd_weights;
    load_chain_pairs(weights + step * 64, weights + step * 64 + 32, even_weights, odd_weights);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const float* inputs = x + r * x_stride + 2 * step;
      even[r] = add_chain_pairs({lanes_of(inputs[0])}, even_weights, {even[r]}).v;
      odd[r] = add_chain_pairs({lanes_of(inputs[1])}, odd_weights, {odd[r]}).v;
    }
  }
}

#endif

// One chain of R rows over a tile: that of the first inputs of pairs (I = 0), or of the second. Inputs are broadcast once
// for W registers, and half as many registers hold sums.
template <class T, int R, int W, int I>
static inline void one_chain(const float* x, int64_t x_stride, const T* weights, int first, Lanes (&sums)[W][R]) {
#pragma GCC unroll 4
  for (int pair = 0; pair < kTileDepth / 2; ++pair) {
    Lanes of_pair[W];
#pragma GCC unroll 2
    for (int w = 0; w < W; ++w) of_pair[w] = load_one<I>(weights, pair, first + w * kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const Lanes input = lanes_of(x[r * x_stride + 2 * pair + I]);
#pragma GCC unroll 2
      for (int w = 0; w < W; ++w) sums[w][r] = chain<T>(input, of_pair[w], sums[w][r]);
    }
  }
}

// sums[w][r] = both chains of a tile, added. The arguments are those of `chains`.
template <class T, int R, int W>
[[gnu::always_inline]] static inline void dot_tile(const float* x, int64_t x_stride, const T* weights, int first,
                                                   Lanes (&sums)[W][R]) {
  Lanes even[W][R], odd[W][R];
#pragma GCC unroll 2
  for (int w = 0; w < W; ++w) {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) even[w][r] = odd[w][r] = lanes_of(0.0f);
  }
#if defined(QUIRE_TIER_AVX512_BF16)
  if constexpr (sizeof(T) == 2) {
    static_assert(W == 1, "a register holds all lanes of a panel");
    chains_of_pairs<R>(x, x_stride, weights, even[0], odd[0]);
  } else {
    chains<T, R, W>(x, x_stride, weights, first, even, odd);
  }
#else
  if constexpr (W == 2 && R > 2) {
    one_chain<T, R, W, 0>(x, x_stride, weights, first, even);
    one_chain<T, R, W, 1>(x, x_stride, weights, first, odd);
  } else {
    chains<T, R, W>(x, x_stride, weights, first, even, odd);
  }
#endif
#pragma GCC unroll 2
  for (int w = 0; w < W; ++w) {
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) sums[w][r] = lanes_add(even[w][r], odd[w][r]);
  }
}

// Registers of outputs side by side: both of a panel that is two wide. One row or two would have too few chains otherwise
// to hide the latency of a multiply-add; three and four compute one chain after the other, which leaves registers for
// two, so that these share what is broadcast.
constexpr int kWide = kPanelSize == 2 * kLanes ? 2 : 1;

// totals[r][16] += x[r] . weights over num_tiles tiles. Row r of x is at x + r * kBlockTiles * kInputFloats.
// Meanwhile `lines` cache lines for each tile are fetched, from `ahead` on.
template <class T, int R>
static void dot_tiles(const float* x, const T* weights, int64_t num_tiles, float* totals, const char* ahead,
                      int64_t lines) {
  constexpr int64_t kStride = kBlockTiles * kInputFloats<T>;
  constexpr int W = kWide;
  for (int64_t tile = 0; tile < num_tiles; ++tile, x += kInputFloats<T>, weights += kTileSize) {
    for (int64_t line = 0; line < lines; ++line) prefetch_l2(ahead + line * kCacheLine);
    ahead += lines * kCacheLine;
    for (int first = 0; first < kPanelSize; first += W * kLanes) {
      Lanes sums[W][R];
      dot_tile(x, kStride, weights, first, sums);
#pragma GCC unroll 2
      for (int w = 0; w < W; ++w) {
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
          float* total = totals + r * kPanelSize + first + w * kLanes;
          lanes_store(total, lanes_add(lanes_load(total), sums[w][r]));
        }
      }
    }
  }
}

// totals[r][16] = x[r] . weights over a whole panel, whose tiles follow each other. Of every tile x has the inputs of R
// rows. Weights are fetched kAheadBytes ahead; past the end of the panel, those at `next`.
// Where not all lanes of a panel pass at once, they pass over parts of kAheadBytes, each fetching its share of the next
// part: memory is read all the time, and a part is in level 1 when it passes again.
template <class T, int R>
static void dot_panel(const float* x, const T* weights, int64_t num_tiles, float* totals, const T* next) {
  constexpr int64_t kAheadTiles = kAheadBytes / (kTileSize * sizeof(T));
  constexpr int W = kWide;
  constexpr int64_t kFetched = kTileSize * W * kLanes / kPanelSize;  // of a tile, in a pass
  const int64_t part_tiles = W * kLanes == kPanelSize ? num_tiles : kAheadTiles;
  for (int64_t begin = 0; begin < num_tiles; begin += part_tiles) {
    const int64_t end = min_i64(begin + part_tiles, num_tiles);
    for (int first = 0; first < kPanelSize; first += W * kLanes) {
      const float* inputs = x + begin * R * kInputFloats<T>;
      const T* tiles = weights + begin * kTileSize;
      Lanes sums[W][R];
#pragma GCC unroll 2
      for (int w = 0; w < W; ++w) {
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) {
          sums[w][r] = begin == 0 ? lanes_of(0.0f) : lanes_load(totals + r * kPanelSize + first + w * kLanes);
        }
      }
      for (int64_t tile = begin; tile < end; ++tile, inputs += R * kInputFloats<T>, tiles += kTileSize) {
        const int64_t left = num_tiles - tile;
        const T* ahead = left > kAheadTiles ? tiles + kAheadTiles * kTileSize : next + (kAheadTiles - left) * kTileSize;
        ahead += first * kTileSize / kPanelSize;
        for (int64_t i = 0; i < kFetched; i += kCacheLine / sizeof(T)) prefetch_l1(ahead + i);
        Lanes of_tile[W][R];
        dot_tile(inputs, kInputFloats<T>, tiles, first, of_tile);
#pragma GCC unroll 2
        for (int w = 0; w < W; ++w) {
#pragma GCC unroll 16
          for (int r = 0; r < R; ++r) sums[w][r] = lanes_add(sums[w][r], of_tile[w][r]);
        }
      }
#pragma GCC unroll 2
      for (int w = 0; w < W; ++w) {
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r) lanes_store(totals + r * kPanelSize + first + w * kLanes, sums[w][r]);
      }
    }
  }
}

template <class T>
using DotPanel = void (*)(const float*, const T*, int64_t, float*, const T*);

template <class T, std::size_t... R>
static DotPanel<T> dot_panel_of(int64_t num_rows, std::index_sequence<R...>) {
  static constexpr DotPanel<T> kOf[] = {dot_panel<T, R + 1>...};
  return kOf[num_rows - 1];
}

// At most kStreamRows.
template <class T>
static DotPanel<T> dot_panel_of(int64_t num_rows) {
  return dot_panel_of<T>(num_rows, std::make_index_sequence<kStreamRows>());
}

template <class T>
using DotTiles = void (*)(const float*, const T*, int64_t, float*, const char*, int64_t);

template <class T, std::size_t... R>
static DotTiles<T> dot_tiles_of(int64_t num_rows, std::index_sequence<R...>) {
  static constexpr DotTiles<T> kOf[] = {dot_tiles<T, R + 1>...};
  return kOf[num_rows - 1];
}

// At most kMaxRows.
template <class T>
static DotTiles<T> dot_tiles_of(int64_t num_rows) {
  return dot_tiles_of<T>(num_rows, std::make_index_sequence<kMaxRows>());
}

// One row's inputs of up to a tile as the chains take them; missing ones are zero.
template <class T>
static inline void store_inputs(const T* x, int64_t n, float* out) {
#if defined(QUIRE_TIER_AVX512_BF16)
  if constexpr (sizeof(T) == 2) {
    store_chain_pairs(out, x, n);
    return;
  }
#endif
  if (n >= kTileDepth) {
    store(out, load(x));
    store(out + 16, load(x + 16));
  } else {
    store(out, load_n(x, min_i64(n, 16)));
    store(out + 16, load_n(x + min_i64(n, 16), max_i64(0, n - 16)));
  }
}

// wide[r][kBlockTiles][kInputFloats] = the inputs of row first_row + r from input `first` on, `depth` of them, then zeros
// up to a whole tile.
template <class T>
static void widen_block(const LinearArgs& args, int64_t first_row, int64_t num_rows, int64_t first, int64_t depth,
                        float* wide) {
  for (int64_t row = 0; row < num_rows; ++row, wide += kBlockTiles * kInputFloats<T>) {
    const T* x = static_cast<const T*>(args.x) + x_row(args, first_row + row) * args.x_stride + first;
    for (int64_t i = 0; i < depth; i += kTileDepth) {
      store_inputs(x + i, min_i64(kTileDepth, depth - i), wide + i / kTileDepth * kInputFloats<T>);
    }
  }
}

template <class T>
class VectorTask {
 public:
  VectorTask(Pool& pool, const LinearArgs& args, const Division& d, int64_t task, int thread) : args_(args) {
    num_tiles_ = ceil_div(args.input_size, kTileDepth);
    panel_ = task / d.num_row_blocks * d.panels_per_task;
    num_panels_ = min_i64(d.panels_per_task, num_work_panels(args) - panel_);
    first_row_ = task % d.num_row_blocks * d.rows_per_task;
    num_rows_ = min_i64(d.rows_per_task, args.num_rows - first_row_);
    next_panel_ = min_i64(panel_ + num_panels_ * pool.num_threads(), num_work_panels(args) - 1);
    is_stream_ = num_rows_ <= kStreamRows;
    const int64_t wide_size = d.rows_per_task * (is_stream_ ? num_tiles_ * kTileDepth : kBlockDepth);
    const int64_t totals_size = d.panels_per_task * d.rows_per_task * kPanelSize;
    wide_ = static_cast<float*>(pool.scratch(thread, (wide_size + totals_size) * 4));
    totals_ = wide_ + wide_size;
  }

  void run() {
    if (is_stream_) {
      stream();
    } else {
      __builtin_memset(totals_, 0, num_panels_ * num_rows_ * kPanelSize * 4);
      for (int64_t tile = 0; tile < num_tiles_; tile += kBlockTiles) {
        const int64_t first = tile * kTileDepth;
        widen_block<T>(args_, first_row_, num_rows_, first, min_i64(kBlockDepth, args_.input_size - first), wide_);
        block(tile, min_i64(kBlockTiles, num_tiles_ - tile));
      }
    }
    finish(args_, totals_, num_rows_ * kPanelSize, kPanelSize, panel_, num_panels_, first_row_, num_rows_);
  }

 private:
  const T* tile_at(int64_t panel, int64_t tile) const {
    return static_cast<const T*>(args_.weight) + (packed_panel(args_, panel) * num_tiles_ + tile) * kTileSize;
  }

  void stream() {
    widen_tiles();
    const DotPanel<T> dot = dot_panel_of<T>(num_rows_);
    // Gates and ups are panels in turns, but lie apart: those of one kind first.
    const int64_t step = args_.is_gated ? 2 : 1;
    for (int64_t kind = 0; kind < step; ++kind) {
      for (int64_t p = kind; p < num_panels_; p += step) {
        const bool is_last = p + step >= num_panels_;
        const int64_t after = !is_last ? panel_ + p + step : kind + 1 < step ? panel_ + kind + 1 : next_panel_;
        dot(wide_, tile_at(panel_ + p, 0), num_tiles_, totals_ + p * num_rows_ * kPanelSize, tile_at(after, 0));
      }
    }
  }

  // wide_[tile][row][kInputFloats]
  void widen_tiles() {
    for (int64_t row = 0; row < num_rows_; ++row) {
      const T* x = static_cast<const T*>(args_.x) + x_row(args_, first_row_ + row) * args_.x_stride;
      float* out = wide_ + row * kInputFloats<T>;
      for (int64_t i = 0; i < args_.input_size; i += kTileDepth, out += num_rows_ * kInputFloats<T>) {
        store_inputs(x + i, min_i64(kTileDepth, args_.input_size - i), out);
      }
    }
  }

  void block(int64_t tile, int64_t tiles) {
    for (int64_t p = 0; p < num_panels_; ++p) block_of_panel(p, tile, tiles);
  }

  void block_of_panel(int64_t p, int64_t tile, int64_t tiles) {
    const int64_t num_blocks = ceil_div(num_rows_, kMaxRows);
    const int64_t lines = ceil_div(kTileSize * sizeof(T) / kCacheLine, num_blocks);
    const T* weights = tile_at(panel_ + p, tile);
    const bool is_last = p + 1 == num_panels_;
    const int64_t next_tile = min_i64(is_last ? tile + kBlockTiles : tile, num_tiles_ - tiles);
    const char* next = reinterpret_cast<const char*>(tile_at(is_last ? panel_ : panel_ + p + 1, next_tile));
    for (int64_t i = 0; i < num_blocks; ++i) {
      // Blocks differ by one row at most.
      const int64_t row = i * num_rows_ / num_blocks, rows = (i + 1) * num_rows_ / num_blocks - row;
      dot_tiles_of<T>(rows)(wide_ + row * kBlockTiles * kInputFloats<T>, weights, tiles,
                            totals_ + (p * num_rows_ + row) * kPanelSize, next + i * lines * tiles * kCacheLine, lines);
    }
  }

  const LinearArgs& args_;
  int64_t num_tiles_, panel_, num_panels_, first_row_, num_rows_, next_panel_;
  bool is_stream_;
  float *wide_, *totals_;
};

// See products.h. Tasks widen their inputs themselves.
template <class T>
class VectorProduct {
 public:
  static constexpr int64_t kSerialInputs = 0;
  static int64_t memory_bytes(const LinearArgs&) { return 0; }

  VectorProduct(const LinearArgs& args, char*, int num_threads) : args_(args) {
    const bool is_stream = args.num_rows <= kStreamRows;
    division_ = divide(args, num_threads, kVectorRows, is_stream ? kStreamPanels : kVectorPanels);
  }

  int64_t num_arranging() const { return 0; }
  void arrange(int64_t) const {}
  int64_t num_tasks() const { return division_.num_tasks(); }
  void run(Pool& pool, int64_t task, int thread) const { VectorTask<T>(pool, args_, division_, task, thread).run(); }

 private:
  LinearArgs args_;
  Division division_;
};

}  // namespace quire::QUIRE_TIER
