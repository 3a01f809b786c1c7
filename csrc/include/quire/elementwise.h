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

// out[i] = (v - mean(v)) / deviation(v) * weight + bias, where v is x[i] (+ residual[i]); with a residual, residual[i]
// becomes the sum. Float32 inside, rounded once.
struct LayerNormArgs {
  const void* x;
  int64_t x_stride;  // elements
  void* residual;  // null = none; contiguous rows
  const void* weight;
  const void* bias;  // null = none
  void* out;  // contiguous rows; may be x
  int64_t num_rows;
  int64_t size;
  float eps;
  DType dtype;  // of all of them: bf16 or f32
};

enum class Activation : int32_t { silu = 0, gelu = 1, gelu_tanh = 2, clamped_silu = 3, relu = 4, relu2 = 5, none = 6 };

// out[i, j] = activation(x[i, j]) * x[i, size + j]; the activation is rounded to the dtype before the product.
// clamped_silu: gates are first cut at `limit`, ups at -limit and limit; then gate * sigmoid(alpha * gate) * (up + offset).
struct GatedActivationArgs {
  const void* x;
  int64_t x_stride;  // elements
  void* out;         // contiguous rows of `size`
  int64_t num_rows;
  int64_t size;
  Activation activation;
  DType dtype;  // bf16 or f32
  float limit, alpha, offset;  // of clamped_silu
};

// out = factor * activation(x) + addend, rounded once.
struct TransformArgs {
  const void* x;
  int64_t x_stride;  // elements
  const void* addend;  // null = none
  int64_t addend_stride;
  void* out;  // contiguous rows of `size`; may be x or addend
  int64_t num_rows;
  int64_t size;
  float factor;
  Activation activation;  // but clamped_silu
  DType dtype;  // bf16 or f32
};

enum class GateActivation : int32_t { none = 0, silu = 1, sigmoid = 2 };

// out[i, j] = x[i, j] * activation(gate[i, j]), rounded once.
struct MultiplyArgs {
  const void* x;
  int64_t x_stride;  // elements
  const void* gate;
  int64_t gate_stride;
  void* out;  // contiguous rows of `size`
  int64_t num_rows;
  int64_t size;
  GateActivation activation;
  DType dtype;  // bf16 or f32
};

// Of each group of `size` elements in a row: rms_norm(x) * weight * silu(gate), or rms_norm(x * silu(gate)) * weight
// where the gate comes first. Float32 inside, rounded once.
struct GatedRmsNormArgs {
  const void* x;
  int64_t x_stride;  // elements
  const void* gate;
  int64_t gate_stride;
  const void* weight;     // of a group
  int64_t weight_stride;  // elements from group to group; 0 = all have the same
  void* out;              // contiguous rows
  int64_t num_rows;
  int64_t num_groups;
  int64_t size;
  float eps;
  bool gate_first;
  DType dtype;  // bf16 or f32
};

// Whether every number is finite: none has all the bits of `exponent_mask`.
struct IsFiniteArgs {
  const void* x;
  int64_t num_elements;
  int64_t element_bytes;  // 2 or 4
  uint32_t exponent_mask;
};

struct ElementwiseKernels {
  void (*rms_norm)(Pool&, const RmsNormArgs&);
  void (*layer_norm)(Pool&, const LayerNormArgs&);
  void (*gated_activation)(Pool&, const GatedActivationArgs&);
  void (*transform)(Pool&, const TransformArgs&);
  void (*multiply)(Pool&, const MultiplyArgs&);
  void (*gated_rms_norm)(Pool&, const GatedRmsNormArgs&);
  bool (*is_finite)(Pool&, const IsFiniteArgs&);
};

}  // namespace quire
