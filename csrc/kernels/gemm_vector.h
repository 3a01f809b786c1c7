// Products on vector registers: bfloat16 and float32 weights, every tier.
//
// A register block is R rows of one panel: an even and an odd chain for each row, over one tile (32 inputs), then
// total += even + odd, with the totals in level 1 cache. Activations are widened to float32 beforehand, so that a chain
// step is one multiply-add with a broadcast from memory; weights are widened once for R rows.
// Where the processor multiplies pairs of bfloat16 numbers (avx512_bf16), a step of both chains takes four inputs and one
// instruction each: see simd/bf16_dot.h. Activations are then kept as pairs, 16 words for a tile.
// Few rows (one register block): four panels in turns, a tile of each, are four streams from memory, fetched ahead.
// More rows: blocks of 8 tiles; the weights of a block (8 KB) stay in level 1 while all register blocks pass.
#pragma once

#include "kernels/gemm_epilogue.h"
#include "kernels/gemm_lanes.h"
#include "simd/bf16_dot.h"

namespace quire::QUIRE_TIER {

constexpr int64_t kBlockTiles = 8;
constexpr int64_t kBlockDepth = kBlockTiles * kTileDepth;
constexpr int64_t kVectorRows = 256;   // of a task: their widened block is 256 KB of level 2 cache
constexpr int64_t kVectorPanels = 16;  // of a task
constexpr int64_t kStreams = 4;
constexpr int64_t kStreamRows = kMaxRows < 8 ? kMaxRows : 8;  // more are bound by arithmetic
constexpr int64_t kAheadBytes = 4096;  // of each stream
constexpr int64_t kLine = 64;

// Floats that hold a tile's inputs of one row: widened, or as pairs of bfloat16.
#if defined(QUIRE_TIER_AVX512_BF16)
template <class T>
constexpr int64_t kInputFloats = sizeof(T) == 2 ? kTileDepth / 2 : kTileDepth;
#else
template <class T>
constexpr int64_t kInputFloats = kTileDepth;
#endif

// Both chains of R rows over one tile, for the lanes of a panel from `first` on. Row r of x is at x + r * x_stride.
template <class T, int R>
static inline void chains(const float* x, int64_t x_stride, const T* weights, int first, Lanes* even, Lanes* odd) {
#pragma GCC unroll 4
  for (int pair = 0; pair < kTileDepth / 2; ++pair) {
    Lanes even_weights, odd_weights;
    load_pair(weights, pair, first, even_weights, odd_weights);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const float* inputs = x + r * x_stride + 2 * pair;
      even[r] = chain<T>(lanes_of(inputs[0]), even_weights, even[r]);
      odd[r] = chain<T>(lanes_of(inputs[1]), odd_weights, odd[r]);
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

// totals[r][16] += x[r] . weights over num_tiles tiles. Row r of x is at x + r * kBlockTiles * kInputFloats.
// Meanwhile `lines` cache lines for each tile are fetched, from `ahead` on.
template <class T, int R>
static void dot_tiles(const float* x, const T* weights, int64_t num_tiles, float* totals, const char* ahead,
                      int64_t lines) {
  // One or two rows in wide registers take weights as fast as they come: fetching every line ourselves then crowds out
  // the processor's own prefetching (1.2 times slower at one row on Zen 4: bench_linear.py --rows 1 --threads 1).
  constexpr int64_t kEvery = R <= 2 && kLanes == 16 ? 2 : 1;
  constexpr int64_t kStride = kBlockTiles * kInputFloats<T>;
  for (int64_t tile = 0; tile < num_tiles; ++tile, x += kInputFloats<T>, weights += kTileSize) {
    for (int64_t line = 0; line < lines; line += kEvery) prefetch_l2(ahead + line * kLine);
    ahead += lines * kLine;
    for (int first = 0; first < kPanelSize; first += kLanes) {
      Lanes even[R], odd[R];
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) even[r] = odd[r] = lanes_of(0.0f);
#if defined(QUIRE_TIER_AVX512_BF16)
      if constexpr (sizeof(T) == 2) {
        chains_of_pairs<R>(x, kStride, weights, even, odd);
      } else {
        chains<T, R>(x, kStride, weights, first, even, odd);
      }
#else
      chains<T, R>(x, kStride, weights, first, even, odd);
#endif
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        float* total = totals + r * kPanelSize + first;
        lanes_store(total, lanes_add(lanes_load(total), lanes_add(even[r], odd[r])));
      }
    }
  }
}

#if defined(QUIRE_TIER_AVX512_BF16)

constexpr int64_t kPairRows = 6;  // of a register block that spans two panels

constexpr int64_t kPairTileFloats = kTileSize;  // of two panels' tile, as pairs: [8 steps][2 panels][2 chains][16]

// Two panels' tiles as the chains take them, once for all rows of a task.
static inline void arrange_pairs(const bf16* weights, int64_t panel_stride, int64_t num_tiles, float* out) {
  for (int64_t step = 0; step < num_tiles * kTileDepth / 4; ++step, weights += 64, out += 64) {
#pragma GCC unroll 2
    for (int p = 0; p < 2; ++p) {
      F16 even, odd;
      load_chain_pairs(weights + p * panel_stride, weights + p * panel_stride + 32, even, odd);
      store(out + 32 * p, even);
      store(out + 32 * p + 16, odd);
    }
  }
}

// As `dot_tiles`, for two panels at once: a pair of inputs is broadcast once for both, or loads would bound the rate.
template <int R>
static void dot_two_panels(const float* x, const float* weights, int64_t num_tiles, float* totals,
                           int64_t totals_stride, const char* ahead, int64_t lines) {
  constexpr int64_t kStride = kBlockTiles * kInputFloats<bf16>;
  for (int64_t tile = 0; tile < num_tiles; ++tile, x += kInputFloats<bf16>, weights += kPairTileFloats) {
    for (int64_t line = 0; line < lines; ++line, ahead += kLine) prefetch_l2(ahead);
    F16 even[R][2], odd[R][2];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) even[r][0] = even[r][1] = odd[r][0] = odd[r][1] = zero();
#pragma GCC unroll 2
    for (int step = 0; step < kTileDepth / 4; ++step) {
      F16 even_weights[2], odd_weights[2];
#pragma GCC unroll 2
      for (int p = 0; p < 2; ++p) {
        even_weights[p] = load(weights + step * 64 + p * 32);
        odd_weights[p] = load(weights + step * 64 + p * 32 + 16);
      }
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r) {
        const float* inputs = x + r * kStride + 2 * step;
        const F16 even_inputs = set1(inputs[0]), odd_inputs = set1(inputs[1]);
#pragma GCC unroll 2
        for (int p = 0; p < 2; ++p) {
          even[r][p] = add_chain_pairs(even_inputs, even_weights[p], even[r][p]);
          odd[r][p] = add_chain_pairs(odd_inputs, odd_weights[p], odd[r][p]);
        }
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
#pragma GCC unroll 2
      for (int p = 0; p < 2; ++p) {
        float* total = totals + p * totals_stride + r * kPanelSize;
        store(total, load(total) + (even[r][p] + odd[r][p]));
      }
    }
  }
}

