// The gated delta rule of Gated DeltaNet layers, and the gates it takes.
#pragma once

#include "quire/pool.h"
#include "quire/recurrent.h"

namespace quire {

// Per token and value head: decay = exp(-exp(a_log) * softplus(a + bias)), beta = sigmoid(b).
struct DeltaGatesArgs {
  const void* b;  // [num_rows][num_heads]
  const void* a;  // likewise
  int64_t stride;  // elements from row to row, of both
  const float* a_log;  // [num_heads]
  const float* bias;
  float* decay;  // [num_rows][num_heads], contiguous
  float* beta;
  int64_t num_rows;
  int64_t num_heads;
  DType dtype;  // of a and b: bf16 or f32
};

// For each token of a request in turn, with key and query scaled to length 1 and the query by `scale`:
//   state = decay * state; state += key (x) (beta * (value - state^T key)); out = state^T query.
// Value head h has the key and query of head h / (num_value_heads / num_key_heads).
struct GatedDeltaRuleArgs {
  const void* qkv;  // rows of queries [num_key_heads][key_size], keys likewise, values [num_value_heads][value_size]
  int64_t qkv_stride;  // elements
  const float* decay;  // [num_tokens][num_value_heads]
  const float* beta;
  void* out;           // [num_tokens][num_value_heads][value_size], contiguous
  StateTensor states;  // float: [num_value_heads][key_size][value_size]
  RecurrentBatch batch;
  int64_t num_key_heads;
  int64_t num_value_heads;  // a multiple of num_key_heads
  int64_t key_size;
  int64_t value_size;  // a multiple of 16
  float scale;
  DType dtype;  // of qkv and out: bf16 or f32

  int64_t row_size() const { return 2 * num_key_heads * key_size + num_value_heads * value_size; }
  int64_t state_size() const { return num_value_heads * key_size * value_size; }
};

const char* find_fault(const GatedDeltaRuleArgs& args);

struct DeltaNetKernels {
  void (*delta_gates)(Pool&, const DeltaGatesArgs&);
  void (*gated_delta_rule)(Pool&, const GatedDeltaRuleArgs&);
};

}  // namespace quire
