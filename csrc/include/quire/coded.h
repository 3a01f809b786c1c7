// Products with weights kept as codes of 4 or 8 bits: out = x W^T + b, where a number of W is value(code) * scale.
//
// Values of codes are bfloat16 numbers. Inside the product the codes of a few tiles become such numbers in level 1
// cache, and the chains of the bfloat16 product run over them (gemm_vector.h), group by group of inputs; sums of a group
// are multiplied by its scale in float32. Nothing is ever kept in the wider form, and activations are not quantised.
//
// Packed: panels of 16 outputs, in tiles of 32 inputs (see gemm.h). A tile of 8-bit codes is [16 pairs][16 outputs][2],
// 512 bytes. Of 4-bit codes it is [8 pairs][16 outputs][2], 256 bytes: the lower halves are pairs 0 .. 7, the upper
// halves pairs 8 .. 15. Scales (float32) and zero points are [panels][groups][16].
#pragma once

#include "quire/gemm.h"

namespace quire {

enum class Code : int32_t {
  e4m3 = 0,  // 8-bit floats
  int8 = 1,
  int4 = 2,  // 0 .. 15, less the zero point of the output and group
  nf4 = 3,   // of the table of NF4, rounded to bfloat16
};

constexpr int64_t bits_of(Code code) { return code == Code::int4 || code == Code::nf4 ? 4 : 8; }
constexpr int64_t coded_tile_bytes(Code code) { return kTileSize * bits_of(code) / 8; }

// As LinearArgs, with x of bf16; `weight` points to the codes.
struct CodedLinearArgs : LinearArgs {
  const float* scales;
  const uint8_t* zeros;  // int4
  int64_t group_size;    // inputs, a multiple of 32; 0 = all of a row
  Code code;
  const int32_t* order;  // column i of the weight belongs to input order[i]; null = in order. One for each group of rows.
};

// What is wrong with the indices, or null.
const char* find_fault(const CodedLinearArgs& args);
const char* find_fault(const Grouped<CodedLinearArgs>& args);

// Rows of codes that become outputs first_row .. first_row + num_rows - 1 of a packed weight.
struct CodedPackArgs {
  const uint8_t* codes;  // rows of input_size codes; of 4 bits, the lower half first
  int64_t row_stride;    // bytes
  const float* scales;   // [num_rows][num_groups]
  const uint8_t* zeros;  // likewise; int4
  uint8_t* packed;
  float* packed_scales;
  uint8_t* packed_zeros;
  int64_t first_row;
  int64_t num_rows;
  int64_t input_size;
  int64_t num_groups;
  Code code;
};

// out[i] = the numbers of output ids[i]; ids are within the packed outputs.
struct CodedGatherArgs {
  const int64_t* ids;
  const uint8_t* packed;
  const float* scales;
  const uint8_t* zeros;
  void* out;  // contiguous rows, bf16 or f32
  int64_t num_rows;
  int64_t input_size;
  int64_t group_size;
  DType dtype;
  Code code;
};

struct CodedKernels {
  void (*coded_linear)(Pool&, const CodedLinearArgs&);
  void (*coded_grouped)(Pool&, const Grouped<CodedLinearArgs>&);
  bool (*coded_pack)(Pool&, const CodedPackArgs&);  // false: a scale or a code is NaN or infinite
  void (*coded_gather)(Pool&, const CodedGatherArgs&);
};

}  // namespace quire
