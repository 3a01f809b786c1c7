// Latent attention: one vector a token is the key and the value of every head. And the products with a matrix of each
// head that lead into that space and out of it.
#pragma once

#include "quire/pool.h"
#include "quire/types.h"

namespace quire {

// The latents of one layer: [num_blocks][block_size][latent_size + rope_size], contiguous. A token's latent is the value
// of all heads, and the whole row their key.
struct LatentCache {
  void* data;
  int64_t num_blocks;
  int64_t block_size;   // a multiple of 16
  int64_t latent_size;  // even, as rope_size
  int64_t rope_size;
  DType dtype;  // bf16 or f32, of every activation too

  int64_t width() const { return latent_size + rope_size; }
};

// Rows of a step: request i owns query_start_loc[i] .. query_start_loc[i + 1] - 1, its newest tokens.
struct LatentAttentionArgs {
  const void* query;  // [num_tokens][num_heads][width], contiguous
  void* out;          // [num_tokens][num_heads][latent_size], contiguous; rows of no request become zero
  LatentCache cache;
  const int32_t* block_table;  // [num_reqs][max_blocks]
  int64_t max_blocks;
  const int32_t* query_start_loc;
  const int32_t* seq_lens;
  int64_t num_reqs;
  int64_t num_tokens;
  int64_t num_heads;
  float scale;
};

// Of every token: its queries' last elements rotated, its latent normalised and its key's last elements rotated.
struct LatentTokensArgs {
  const void* query;  // [num_tokens][num_heads][query_size]; the last rope_size of each head are rotated
  int64_t query_stride;
  int64_t query_size;
  void* rotated;      // [num_tokens][num_heads][width], contiguous: they become the last elements of each head there
  const void* latent;  // [num_tokens][width]: a latent, then a key's rotated part
  int64_t latent_stride;
  const void* norm;  // [latent_size], gains
  float eps;
  int64_t num_tokens;
  int64_t num_heads;
  const float* cos;  // [max_positions][rope_size / 2]
  const float* sin;
  int64_t max_positions;
  const void* positions;
  bool are_positions_wide;  // int64, else int32
  const int64_t* slots;     // page * block_size + offset; negative = not written
  LatentCache cache;
};

// out[i][h] = x[i][h] W[h]^T: each head's vector by a matrix of its own, with the sums of a `linear` over that head.
struct HeadLinearArgs {
  const void* x;  // [num_rows][num_heads][input_size]
  int64_t x_stride;       // elements from row to row
  int64_t x_head_stride;  // elements from head to head
  const void* weight;     // num_heads packed weights (gemm.h), one after the other
  void* out;              // [num_rows][num_heads][output_size]
  int64_t out_stride;
  int64_t out_head_stride;
  int64_t num_rows;
  int64_t num_heads;
  int64_t input_size;
  int64_t output_size;
  DType dtype;  // bf16 or f32, of everything
};

// What a kernel cannot be called with; null when it can. They look at indices and overlaps.
const char* find_fault(const LatentAttentionArgs& args);
const char* find_fault(const LatentTokensArgs& args);

struct LatentKernels {
  void (*latent_attention)(Pool&, const LatentAttentionArgs&);
  void (*write_latent_tokens)(Pool&, const LatentTokensArgs&);
  void (*head_linear)(Pool&, const HeadLinearArgs&);
};

}  // namespace quire
