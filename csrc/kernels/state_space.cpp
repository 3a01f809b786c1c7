// Selective state spaces, token after token: a prompt in one piece, in chunks, or one token at a time does the same
// operations in the same order. Tasks are requests times channels; lanes are channels, so no sum crosses lanes.
#include "quire/state_space.h"

#include "simd/partial.h"

namespace quire::QUIRE_TIER {
namespace {

constexpr int64_t kBlocksPerTask = 4;  // of 16 channels

// `n` numbers as floats.
template <class T>
inline void widen(const T* from, int64_t n, float* to) {
  for (int64_t i = 0; i < n; i += 16) store_some(to + i, min_i64(16, n - i), load_some(from + i, min_i64(16, n - i)));
}

template <class T>
inline const T* row(const void* rows, int64_t stride, int64_t token) {
  return static_cast<const T*>(rows) + token * stride;
}

// Where part of a request's state is updated in place, after what it begins with was put there: `num_rows` rows of
// `size` floats from `offset` on, `row_stride` apart.
float* begin_state(const StateTensor& states, const RecurrentBatch& batch, int64_t req, int64_t offset,
                   int64_t num_rows, int64_t row_stride, int64_t size) {
  float* const data = static_cast<float*>(states.data) + offset;
  float* const state = data + batch.write_blocks[req] * states.block_stride;
  const uint64_t bytes = static_cast<uint64_t>(size) * sizeof(float);
  if (batch.is_new(req)) {
    for (int64_t i = 0; i < num_rows; ++i) __builtin_memset(state + i * row_stride, 0, bytes);
  } else if (batch.read_blocks[req] != batch.write_blocks[req]) {
    const float* const from = data + batch.read_blocks[req] * states.block_stride;
    for (int64_t i = 0; i < num_rows; ++i) __builtin_memcpy(state + i * row_stride, from + i * row_stride, bytes);
  }
  return state;
}

// Copies a part of a state, as `begin_state` has it, to the block that keeps what it is after a token.
void keep_state(const StateTensor& states, const RecurrentBatch& batch, int64_t token, const float* state,
                int64_t offset, int64_t num_rows, int64_t row_stride, int64_t size) {
  const int64_t block = batch.token_block(token);
  if (block < 0) return;
  float* const to = static_cast<float*>(states.data) + offset + block * states.block_stride;
  for (int64_t i = 0; i < num_rows; ++i) {
    __builtin_memcpy(to + i * row_stride, state + i * row_stride, static_cast<uint64_t>(size) * sizeof(float));
  }
}

// The bits of `exp` for x <= 0 and NaN, with fewer instructions: nothing can overflow, and one factor reaches.
inline F16 exp_of_negative(F16 x) {
  const F16 low = set1(-87.3f);
  const ExpParts parts = exp_parts(max(low, x));  // operands in this order: NaN passes through
  return select_less(x, low, zero(), parts.mantissa * pow2(parts.exponent));
}

// The last step of both: what the state gave, the skip connection and the gate.
template <class T>
inline void finish(F16 sum, F16 x, F16 skip, const T* gate, T* out, int64_t n) {
  F16 result = sum + skip * x;
  if (gate != nullptr) result = result * silu(load_some(gate, n));
  store_some(out, n, result);
}

// --- Mamba 1 ---

// One token of sixteen channels.
template <class T>
inline void step_channels(const MambaScanArgs& args, int64_t token, int64_t channel, const float* b, const float* c,
                          float* h) {
  const int64_t n = min_i64(16, args.inner_size - channel), at = token * args.inner_size + channel;
  const F16 x = load_some(row<T>(args.x, args.x_stride, token) + channel, n);
  const F16 dt = softplus(load_some(row<T>(args.time_step, args.time_step_stride, token) + channel, n));
  const F16 input = dt * x;
  const float* a = args.a + channel * args.state_size;
  F16 sum = zero();
  for (int64_t i = 0; i < args.state_size; ++i, a += 16, h += 16) {
    const F16 next = exp_of_negative(dt * load(a)) * load(h) + input * set1(b[i]);
    store(h, next);
    sum = sum + next * set1(c[i]);
  }
  const T* gate = args.gate != nullptr ? row<T>(args.gate, args.gate_stride, token) + channel : nullptr;
  finish(sum, x, load_some(args.skip + channel, n), gate, static_cast<T*>(args.out) + at, n);
}

template <class T>
void scan_channels(const MambaScanArgs& args, int64_t req, int64_t first_block, int64_t end_block) {
  const int64_t size = args.state_size * 16, first = args.batch.first_row(req), end = first + args.batch.num_rows(req);
  if (first == end) return;
  float* const state =
      begin_state(args.states, args.batch, req, first_block * size, end_block - first_block, size, size);
  float b[kMaxStateSize], c[kMaxStateSize];
  for (int64_t token = first; token < end; ++token) {
    widen(row<T>(args.b, args.b_stride, token), args.state_size, b);
    widen(row<T>(args.c, args.c_stride, token), args.state_size, c);
    for (int64_t i = first_block; i < end_block; ++i) {
      step_channels<T>(args, token, i * 16, b, c, state + (i - first_block) * size);
    }
    keep_state(args.states, args.batch, token, state, first_block * size, end_block - first_block, size, size);
  }
}

void mamba_scan(Pool& pool, const MambaScanArgs& args) {
  const int64_t num_blocks = ceil_div(args.inner_size, 16), tasks_per_req = ceil_div(num_blocks, kBlocksPerTask);
  parallel_for(pool, args.batch.num_reqs * tasks_per_req, [&](int64_t task, int) {
    const int64_t req = task / tasks_per_req, first = task % tasks_per_req * kBlocksPerTask;
    const int64_t end = min_i64(num_blocks, first + kBlocksPerTask);
    if (args.dtype == DType::bf16) {
      scan_channels<bf16>(args, req, first, end);
    } else {
      scan_channels<float>(args, req, first, end);
    }
  });
}

// --- Mamba 2 ---

// Up to two vectors of one head's elements: enough sums at once that none waits for the one before.
struct HeadPart {
  int64_t head, first, size;

