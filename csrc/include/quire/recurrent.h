// What the kernels of recurrent layers share: a request's state lies in one block of the cache. A step reads it from
// one block and leaves it in another, or in the same.
#pragma once

#include "quire/spans.h"
#include "quire/types.h"

namespace quire {

// One tensor of the state in every block; the elements of a block lie together.
struct StateTensor {
  void* data;
  int64_t num_blocks;
  int64_t block_stride;  // elements from block to block
};

// Request i owns the rows query_start_loc[i] .. query_start_loc[i + 1] - 1 of a step, its newest tokens.
struct RecurrentBatch {
  const int32_t* query_start_loc;
  const int32_t* read_blocks;   // where the state before the step is; -1 = it is zero
  const int32_t* write_blocks;  // where the state after the step goes; untouched where a request has no rows
  int64_t num_reqs;
  int64_t num_tokens;
  // [num_tokens] where the state after a token is left, beside all else; -1 = nowhere, as after a request's last token.
  // Null = nowhere.
  const int32_t* token_blocks = nullptr;

  int64_t first_row(int64_t req) const { return query_start_loc[req]; }
  int64_t num_rows(int64_t req) const { return query_start_loc[req + 1] - query_start_loc[req]; }
  bool is_new(int64_t req) const { return read_blocks[req] < 0; }
  int64_t token_block(int64_t row) const { return token_blocks == nullptr ? -1 : token_blocks[row]; }
};

// What is wrong with the indices of a batch over states of `num_blocks` blocks, or null.
const char* find_batch_fault(const RecurrentBatch& batch, int64_t num_blocks);

// Whether memory that is written holds a batch's indices.
bool overlaps_batch(const Span& written, const RecurrentBatch& batch);

}  // namespace quire