using DotTwoPanels = void (*)(const float*, const float*, int64_t, float*, int64_t, const char*, int64_t);

static DotTwoPanels dot_two_panels_of(int64_t num_rows) {
  switch (num_rows) {
    case 1: return dot_two_panels<1>;
    case 2: return dot_two_panels<2>;
    case 3: return dot_two_panels<3>;
    case 4: return dot_two_panels<4>;
    case 5: return dot_two_panels<5>;
    default: return dot_two_panels<6>;
  }
}

#endif

template <class T>
using DotTiles = void (*)(const float*, const T*, int64_t, float*, const char*, int64_t);

template <class T>
static DotTiles<T> dot_tiles_of(int64_t num_rows) {
  switch (num_rows) {
    case 1: return dot_tiles<T, 1>;
    case 2: return dot_tiles<T, 2>;
    case 3: return dot_tiles<T, 3>;
    case 4: return dot_tiles<T, 4>;
    case 5: return dot_tiles<T, 5>;
    case 6: return dot_tiles<T, 6>;
#if defined(QUIRE_SIMD_AVX512)
    case 7: return dot_tiles<T, 7>;
    case 8: return dot_tiles<T, 8>;
    case 9: return dot_tiles<T, 9>;
    case 10: return dot_tiles<T, 10>;
    default: return dot_tiles<T, 11>;
#else
    default: return dot_tiles<T, 6>;
#endif
  }
}

