// What a thread keeps in memory while it attends, and how it is laid out.
#pragma once

#include "kernels/attention_amx.h"
#include "kernels/attention_fp8.h"
#include "kernels/attention_plan.h"
#include "kernels/attention_tile.h"

namespace quire::QUIRE_TIER {
namespace {

// From row to row of the scores: no multiple of a page of memory, so that rows do not share cache sets.
constexpr int64_t kScoreStride = kSplit + 16;
// Rows whose scores are held at a time.
template <class T>
constexpr int64_t kBlockRows = 8;
#if defined(QUIRE_TIER_AMX) || defined(QUIRE_TIER_AMX_EMULATED)
template <>
constexpr int64_t kBlockRows<bf16> = kTileRows;
#elif defined(QUIRE_TIER_AVX512_BF16)
template <>
constexpr int64_t kBlockRows<bf16> = 4 * kRegisterRows<bf16>;
#endif

// Rows of an item. Queries, results so far and packed keys and values stay in level 2 up to heads of 256.
template <class T>
inline int64_t max_item_rows(const PagedAttentionArgs& args) {
  if (!kHasPairs<T>) return kItemRows;
  return args.cache.head_size <= 128 ? kPackedItemRows : kPackedItemRows / 2;
}

// What a thread needs for one task.
template <class T>
struct Scratch {
  float* query;  // [num_rows][query_stride]
  int64_t query_stride;
  float* maxima;  // [num_rows], and so on: the results so far
  float* sums;
  float* outputs;      // [num_rows][padded head]
  float* scores;       // [kBlockRows][kScoreStride], then the softmax weights
  float* block_maxima;  // of one block and split
  float* block_sums;
  float* block_outputs;
  float* lane_sums;  // [kBlockRows][16]
  // Values of a tile without the tokens that are not seen. Of a cache of codes: keys and values as bfloat16, tile by
  // tile, of a split with several blocks of rows or of one tile.
  T* values;
  T* keys;
  float* packed_keys;  // of a split with several blocks of rows, tile by tile
  float* packed_values;
  AmxScratch amx;
};

template <class U>
inline U* take(char*& memory, int64_t count) {
  U* taken = reinterpret_cast<U*>(memory);
  memory += round_up(count * static_cast<int64_t>(sizeof(U)), 64);
  return taken;
}

// The memory of `scratch`, laid out from `memory` (which may be null); returns its bytes.
template <class T>
int64_t lay_out(const PagedAttentionArgs& args, char* memory, Scratch<T>& scratch) {
  char* const start = memory;
  const int64_t padded = padded_head(args);
  const int64_t num_rows = round_up(item_tokens(args, max_item_rows<T>(args)) * group_size(args), kBlockRows<T>);
  scratch.query_stride = (kHasPairs<T> ? padded / 2 : padded) + 16;
  scratch.query = take<float>(memory, num_rows * scratch.query_stride);
  scratch.maxima = take<float>(memory, num_rows);
  scratch.sums = take<float>(memory, num_rows);
  scratch.outputs = take<float>(memory, num_rows * padded);
  scratch.scores = take<float>(memory, kBlockRows<T> * kScoreStride);
  scratch.block_maxima = take<float>(memory, kBlockRows<T>);
  scratch.block_sums = take<float>(memory, kBlockRows<T>);
  scratch.block_outputs = take<float>(memory, kBlockRows<T> * padded);
  scratch.lane_sums = take<float>(memory, kBlockRows<T> * 16);
  const bool has_codes = is_fp8(args.cache.dtype);
  scratch.values = take<T>(memory, (has_codes ? kSplit : kTile) * args.cache.head_size);
  scratch.keys = take<T>(memory, (has_codes ? kSplit : 0) * args.cache.head_size);
  scratch.packed_keys = take<float>(memory, kHasPairs<T> ? kSplit * round_up(args.cache.head_size, 4) / 2 : 0);
  scratch.packed_values = take<float>(memory, kHasPairs<T> ? kSplit * padded / 2 : 0);
  memory += lay_out_amx(memory, num_rows, args.cache.head_size, scratch.amx);
  return memory - start;
}

}  // namespace
}  // namespace quire::QUIRE_TIER
