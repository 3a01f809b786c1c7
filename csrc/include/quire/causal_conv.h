// Causal convolution of each channel over the newest tokens, as recurrent layers have it before their mixing.
#pragma once

#include "quire/pool.h"
#include "quire/recurrent.h"

namespace quire {

constexpr int64_t kMaxConvSize = 8;  // tokens

// out[t][c] = activation(sum over j of weight[j][c] * input[t - conv_size + 1 + j][c] + bias[c]), where the inputs
// before a request's first row are its state: [conv_size - 1][channels], the newest last.
struct CausalConvArgs {
  const void* x;
  int64_t x_stride;  // elements
  const void* weight;  // [conv_size][channels]
  const void* bias;    // [channels] or null
  void* out;           // contiguous rows
  StateTensor states;
  RecurrentBatch batch;
  int64_t channels;
  int64_t conv_size;
  bool has_silu;
  DType dtype;  // of all of them: bf16 or f32
};

const char* find_fault(const CausalConvArgs& args);

struct CausalConvKernels {
  void (*causal_conv)(Pool&, const CausalConvArgs&);
};

}  // namespace quire
