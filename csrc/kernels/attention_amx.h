// The inner products of attention by the tile unit, for bfloat16. A page's keys, and its values, are right operands as
// they lie; queries and softmax weights are packed to rows of 64 bytes. In the other tiers nothing but empty stand-ins.
#pragma once

#include "kernels/attention_tile.h"

#if defined(QUIRE_TIER_AMX) || defined(QUIRE_TIER_AMX_EMULATED)
#include "simd/tile.h"
#endif

namespace quire::QUIRE_TIER {
namespace {

template <class T>
constexpr bool kHasAmx = false;

#if defined(QUIRE_TIER_AMX) || defined(QUIRE_TIER_AMX_EMULATED)

template <>
constexpr bool kHasAmx<bf16> = true;
constexpr int64_t kTileRows = 16;
constexpr int64_t kTileBytes = 1024;
constexpr int64_t kWeightStride = 256 + 32;  // elements

struct AmxScratch {
  bf16* query;  // [num_rows][query_stride], zeros past the head
  int64_t query_stride;
  bf16* weights;  // [16][kWeightStride]
  bf16* tile;     // a right operand with zeros where the head ends
};

inline int64_t lay_out_amx(char* memory, int64_t num_rows, int64_t head_size, AmxScratch& scratch) {
  scratch.query_stride = round_up(head_size, kTile) + 32;
  const int64_t query_bytes = round_up(num_rows * scratch.query_stride * 2, 64);
  const int64_t weight_bytes = kTileRows * kWeightStride * 2;
  scratch.query = reinterpret_cast<bf16*>(memory);
  scratch.weights = reinterpret_cast<bf16*>(memory + query_bytes);
  scratch.tile = reinterpret_cast<bf16*>(memory + query_bytes + weight_bytes);
  return query_bytes + weight_bytes + kTileBytes;
}

inline void load_amx_query(const AmxScratch& scratch, int64_t row, const bf16* query, int64_t head_size) {
  bf16* packed = scratch.query + row * scratch.query_stride;
  __builtin_memset(packed, 0, scratch.query_stride * 2);
  __builtin_memcpy(packed, query, head_size * 2);
}
inline void load_amx_query(const AmxScratch&, int64_t, const float*, int64_t) {}

// Tiles 0 .. 3 are sums, 4 the left operand, 5 and 6 right operands.
inline void start_amx(const AmxScratch&, int64_t num_rows) {
  TileConfig config;
  for (int tile = 0; tile <= 4; ++tile) config.set(tile, static_cast<int>(num_rows), 64);
  config.set(5, 16, 64);
  config.set(6, 16, 64);
  tile_configure(config);
}
inline void finish_amx(const AmxScratch&) { tile_release(); }

// `num_rows` rows of `num_bytes` at `p`, the rest of a tile zero.
inline const bf16* padded_tile(bf16* tile, const bf16* p, int64_t stride, int64_t num_rows, int64_t num_bytes) {
  __builtin_memset(tile, 0, kTileBytes);
  for (int64_t i = 0; i < num_rows; ++i) __builtin_memcpy(tile + 32 * i, p + i * stride, num_bytes);
  return tile;
}

// The rows of a tile that is multiplied later, `ahead` bytes from p; 0 = none.
inline void fetch_tile(const bf16* p, int64_t stride, int64_t num_rows, int64_t ahead) {
  if (ahead == 0) return;
  for (int64_t i = 0; i < num_rows; ++i) prefetch_ahead(p + i * stride, ahead);
}

// Tile `Sum` += tile 4 . the tile at p.
template <int Sum>
inline void multiply_tile(const bf16* p, int64_t stride) {
  if constexpr (Sum % 2 == 0) {
    tile_load<5>(p, stride * 2);
    tile_dot_bf16<Sum, 4, 5>();
  } else {
    tile_load<6>(p, stride * 2);
    tile_dot_bf16<Sum, 4, 6>();
  }
}

// Scores of the block's rows with `Columns` * 16 keys.
template <int Columns>
inline void multiply_key_columns(const AmxScratch& scratch, int64_t first_row, const bf16* keys, int64_t block_size,
                                 int64_t head_size, int64_t ahead, float* scores, int64_t score_stride) {
  const bf16* query = scratch.query + first_row * scratch.query_stride;
  const int64_t stride = 2 * block_size;
  tile_zero<0>();
  if constexpr (Columns > 1) tile_zero<1>();
  for (int64_t k = 0; k < head_size; k += kTile) {
    const int64_t num_pairs = min_i64(kTile, head_size - k) / 2;
    const bf16* tile = keys + k / 2 * stride;
    for (int c = 0; c < Columns; ++c) fetch_tile(tile + 32 * c, stride, num_pairs, ahead);
    tile_load<4>(query + k, scratch.query_stride * 2);
    if (num_pairs == 16) {
      multiply_tile<0>(tile, stride);
      if constexpr (Columns > 1) multiply_tile<1>(tile + 32, stride);
    } else {
      multiply_tile<0>(padded_tile(scratch.tile, tile, stride, num_pairs, 64), 32);
      if constexpr (Columns > 1) multiply_tile<1>(padded_tile(scratch.tile, tile + 32, stride, num_pairs, 64), 32);
    }
  }
  tile_store<0>(scores, score_stride * 4);
  if constexpr (Columns > 1) tile_store<1>(scores + 16, score_stride * 4);
}

inline void multiply_keys_amx(const AmxScratch& scratch, int64_t first_row, const bf16* keys, int64_t block_size,
                              int64_t head_size, int64_t num_keys, int64_t ahead, float* scores,
                              int64_t score_stride) {
  int64_t key = 0;
  for (; key + 32 <= num_keys; key += 32) {
    multiply_key_columns<2>(scratch, first_row, keys + 2 * key, block_size, head_size, ahead, scores + key,
                            score_stride);
  }
  if (key < num_keys) {
    multiply_key_columns<1>(scratch, first_row, keys + 2 * key, block_size, head_size, ahead, scores + key,
                            score_stride);
  }
}

inline void store_amx_weights(const AmxScratch& scratch, int64_t row, int64_t column, F16 weights) {
  store(scratch.weights + row * kWeightStride + column, weights);
}

template <int Sum>
inline void add_value_column(const AmxScratch& scratch, const bf16* values, int64_t head_size, int64_t first,
                             int64_t ahead, float* outputs, int64_t output_stride) {
  if (first >= head_size) return;
  const int64_t num = min_i64(16, head_size - first), stride = 2 * head_size;
  const bf16* tile = values + 2 * first;
  fetch_tile(tile, stride, 16, ahead);
  tile_load<Sum>(outputs + first, output_stride * 4);
  if (num == 16) {
    multiply_tile<Sum>(tile, stride);
  } else {
    multiply_tile<Sum>(padded_tile(scratch.tile, tile, stride, 16, num * 4), 32);
  }
  tile_store<Sum>(outputs + first, output_stride * 4);
}

// outputs += weights of 32 tokens . their values.
inline void add_values_amx(const AmxScratch& scratch, int64_t column, const bf16* values, int64_t head_size,
                           int64_t ahead, float* outputs, int64_t output_stride) {
  tile_load<4>(scratch.weights + column, kWeightStride * 2);
  for (int64_t i = 0; i < head_size; i += 64) {
    add_value_column<0>(scratch, values, head_size, i, ahead, outputs, output_stride);
    add_value_column<1>(scratch, values, head_size, i + 16, ahead, outputs, output_stride);
    add_value_column<2>(scratch, values, head_size, i + 32, ahead, outputs, output_stride);
    add_value_column<3>(scratch, values, head_size, i + 48, ahead, outputs, output_stride);
  }
}

#else

struct AmxScratch {};
inline int64_t lay_out_amx(char*, int64_t, int64_t, AmxScratch&) { return 0; }
template <class T>
inline void load_amx_query(const AmxScratch&, int64_t, const T*, int64_t) {}

#endif

}  // namespace
}  // namespace quire::QUIRE_TIER
