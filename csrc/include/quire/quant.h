// Linear layers on int8 and int4 weights.
//
// int8: q = round(w * 127 / absmax of the output channel), stored as q + 128 in a byte, so that the instruction
// u8 x s8 takes weights and activations as they are. Packed [N / 16][K / 64][16][16][4]: panels of 16 outputs, and in
// a panel 4 consecutive k of each output side by side. float32 scales [N / 16][16].
//
// int4: q = round(w / scale of the output and group), -8 <= q <= 7, stored as q + 8. Packed [N / 16][K / 32][4][16][4]:
// 32 k of a panel in 256 bytes; the low nibbles of row r hold k = 4 r .. 4 r + 3, the high nibbles k = 16 + 4 r ...
// bfloat16 scales [N / 16][K / group][16].
#pragma once

#include "quire/grouped.h"
#include "quire/pool.h"
#include "quire/types.h"

namespace quire {

constexpr int64_t kInt8TileK = 64;
constexpr int64_t kInt4UnitK = 32;
constexpr int64_t kInt4UnitBytes = 256;

// The bytes of one panel, over all of K.
constexpr int64_t int8_panel_bytes(int64_t input_size) { return round_up(input_size, kInt8TileK) * kPanelSize; }
constexpr int64_t int4_panel_bytes(int64_t input_size) {
  return ceil_div(input_size, kInt4UnitK) * kInt4UnitBytes;
}

// out[m][n] = sum over k of x[m][k] * weight[n][k], + bias[n]. Each row of x is quantised to int8 by its own absmax;
// sums of products are exact integers. Strides are in elements.
// Gated: the weight has 2 * output_size outputs, gates then ups, and out = silu(gate) * up, where gate, up and silu(gate)
// are first rounded to x's dtype: the bits of the product followed by gated_activation. output_size is then a multiple
// of 16.
struct QuantLinearArgs {
  const void* x;  // bf16 or f32
  int64_t x_stride;
  const uint8_t* packed;
  const void* scales;  // f32 (int8) or bf16 (int4)
  const void* bias;    // null = none
  void* out;
  int64_t out_stride;
  int64_t num_rows;
  int64_t output_size;
  int64_t input_size;
  int64_t group_size;  // int4: 32, 64 or 128; int8: unused
  DType x_dtype;
  DType bias_dtype;  // bf16 or f32
  DType out_dtype;   // bf16 or f32
  bool is_gated;
  const int32_t* x_rows;  // the row of x that row i of out is made of; null = row i
};

// What is wrong with the indices, or null.
const char* find_fault(const Grouped<QuantLinearArgs>& args);

// Quantises rows of a weight into outputs first_row .. of `packed`.
struct QuantPackArgs {
  const void* rows;  // bf16 or f32
  int64_t row_stride;
  uint8_t* packed;
  void* scales;
  int64_t first_row;
  int64_t num_rows;
  int64_t input_size;
  int64_t group_size;
  DType dtype;
};

// out[i] = the dequantised weights of output ids[i]; ids are within the scales.
struct QuantGatherArgs {
  const int64_t* ids;
  const uint8_t* packed;
  const void* scales;
  void* out;  // contiguous rows, bf16 or f32
  int64_t num_rows;
  int64_t input_size;
  int64_t group_size;
  DType dtype;
};

struct QuantKernels {
  void (*linear_int8)(Pool&, const QuantLinearArgs&);
  void (*linear_int4)(Pool&, const QuantLinearArgs&);
  void (*grouped_int8)(Pool&, const Grouped<QuantLinearArgs>&);
  void (*grouped_int4)(Pool&, const Grouped<QuantLinearArgs>&);
  // False when a weight is not finite; its scale is then NaN.
  bool (*pack_int8)(Pool&, const QuantPackArgs&);
  bool (*pack_int4)(Pool&, const QuantPackArgs&);
  void (*gather_int8)(Pool&, const QuantGatherArgs&);
  void (*gather_int4)(Pool&, const QuantGatherArgs&);
};

}  // namespace quire
