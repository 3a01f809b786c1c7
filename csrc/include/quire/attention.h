// Paged attention, and what writes its pages.
#pragma once

#include "quire/pool.h"
#include "quire/types.h"

namespace quire {

// Keys and values of one layer: [num_blocks][num_kv_heads][keys, values][block_size * head_size], contiguous.
// bf16: the keys of a page are [head_size / 2][block_size][2], its values [block_size / 2][head_size][2], so that both
// are the right operand of a product in pairs as they lie. f32: [head_size][block_size] and [block_size][head_size].
struct KvCache {
  void* data;
  int64_t num_blocks;
  int64_t num_kv_heads;
  int64_t block_size;  // a multiple of 16
  int64_t head_size;   // even, at most kMaxHeadSize
  DType dtype;         // bf16 or f32, of every activation too; f8e4m3 or f8e5m2: laid out as bf16, activations are bf16

  DType activation_dtype() const { return dtype == DType::f32 ? DType::f32 : DType::bf16; }
};

constexpr int64_t kMaxHeadSize = 512;

// Rows of a step: request i owns query_start_loc[i] .. query_start_loc[i + 1] - 1, its newest tokens.
struct PagedAttentionArgs {
  const void* query;     // [num_tokens][num_heads][head_size]
  int64_t query_stride;  // elements from token to token
  void* out;             // [num_tokens][num_heads][head_size], contiguous; rows of no request become zero
  KvCache cache;
  const int32_t* block_table;  // [num_reqs][max_blocks]
  int64_t max_blocks;
  const int32_t* query_start_loc;
  const int32_t* seq_lens;
  int64_t num_reqs;
  int64_t num_tokens;
  int64_t num_heads;
  float scale;
  int64_t window;       // tokens a query sees, itself included; 0 = all
  float soft_cap;       // 0 = none
  const float* sinks;   // [num_heads] or null
  const float* slopes;  // [num_heads] or null
  int64_t chunk = 0;    // a query sees the tokens of its own chunk, so many from position 0; 0 = all
};

// The first token that the query at `position` sees. Static: every tier has its own.
static inline int64_t oldest_seen(const PagedAttentionArgs& args, int64_t position) {
  const int64_t of_window = args.window > 0 ? position - args.window + 1 : 0;
  return max_i64(of_window, args.chunk > 0 ? position - position % args.chunk : 0);
}

struct RopeAndCacheArgs {
  // [num_tokens][num_heads + 2 * num_kv_heads][head_size], or without keys and values the query heads alone; queries
  // are changed in place.
  void* qkv;
  int64_t qkv_stride;
  int64_t num_tokens;
  int64_t num_heads;
  const float* cos;  // [max_positions][half]
  const float* sin;
  int64_t max_positions;
  int64_t half;           // rotated elements / 2; 0 = none
  const void* positions;  // null where nothing asks for them
  bool are_positions_wide;      // int64, else int32
  const int64_t* slots;        // page * block_size + offset; negative = not written
  const void* q_norm;          // [head_size] or null; with are_norms_whole [num_heads][head_size]
  const void* k_norm;
  float eps;
  KvCache cache;
  const void* v_norm = nullptr;         // [head_size] or null
  bool are_norms_last = false;          // queries and keys are normalised after they are rotated
  bool are_norms_whole = false;         // one mean over all query heads of a token, one over its key heads
  bool has_kv = true;                   // false: nothing is written
  const float* query_scales = nullptr;  // [max_positions] or null: factors on queries, at last
  bool are_norms_centered = false;  // the mean of each head is subtracted first; q_norm is [num_heads][head_size]
  float limit = 0.0f;  // queries, keys and values are cut at -limit and limit, between norms and rotation; 0 = not
};

// Whether every head has gains of its own.
static inline bool has_gains_of_heads(const RopeAndCacheArgs& args) {
  return args.are_norms_whole || args.are_norms_centered;
}

static inline bool needs_positions(const RopeAndCacheArgs& args) {
  return args.half > 0 || args.query_scales != nullptr;
}

struct WriteKvArgs {
  const void* key;  // [num_tokens][num_kv_heads][head_size]
  const void* value;
  int64_t key_stride;
  int64_t value_stride;
  int64_t num_tokens;
  const int64_t* slots;
  KvCache cache;
};

struct CopyPagesArgs {
  KvCache cache;
  const int64_t* source_ids;
  const int64_t* target_ids;
  int64_t num_pages;
};

// What a kernel cannot be called with; null when it can. They look at indices only.
const char* find_fault(const PagedAttentionArgs& args);
const char* find_fault(const RopeAndCacheArgs& args);
const char* find_fault(const WriteKvArgs& args);
const char* find_fault(const CopyPagesArgs& args);

struct AttentionKernels {
  void (*paged_attention)(Pool&, const PagedAttentionArgs&);
  void (*rope_and_cache)(Pool&, const RopeAndCacheArgs&);
  void (*write_kv)(Pool&, const WriteKvArgs&);
  void (*copy_pages)(Pool&, const CopyPagesArgs&);
};

}  // namespace quire