  int64_t lanes(int64_t i) const { return max_i64(0, min_i64(16, size - 16 * i)); }
};
constexpr int64_t kPartSize = 32;

// One token. b and c are the columns of the head's group; `decay` and `dt` are the same in all lanes. kIsWhole: the part
// fills its N vectors.
template <int N, bool kIsWhole, class T>
inline void step_head(const Mamba2ScanArgs& args, const HeadPart& part, int64_t token, const float* b, const float* c,
                      F16 dt, F16 decay, float* state) {
  const int64_t column = part.head * args.head_size + part.first, row_size = args.num_heads * args.head_size;
  F16 x[N], input[N], sum[N];
  for (int i = 0; i < N; ++i) {
    x[i] = load_some(row<T>(args.x, args.x_stride, token) + column + 16 * i, part.lanes(i));
    input[i] = dt * x[i];
    sum[i] = zero();
  }
  for (int64_t n = 0; n < args.state_size; ++n, state += args.head_size) {
    const F16 b_n = set1(b[n]), c_n = set1(c[n]);
    for (int i = 0; i < N; ++i) {
      const int64_t lanes = kIsWhole ? 16 : part.lanes(i);
      const F16 next = decay * load_some(state + 16 * i, lanes) + input[i] * b_n;
      store_some(state + 16 * i, lanes, next);
      sum[i] = sum[i] + next * c_n;
    }
  }
  T* const out = static_cast<T*>(args.out) + token * row_size + column;
  const T* gate = args.gate != nullptr ? row<T>(args.gate, args.gate_stride, token) + column : nullptr;
  for (int i = 0; i < N; ++i) {
    finish(sum[i], x[i], set1(args.skip[part.head]), gate != nullptr ? gate + 16 * i : nullptr, out + 16 * i,
           part.lanes(i));
  }
}

template <class T>
void scan_head(const Mamba2ScanArgs& args, int64_t req, const HeadPart& part) {
  const int64_t first = args.batch.first_row(req), end = first + args.batch.num_rows(req);
  if (first == end) return;
  const int64_t offset = part.head * args.state_size * args.head_size + part.first;
  float* const state =
      begin_state(args.states, args.batch, req, offset, args.state_size, args.head_size, part.size);
  const int64_t group = part.head / (args.num_heads / args.num_groups) * args.state_size;
  const F16 a = set1(args.a[part.head]), bias = set1(args.time_step_bias[part.head]);
  const F16 low = set1(args.min_time_step), high = set1(args.max_time_step);
  float b[kMaxStateSize], c[kMaxStateSize];
  for (int64_t token = first; token < end; ++token) {
    widen(row<T>(args.b, args.b_stride, token) + group, args.state_size, b);
    widen(row<T>(args.c, args.c_stride, token) + group, args.state_size, c);
    float time_step;
    widen(row<T>(args.time_step, args.time_step_stride, token) + part.head, 1, &time_step);
    const F16 dt = min(high, max(low, softplus(set1(time_step) + bias)));  // in this order: NaN passes through
    const F16 decay = exp_of_negative(dt * a);
    if (part.size == kPartSize) {
      step_head<2, true, T>(args, part, token, b, c, dt, decay, state);
    } else if (part.size > 16) {
      step_head<2, false, T>(args, part, token, b, c, dt, decay, state);
    } else {
      step_head<1, false, T>(args, part, token, b, c, dt, decay, state);
    }
    keep_state(args.states, args.batch, token, state, offset, args.state_size, args.head_size, part.size);
  }
}

void mamba2_scan(Pool& pool, const Mamba2ScanArgs& args) {
  const int64_t parts = ceil_div(args.head_size, kPartSize), tasks_per_req = args.num_heads * parts;
  parallel_for(pool, args.batch.num_reqs * tasks_per_req, [&](int64_t task, int) {
    const int64_t req = task / tasks_per_req, head = task % tasks_per_req / parts;
    const int64_t first = task % parts * kPartSize;
    const HeadPart part{head, first, min_i64(kPartSize, args.head_size - first)};
    if (args.dtype == DType::bf16) {
      scan_head<bf16>(args, req, part);
    } else {
      scan_head<float>(args, req, part);
    }
  });
}

}  // namespace

extern const StateSpaceKernels state_space_kernels;
const StateSpaceKernels state_space_kernels = {mamba_scan, mamba2_scan};

}  // namespace quire::QUIRE_TIER
