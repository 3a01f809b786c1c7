// Linear layers on weights in the block formats of GGUF, as they are stored: 32 or 256 inputs of an output are a block of
// integer codes with a scale, some with a minimum, some with small integer scales of 16 or 32 inputs in turn.
//
// Packed: [N / 16][records of inputs][bytes of a record], a record being the blocks of 16 outputs: first the codes, the
// 32-bit words of the 16 blocks side by side, then the scales, each kind with 16 outputs side by side; 6-bit scales take
// a byte. The inputs and bytes of a record are in csrc/kernels/block_formats.h. What follows the last block is zero.
//
// Source: the structures block_q8_0 ... of ggml (ggml/src/ggml-common.h in llama.cpp); OCP Microscaling Formats 1.0
// for MXFP4.
#pragma once

#include "quire/quant.h"

namespace quire {

enum class BlockFormat : int32_t { q8_0, q4_0, q4_1, q5_0, q5_1, q2_k, q3_k, q4_k, q5_k, q6_k, iq4_nl, iq4_xs, mxfp4 };
constexpr int kNumBlockFormats = 13;

// What a block is in a file, and a record in memory.
struct BlockLayout {
  int64_t block_inputs, block_bytes, record_inputs, record_bytes;
};

// Rows of blocks become outputs first_row .. first_row + num_rows - 1 of `packed`.
struct BlockPackArgs {
  const uint8_t* rows;
  int64_t row_stride;  // bytes
  uint8_t* packed;
  int64_t first_row;
  int64_t num_rows;
  int64_t input_size;  // a multiple of block_inputs
};

// out[i] = the weights of output ids[i]: the float32 numbers that its blocks mean, rounded to `dtype`.
struct BlockGatherArgs {
  const int64_t* ids;
  const uint8_t* packed;
  void* out;  // contiguous rows, bf16 or f32
  int64_t num_rows;
  int64_t input_size;
  DType dtype;
};

// Of one format. QuantLinearArgs without scales and group size. Rows of x are quantised to int8 in groups of 32 inputs by
// the largest magnitude of each, and an output is, group after group in float32,
//   total += (sum over the group's parts of float(dot) * scale [+ minimum * sum of x]) * scale of x,
// where dot, a sum of products of integers, is exact.
struct BlockFormatKernels {
  BlockLayout layout;
  void (*block_linear)(Pool&, const QuantLinearArgs&);
  void (*block_grouped)(Pool&, const Grouped<QuantLinearArgs>&);
  // False when a scale is not finite.
  bool (*block_pack)(Pool&, const BlockPackArgs&);
  void (*block_gather)(Pool&, const BlockGatherArgs&);
};

struct BlockKernels {
  BlockFormatKernels of[kNumBlockFormats];  // by BlockFormat
};

}  // namespace quire
