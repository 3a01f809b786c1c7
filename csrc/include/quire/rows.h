// Copies of whole rows between matrices of any type.
#pragma once

#include "quire/pool.h"
#include "quire/types.h"

namespace quire {

// out[to[i]] = x[from[i]]; null = i. Other rows of out stay as they are.
struct CopyRowsArgs {
  const char* x;
  int64_t x_stride;     // bytes
  int64_t num_x_rows;
  const int64_t* from;  // [num_rows], below num_x_rows; null = the row of the same number
  char* out;
  int64_t out_stride;   // bytes
  int64_t num_out_rows;
  const int64_t* to;    // [num_rows], below num_out_rows; null = the row of the same number
  int64_t num_rows;
  int64_t row_bytes;
};
void copy_rows(Pool& pool, const CopyRowsArgs& args);

// What is wrong with the indices, or null.
const char* find_fault(const CopyRowsArgs& args);

}  // namespace quire