#if defined(QUIRE_TIER_AVX512_BF16)

// Of 32 inputs, the pairs of the even and of the odd chain in turns: (2, 0), (3, 1), (6, 4), (7, 5), ...
static inline void store_pairs(float* out, __m512i inputs) {
  const __m512i even = _mm512_and_si512(inputs, _mm512_set1_epi32(0xffff)), odd = _mm512_srli_epi32(inputs, 16);
  const __m512i next_even = _mm512_srli_epi64(even, 32), next_odd = _mm512_srli_epi64(odd, 32);
  // In every 64 bits: low word (even pair) = even << 16 | next even, high word = odd << 16 | next odd.
  const __m512i low = _mm512_or_si512(_mm512_slli_epi32(even, 16), next_even);
  const __m512i high = _mm512_or_si512(_mm512_slli_epi32(odd, 16), next_odd);
  _mm512_storeu_si512(out, _mm512_mask_blend_epi32(0xaaaa, low, _mm512_slli_epi64(high, 32)));
}

#endif

// One row's inputs of up to a tile as the chains take them; missing ones are zero.
template <class T>
static inline void store_inputs(const T* x, int64_t n, float* out) {
#if defined(QUIRE_TIER_AVX512_BF16)
  if constexpr (sizeof(T) == 2) {
    const __mmask32 lanes = n >= 32 ? 0xffffffffu : (1u << n) - 1;
    store_pairs(out, _mm512_maskz_loadu_epi16(lanes, x));
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

// wide[r][kBlockTiles][kInputFloats] = x[first_row + r] from input `first` on, `depth` of them, then zeros up to a whole
// tile.
template <class T>
static void widen_block(const LinearArgs& args, int64_t first_row, int64_t num_rows, int64_t first, int64_t depth,
                        float* wide) {
  const T* x = static_cast<const T*>(args.x) + first_row * args.x_stride + first;
  for (int64_t row = 0; row < num_rows; ++row, x += args.x_stride, wide += kBlockTiles * kInputFloats<T>) {
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
    const int64_t wide_size = d.rows_per_task * kBlockDepth;
    const int64_t totals_size = d.panels_per_task * d.rows_per_task * kPanelSize;
    wide_ = static_cast<float*>(pool.scratch(thread, (wide_size + totals_size + kBlockTiles * kTileSize) * 4));
    totals_ = wide_ + wide_size;
    pairs_ = totals_ + totals_size;
  }

  void run() {
    __builtin_memset(totals_, 0, num_panels_ * num_rows_ * kPanelSize * 4);
    for (int64_t tile = 0; tile < num_tiles_; tile += kBlockTiles) {
      const int64_t first = tile * kTileDepth;
      widen_block<T>(args_, first_row_, num_rows_, first, min_i64(kBlockDepth, args_.input_size - first), wide_);
      const int64_t tiles = min_i64(kBlockTiles, num_tiles_ - tile);
      if (num_rows_ <= kStreamRows) {
        stream(tile, tiles);
      } else {
        block(tile, tiles);
      }
    }
    finish(args_, totals_, num_rows_ * kPanelSize, kPanelSize, panel_, num_panels_, first_row_, num_rows_);
  }

 private:
  const T* tile_at(int64_t panel, int64_t tile) const {
    return static_cast<const T*>(args_.weight) + (packed_panel(args_, panel) * num_tiles_ + tile) * kTileSize;
  }

  // The tile that its stream reads kAheadBytes after this one; past its end, the one of the task after the next ones.
  const char* ahead_of(int64_t panel, int64_t tile) const {
    constexpr int64_t kAhead = kAheadBytes / (kTileSize * sizeof(T));
    if (tile + kAhead < num_tiles_) return reinterpret_cast<const char*>(tile_at(panel, tile + kAhead));
    const int64_t next = min_i64(next_panel_ + panel - panel_, num_work_panels(args_) - 1);
    return reinterpret_cast<const char*>(tile_at(next, max_i64(0, tile + kAhead - num_tiles_) % num_tiles_));
  }

  void stream(int64_t first_tile, int64_t num_tiles) {
    const DotTiles<T> dot = dot_tiles_of<T>(num_rows_);
    for (int64_t tile = 0; tile < num_tiles; ++tile) {
      for (int64_t p = 0; p < num_panels_; ++p) {
        dot(wide_ + tile * kInputFloats<T>, tile_at(panel_ + p, first_tile + tile), 1, totals_ + p * num_rows_ * kPanelSize,
            ahead_of(panel_ + p, first_tile + tile), kTileSize * sizeof(T) / kLine);
      }
    }
  }

  void block(int64_t tile, int64_t tiles) {
#if defined(QUIRE_TIER_AVX512_BF16)
    if constexpr (sizeof(T) == 2) {
      int64_t p = 0;
      for (; p + 2 <= num_panels_; p += 2) block_of_two(p, tile, tiles);
      if (p < num_panels_) block_of_one(p, tile, tiles);
      return;
    }
#endif
    for (int64_t p = 0; p < num_panels_; ++p) block_of_one(p, tile, tiles);
  }

#if defined(QUIRE_TIER_AVX512_BF16)

  void block_of_two(int64_t p, int64_t tile, int64_t tiles) {
    const int64_t num_blocks = ceil_div(num_rows_, kPairRows);
    const int64_t lines = ceil_div(2 * kTileSize * sizeof(T) / kLine, num_blocks);
    const bool is_last = p + 2 >= num_panels_;
    const int64_t next_tile = min_i64(is_last ? tile + kBlockTiles : tile, num_tiles_ - tiles);
    const char* next = reinterpret_cast<const char*>(tile_at(is_last ? panel_ : panel_ + p + 2, next_tile));
    const int64_t panel_stride = tile_at(panel_ + p + 1, tile) - tile_at(panel_ + p, tile);
    arrange_pairs(tile_at(panel_ + p, tile), panel_stride, tiles, pairs_);
    for (int64_t i = 0; i < num_blocks; ++i) {
      const int64_t row = i * num_rows_ / num_blocks, rows = (i + 1) * num_rows_ / num_blocks - row;
      // The first half of the blocks fetches the next pair's first panel, the others its second.
      const int64_t done = i * lines * tiles * kLine, panel_bytes = tiles * kTileSize * sizeof(T);
      const char* ahead = done < panel_bytes ? next + done : next + panel_stride * sizeof(T) + done - panel_bytes;
      dot_two_panels_of(rows)(wide_ + row * kBlockTiles * kInputFloats<T>, pairs_, tiles,
                              totals_ + (p * num_rows_ + row) * kPanelSize, num_rows_ * kPanelSize, ahead, lines);
    }
  }

#endif

  void block_of_one(int64_t p, int64_t tile, int64_t tiles) {
    const int64_t num_blocks = ceil_div(num_rows_, kMaxRows);
    const int64_t lines = ceil_div(kTileSize * sizeof(T) / kLine, num_blocks);
    const T* weights = tile_at(panel_ + p, tile);
    const bool is_last = p + 1 == num_panels_;
    const int64_t next_tile = min_i64(is_last ? tile + kBlockTiles : tile, num_tiles_ - tiles);
    const char* next = reinterpret_cast<const char*>(tile_at(is_last ? panel_ : panel_ + p + 1, next_tile));
    for (int64_t i = 0; i < num_blocks; ++i) {
      // Blocks differ by one row at most.
      const int64_t row = i * num_rows_ / num_blocks, rows = (i + 1) * num_rows_ / num_blocks - row;
      dot_tiles_of<T>(rows)(wide_ + row * kBlockTiles * kInputFloats<T>, weights, tiles,
                            totals_ + (p * num_rows_ + row) * kPanelSize, next + i * lines * tiles * kLine, lines);
    }
  }

  const LinearArgs& args_;
  int64_t num_tiles_, panel_, num_panels_, first_row_, num_rows_, next_panel_;
  float *wide_, *totals_, *pairs_;
};

template <class T>
static void linear_vector(Pool& pool, const LinearArgs& args) {
  const bool is_stream = args.num_rows <= kStreamRows;
  const Division d = divide(args, pool.num_threads(), kVectorRows, is_stream ? kStreams : kVectorPanels);
  parallel_for(pool, d.num_tasks(), [&](int64_t task, int thread) {
    VectorTask<T>(pool, args, d, task, thread).run();
  });
}

}  // namespace quire::QUIRE_TIER
