// Selective state spaces: the recurrences of Mamba 1 and 2, over the tokens of a step and states in the cache.
#pragma once

#include "quire/pool.h"
#include "quire/recurrent.h"

namespace quire {

constexpr int64_t kMaxStateSize = 256;

// Mamba 1, for channel d and state column n of token t:
//   h[d, n] = exp(dt[t, d] * a[d, n]) * h[d, n] + dt[t, d] * x[t, d] * b[t, n],   dt = softplus(time_step)
//   out[t, d] = (sum over n of h[d, n] * c[t, n], in the order of n, + skip[d] * x[t, d]) * silu(gate[t, d])
// A block of states holds h as [ceil(inner_size / 16)][state_size][16], and so does `a`: sixteen channels lie side by
// side.
// Strides are in elements, from token to token.
struct MambaScanArgs {
  const void* x;  // [num_tokens][inner_size]
  int64_t x_stride;
  const void* time_step;  // [num_tokens][inner_size]
  int64_t time_step_stride;
  const void* b;  // [num_tokens][state_size]
  int64_t b_stride;
  const void* c;
  int64_t c_stride;
  const void* gate;  // [num_tokens][inner_size] or null
  int64_t gate_stride;
  const float* a;     // not positive
  const float* skip;  // [inner_size]
  void* out;          // [num_tokens][inner_size], contiguous
  int64_t inner_size;
  int64_t state_size;  // at most kMaxStateSize
  StateTensor states;  // float32
  RecurrentBatch batch;
  DType dtype;  // of x, time_step, b, c, gate and out: bf16 or f32
};

// Mamba 2, for head h of group g, element p of it and state column n of token t:
//   s[h, n, p] = exp(dt[t, h] * a[h]) * s[h, n, p] + dt[t, h] * x[t, h, p] * b[t, g, n]
//   out[t, h, p] = (sum over n of s[h, n, p] * c[t, g, n], in the order of n, + skip[h] * x[t, h, p]) * silu(gate)
// with dt = softplus(time_step + time_step_bias), limited to min_time_step .. max_time_step.
// A block of states holds s as [num_heads][state_size][head_size].
struct Mamba2ScanArgs {
  const void* x;  // [num_tokens][num_heads][head_size]
  int64_t x_stride;
  const void* time_step;  // [num_tokens][num_heads]
  int64_t time_step_stride;
  const void* b;  // [num_tokens][num_groups][state_size]
  int64_t b_stride;
  const void* c;
  int64_t c_stride;
  const void* gate;  // [num_tokens][num_heads][head_size] or null
  int64_t gate_stride;
  const float* a;               // [num_heads], not positive
  const float* skip;            // [num_heads]
  const float* time_step_bias;  // [num_heads]
  float min_time_step;
  float max_time_step;
  void* out;  // [num_tokens][num_heads][head_size], contiguous
  int64_t num_heads;
  int64_t head_size;
  int64_t num_groups;  // divides num_heads
  int64_t state_size;  // at most kMaxStateSize
  StateTensor states;  // float32
  RecurrentBatch batch;
  DType dtype;
};

// What a kernel cannot be called with; null when it can.
const char* find_fault(const MambaScanArgs& args);
const char* find_fault(const Mamba2ScanArgs& args);

struct StateSpaceKernels {
  void (*mamba_scan)(Pool&, const MambaScanArgs&);
  void (*mamba2_scan)(Pool&, const Mamba2ScanArgs&);
};

}  // namespace quire
