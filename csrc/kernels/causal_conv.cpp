// Causal convolution over ragged requests. Each output is one chain of sums from the oldest input to the newest, then
// the bias, in float32: the same bits however a prompt is cut.
#include "quire/causal_conv.h"

#include "simd/partial.h"

namespace quire::QUIRE_TIER {
namespace {

constexpr int64_t kChannelsPerTask = 512;

alignas(64) constexpr float kZeros[kChannelsPerTask] = {};

// Some channels of one request: its inputs from the first of the state on.
template <class T>
class Inputs {
 public:
  Inputs(const CausalConvArgs& args, int64_t req, int64_t first_channel)
      : history_(args.conv_size - 1),
        row_stride_(args.x_stride),
        state_stride_(args.channels),
        rows_(static_cast<const T*>(args.x) + args.batch.first_row(req) * args.x_stride + first_channel) {
    if (args.batch.is_new(req)) {
      state_ = reinterpret_cast<const T*>(kZeros);
      state_stride_ = 0;
    } else {
      state_ = static_cast<const T*>(args.states.data) + args.batch.read_blocks[req] * args.states.block_stride +
               first_channel;
    }
  }
  const T* at(int64_t i) const {
    return i < history_ ? state_ + i * state_stride_ : rows_ + (i - history_) * row_stride_;
  }

 private:
  int64_t history_, row_stride_, state_stride_;
  const T* rows_;
  const T* state_;
};

template <class T>
void convolve(const CausalConvArgs& args, int64_t req, int64_t first, int64_t size) {
  const Inputs<T> inputs(args, req, first);
  const T* weight = static_cast<const T*>(args.weight) + first;
  const T* bias = args.bias != nullptr ? static_cast<const T*>(args.bias) + first : nullptr;
  T* out = static_cast<T*>(args.out) + args.batch.first_row(req) * args.channels + first;
  const int64_t num_rows = args.batch.num_rows(req), taps = args.conv_size;
  for (int64_t row = 0; row < num_rows; ++row, out += args.channels) {
    const T* tap[kMaxConvSize];
    for (int64_t j = 0; j < taps; ++j) tap[j] = inputs.at(row + j);
    for (int64_t c = 0; c < size; c += 16) {
      const int64_t n = min_i64(16, size - c);
      F16 sum = load_some(tap[0] + c, n) * load_some(weight + c, n);
      for (int64_t j = 1; j < taps; ++j) {
        sum = sum + load_some(tap[j] + c, n) * load_some(weight + j * args.channels + c, n);
      }
      if (bias != nullptr) sum = sum + load_some(bias + c, n);
      store_some(out + c, n, args.has_silu ? silu(sum) : sum);
    }
  }
  // The newest inputs. From the oldest on: a block that is read too is never read behind where it was written. No block
  // for the state after a token is read.
  const auto leave = [&](int64_t row, int64_t block) {
    T* state = static_cast<T*>(args.states.data) + block * args.states.block_stride + first;
    for (int64_t i = 1; i < taps; ++i, state += args.channels) {
      __builtin_memmove(state, inputs.at(row + i), size * sizeof(T));
    }
  };
  for (int64_t row = 0; args.batch.token_blocks != nullptr && row + 1 < num_rows; ++row) {
    const int64_t block = args.batch.token_block(args.batch.first_row(req) + row);
    if (block >= 0) leave(row, block);
  }
  leave(num_rows - 1, args.batch.write_blocks[req]);
}

void causal_conv(Pool& pool, const CausalConvArgs& args) {
  const int64_t tasks_per_req = ceil_div(args.channels, kChannelsPerTask);
  parallel_for(pool, args.batch.num_reqs * tasks_per_req, [&](int64_t task, int) {
    const int64_t req = task / tasks_per_req, first = task % tasks_per_req * kChannelsPerTask;
    const int64_t size = min_i64(kChannelsPerTask, args.channels - first);
    if (args.batch.num_rows(req) == 0) return;
    if (args.dtype == DType::bf16) {
      convolve<bf16>(args, req, first, size);
    } else {
      convolve<float>(args, req, first, size);
    }
  });
}

}  // namespace

extern const CausalConvKernels causal_conv_kernels;
const CausalConvKernels causal_conv_kernels = {causal_conv};

}  // namespace quire::QUIRE_TIER
