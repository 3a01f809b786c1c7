// The gated delta rule, token after token. A prompt's chunk and a single token are the same loop, so they have the same
// bits; the requests, the heads and the columns of a head's state are independent of each other and run in parallel.
//
// One pass over the state gives both of its products, with the key for the change and with the query for the result:
// out = decay * state^T query + (key . query) * change. A second pass decays the state and adds the change. All sums
// over the key's elements run from the first to the last, whatever the number of columns side by side.
#include "quire/delta_net.h"

#include "simd/partial.h"

namespace quire::QUIRE_TIER {
namespace {

constexpr int64_t kTokensPerTask = 32;

// Vectors of the state side by side: as many chains of sums as hide the time of an addition, in the registers there are.
#if defined(QUIRE_SIMD_AVX512)
constexpr int kVectors = 4;
#else
constexpr int kVectors = 2;
#endif
constexpr int64_t kColumnsPerTask = 16 * kVectors;

template <class T>
void gates_of_row(const DeltaGatesArgs& args, int64_t row) {
  const T* a = static_cast<const T*>(args.a) + row * args.stride;
  const T* b = static_cast<const T*>(args.b) + row * args.stride;
  float* decay = args.decay + row * args.num_heads;
  float* beta = args.beta + row * args.num_heads;
  for (int64_t i = 0; i < args.num_heads; i += 16) {
    const int64_t n = min_i64(16, args.num_heads - i);
    const F16 step = softplus(load_some(a + i, n) + load_some(args.bias + i, n));
    store_some(decay + i, n, exp(zero() - exp(load_some(args.a_log + i, n)) * step));
    store_some(beta + i, n, sigmoid(load_some(b + i, n)));
  }
}

void delta_gates(Pool& pool, const DeltaGatesArgs& args) {
  parallel_for(pool, ceil_div(args.num_rows, kTokensPerTask), [&](int64_t task, int) {
    const int64_t end = min_i64(args.num_rows, (task + 1) * kTokensPerTask);
    for (int64_t row = task * kTokensPerTask; row < end; ++row) {
      if (args.dtype == DType::bf16) {
        gates_of_row<bf16>(args, row);
      } else {
        gates_of_row<float>(args, row);
      }
    }
  });
}

// out = factor * x / |x|, as many elements as whole vectors have; those past the end are zero.
template <class T>
void normalize(const T* x, int64_t size, float factor, float* out) {
  F16 squares = zero();
  for (int64_t i = 0; i < size; i += 16) {
    const F16 v = load_some(x + i, min_i64(16, size - i));
    squares = squares + v * v;
  }
  const F16 scale = set1(factor / __builtin_sqrtf(hsum(squares) + 1e-6f));
  for (int64_t i = 0; i < size; i += 16) store(out + i, load_some(x + i, min_i64(16, size - i)) * scale);
}

float dot(const float* a, const float* b, int64_t size) {
  F16 sums = zero();
  for (int64_t i = 0; i < size; i += 16) sums = sums + load(a + i) * load(b + i);
  return hsum(sums);
}

// What one token does to a head.
struct HeadStep {
  const float *query, *key;  // of length 1, the query times the scale
  int64_t key_size;
  float overlap;  // query . key
  float decay, beta;
};

// Some columns of a state: rows of the key's elements, `stride` floats apart.
struct StateRows {
  float* data;
  int64_t stride;
};

// `from` and `to` may be the same.
template <int kWidth, class T>
void advance(const HeadStep& step, StateRows from, StateRows to, const T* value, T* out) {
  F16 by_key[kWidth], by_query[kWidth];
  for (int w = 0; w < kWidth; ++w) by_key[w] = by_query[w] = zero();
  for (int64_t i = 0; i < step.key_size; ++i) {
    const F16 key = set1(step.key[i]), query = set1(step.query[i]);
    for (int w = 0; w < kWidth; ++w) {
      const F16 state = load(from.data + i * from.stride + 16 * w);
      by_key[w] = by_key[w] + state * key;
      by_query[w] = by_query[w] + state * query;
    }
  }
  const F16 decay = set1(step.decay);
  F16 change[kWidth];
  for (int w = 0; w < kWidth; ++w) {
    change[w] = (load(value + 16 * w) - decay * by_key[w]) * set1(step.beta);
    store(out + 16 * w, decay * by_query[w] + set1(step.overlap) * change[w]);
  }
  for (int64_t i = 0; i < step.key_size; ++i) {
    const F16 key = set1(step.key[i]);
    for (int w = 0; w < kWidth; ++w) {
      const F16 state = load(from.data + i * from.stride + 16 * w);
      store(to.data + i * to.stride + 16 * w, decay * state + key * change[w]);
    }
  }
}

template <class T>
void advance_columns(const HeadStep& step, StateRows from, StateRows to, const T* value, T* out, int64_t columns) {
  if (columns == kColumnsPerTask) return advance<kVectors>(step, from, to, value, out);
  for (int64_t c = 0; c < columns; c += 16) {
    advance<1>(step, {from.data + c, from.stride}, {to.data + c, to.stride}, value + c, out + c);
  }
}

// All tokens of a request through some columns of a head. The state comes from its block at the first token, goes to
// its block at the last, and lies in `scratch` in between, or in the block that keeps it.
template <class T>
void run_head(const GatedDeltaRuleArgs& args, int64_t req, int64_t head, int64_t column, float* scratch) {
  const RecurrentBatch& batch = args.batch;
  const int64_t size = args.key_size, padded = round_up(size, 16), columns = min_i64(kColumnsPerTask, args.value_size - column);
  const int64_t key_head = head / (args.num_value_heads / args.num_key_heads);
  float *query = scratch, *key = scratch + padded;
  const StateRows held{scratch + 2 * padded, kColumnsPerTask};
  const int64_t offset = head * size * args.value_size + column;
  float* states = static_cast<float*>(args.states.data) + offset;
  const auto in_block = [&](int64_t block) {
    return StateRows{states + block * args.states.block_stride, args.value_size};
  };
  StateRows from = held;
  if (batch.is_new(req)) {
    __builtin_memset(held.data, 0, size * kColumnsPerTask * sizeof(float));
  } else {
    from = in_block(batch.read_blocks[req]);
  }
  const int64_t first = batch.first_row(req), num_rows = batch.num_rows(req);
  const int64_t keys = args.num_key_heads * size;
  for (int64_t row = first; row < first + num_rows; ++row) {
    const T* qkv = static_cast<const T*>(args.qkv) + row * args.qkv_stride;
    T* out = static_cast<T*>(args.out) + (row * args.num_value_heads + head) * args.value_size + column;
    normalize(qkv + key_head * size, size, args.scale, query);
    normalize(qkv + keys + key_head * size, size, 1.0f, key);
    const int64_t gate = row * args.num_value_heads + head;
    const HeadStep step{query, key, size, dot(query, key, padded), args.decay[gate], args.beta[gate]};
    const bool is_last = row + 1 == first + num_rows;
    const int64_t block = is_last ? batch.write_blocks[req] : batch.token_block(row);
    const StateRows to = block < 0 ? held : in_block(block);
    advance_columns(step, from, to, qkv + 2 * keys + head * args.value_size + column, out, columns);
    from = to;
  }
}

void gated_delta_rule(Pool& pool, const GatedDeltaRuleArgs& args) {
  const int64_t parts = ceil_div(args.value_size, kColumnsPerTask), per_req = args.num_value_heads * parts;
  const int64_t scratch_floats = 2 * round_up(args.key_size, 16) + args.key_size * kColumnsPerTask;
  parallel_for(pool, args.batch.num_reqs * per_req, [&](int64_t task, int thread) {
    const int64_t req = task / per_req, head = task % per_req / parts, column = task % parts * kColumnsPerTask;
    if (args.batch.num_rows(req) == 0) return;
    float* scratch = static_cast<float*>(pool.scratch(thread, scratch_floats * sizeof(float)));
    if (args.dtype == DType::bf16) {
      run_head<bf16>(args, req, head, column, scratch);
    } else {
      run_head<float>(args, req, head, column, scratch);
    }
  });
}

}  // namespace

extern const DeltaNetKernels delta_net_kernels;
const DeltaNetKernels delta_net_kernels = {delta_gates, gated_delta_rule};

}  // namespace quire::QUIRE_TIER
