// Products with packed weights: y = x W^T + b.
//
// Packed weights: panels of 16 outputs, each contiguous in K, in tiles of 32 inputs. A tile of bfloat16 is
// [16 pairs of inputs][16 outputs][2 of the pair], 1 KB, as the tile unit reads it; of float32 it is
// [16 pairs][2 of the pair][16 outputs]. Outputs and inputs beyond the matrix are zero.
#pragma once

#include "quire/grouped.h"
#include "quire/pool.h"
#include "quire/types.h"

namespace quire {

constexpr int64_t kTileDepth = 32;                       // inputs
constexpr int64_t kTileSize = kPanelSize * kTileDepth;   // elements

// out[i][n] = x[i] . weight[n] + bias[n], rounded once to the dtype of out.
// Gated: the weight has 2 * output_size outputs, gates then ups, and out = silu(gate) * up, where gate, up and
// silu(gate) are rounded to x's dtype, as by a product and then `gated_activation`; output_size is a multiple of 16.
struct LinearArgs {
  const void* x;
  int64_t x_stride;  // elements
  const void* weight;
  const void* bias;  // null = none
  void* out;
  int64_t out_stride;  // elements
  int64_t num_rows;
  int64_t input_size;
  int64_t output_size;
  DType dtype;  // of x and the weight: bf16 or f32
  DType bias_dtype;
  DType out_dtype;  // dtype, or f32
  bool is_gated;
  const int32_t* x_rows;  // the row of x that row i of out is made of; null = row i
};

// What is wrong with the indices, or null.
const char* find_fault(const Grouped<LinearArgs>& args);

enum class RowType : int32_t { bf16 = 0, f32 = 1, f16 = 2 };

// Rows of a checkpoint that become outputs first_row .. first_row + num_rows - 1 of a packed weight.
struct PackArgs {
  const void* rows;
  int64_t row_stride;  // elements
  RowType row_type;
  void* packed;
  DType packed_dtype;
  int64_t num_rows;
  int64_t input_size;
  int64_t first_row;
};

// Outputs of a packed weight as rows again: those in `ids`, or first_row .. first_row + num_rows - 1.
struct ReadRowsArgs {
  const void* packed;
  DType dtype;
  const int64_t* ids;  // null = first_row and on; each below the number of packed outputs
  int64_t first_row;
  int64_t num_rows;
  int64_t input_size;
  void* out;  // [num_rows][input_size]
};

// What this machine can do at most, for benchmarks.
enum class Ceiling : int32_t { read = 0, float32 = 1, bf16 = 2, int8 = 3 };

struct GemmKernels {
  void (*linear)(Pool&, const LinearArgs&);
  void (*grouped_linear)(Pool&, const Grouped<LinearArgs>&);
  bool (*pack_rows)(Pool&, const PackArgs&);  // false: a NaN or an infinity was packed
  void (*read_rows)(Pool&, const ReadRowsArgs&);
  // Every thread of the pool reads its part of `bytes` at `data` once, by `steps` streams (a power of two up to 1024),
  // or does `steps` rounds of products.
  // Returns the bytes read, or the multiplications and additions done; 0 when the tier has no such unit.
  double (*run_ceiling)(Pool&, Ceiling, const void* data, int64_t bytes, int64_t steps);
};

}  // namespace quire
