// Kernels of one pass over rows of activations.
#pragma once

#include "quire/pool.h"
#include "quire/types.h"

namespace quire {

// out[i] = rms_norm(x[i] (+ residual[i])) * weight, row by row; with a residual, residual[i] becomes the sum.
// Rows are `size` elements; strides are in elements.
struct RmsNormArgs {
  const void* x;
  int64_t x_stride;
  void* residual;  // null = none; contiguous rows
  const void* weight;
  void* out;  // contiguous rows; may be x
  int64_t num_rows;
  int64_t size;
  float eps;
  DType dtype;  // of all of them: bf16 or f32
};

struct ElementwiseKernels {
  void (*rms_norm)(Pool&, const RmsNormArgs&);
};

}  // namespace quire
