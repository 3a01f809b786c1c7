// One pass over rows of activations: memory bound, so written once for all tiers on F16.
#include "quire/elementwise.h"

#include "simd/partial.h"

namespace quire::QUIRE_TIER {
namespace {

constexpr int64_t kRowsPerTask = 4;
constexpr int64_t kColumnsPerTask = 2048;
constexpr int64_t kBytesPerTask = int64_t{1} << 18;

template <class T>
inline F16 row_values(const T* x, T* residual, int64_t i, int64_t n) {
  if (residual == nullptr) return load_some(x + i, n);
  const F16 sum = rounded<T>(load_some(x + i, n) + load_some(residual + i, n));
  store_some(residual + i, n, sum);
  return sum;
}

template <class T>
void rms_norm_row(const RmsNormArgs& args, int64_t row) {
  const T* x = static_cast<const T*>(args.x) + row * args.x_stride;
  T* residual = args.residual ? static_cast<T*>(args.residual) + row * args.size : nullptr;
  T* out = static_cast<T*>(args.out) + row * args.size;
  const T* weight = static_cast<const T*>(args.weight);
  F16 squares = zero();
  for (int64_t i = 0; i < args.size; i += 16) {
    const F16 v = row_values(x, residual, i, min_i64(16, args.size - i));
    squares = squares + v * v;
  }
  const float mean = hsum(squares) / static_cast<float>(args.size);
  const F16 scale = set1(1.0f / __builtin_sqrtf(mean + args.eps));
  const T* source = residual ? residual : x;
  for (int64_t i = 0; i < args.size; i += 16) {
    const int64_t n = min_i64(16, args.size - i);
    const F16 normed = rounded<T>(load_some(source + i, n) * scale);  // before the product, as the families' own code
    store_some(out + i, n, normed * load_some(weight + i, n));
  }
}

void rms_norm(Pool& pool, const RmsNormArgs& args) {
  parallel_for(pool, ceil_div(args.num_rows, kRowsPerTask), [&](int64_t task, int) {
    const int64_t end = min_i64(args.num_rows, (task + 1) * kRowsPerTask);
    for (int64_t row = task * kRowsPerTask; row < end; ++row) {
      if (args.dtype == DType::bf16) {
        rms_norm_row<bf16>(args, row);
      } else {
        rms_norm_row<float>(args, row);
      }
    }
  });
}

// With zeros in the lanes from n on.
inline F16 first_lanes(F16 x, int64_t n) {
  if (n == 16) return x;
  float lanes[16];
  store(lanes, x);
  return load_n(lanes, n);
}

template <class T>
void layer_norm_row(const LayerNormArgs& args, int64_t row) {
  const T* x = static_cast<const T*>(args.x) + row * args.x_stride;
  T* residual = args.residual ? static_cast<T*>(args.residual) + row * args.size : nullptr;
  T* out = static_cast<T*>(args.out) + row * args.size;
  const T* weight = static_cast<const T*>(args.weight);
  const T* bias = static_cast<const T*>(args.bias);
  F16 sums = zero();
  for (int64_t i = 0; i < args.size; i += 16) {
    sums = sums + row_values(x, residual, i, min_i64(16, args.size - i));
  }
  const T* source = residual ? residual : x;
  const float mean = hsum(sums) / static_cast<float>(args.size);
  F16 squares = zero();
  for (int64_t i = 0; i < args.size; i += 16) {
    const int64_t n = min_i64(16, args.size - i);
    const F16 centered = first_lanes(load_some(source + i, n) - set1(mean), n);
    squares = squares + centered * centered;
  }
  const F16 scale = set1(1.0f / __builtin_sqrtf(hsum(squares) / static_cast<float>(args.size) + args.eps));
  for (int64_t i = 0; i < args.size; i += 16) {
    const int64_t n = min_i64(16, args.size - i);
    F16 normed = (load_some(source + i, n) - set1(mean)) * scale * load_some(weight + i, n);
    if (bias != nullptr) normed = normed + load_some(bias + i, n);
    store_some(out + i, n, normed);
  }
}

void layer_norm(Pool& pool, const LayerNormArgs& args) {
  parallel_for(pool, ceil_div(args.num_rows, kRowsPerTask), [&](int64_t task, int) {
    const int64_t end = min_i64(args.num_rows, (task + 1) * kRowsPerTask);
    for (int64_t row = task * kRowsPerTask; row < end; ++row) {
      if (args.dtype == DType::bf16) {
        layer_norm_row<bf16>(args, row);
      } else {
        layer_norm_row<float>(args, row);
      }
    }
  });
}

inline F16 relu(F16 x) { return max(zero(), x); }  // in this order: NaN passes through
inline F16 relu2(F16 x) { return relu(x) * relu(x); }

// fn(gate), and up(up): what is multiplied.
template <class T, class Fn, class Up>
void gate(const GatedActivationArgs& args, int64_t row, int64_t first, const Fn& fn, const Up& up) {
  const T* gates = static_cast<const T*>(args.x) + row * args.x_stride;
  const T* ups = gates + args.size;
  T* out = static_cast<T*>(args.out) + row * args.size;
  const int64_t end = min_i64(args.size, first + kColumnsPerTask);
  for (int64_t i = first; i < end; i += 16) {
    const int64_t n = min_i64(16, end - i);
    store_some(out + i, n, rounded<T>(fn(load_some(gates + i, n))) * up(load_some(ups + i, n)));
  }
}

template <class T>
void clamped_gate(const GatedActivationArgs& args, int64_t row, int64_t first) {
  const F16 limit = set1(args.limit), alpha = set1(args.alpha), offset = set1(args.offset);
  gate<T>(
      args, row, first,
      [=](F16 x) {
        const F16 cut = min(limit, x);  // in this order: NaN passes through
        return cut * sigmoid(alpha * cut);
      },
      [=](F16 x) { return max(zero() - limit, min(limit, x)) + offset; });
}

template <class T>
void gate_by(const GatedActivationArgs& args, int64_t row, int64_t first) {
  const auto as_it_is = [](F16 x) { return x; };
  switch (args.activation) {
    case Activation::silu:
      return gate<T>(args, row, first, [](F16 x) { return silu(x); }, as_it_is);
    case Activation::gelu:
      return gate<T>(args, row, first, [](F16 x) { return gelu(x); }, as_it_is);
    case Activation::gelu_tanh:
      return gate<T>(args, row, first, [](F16 x) { return gelu_tanh(x); }, as_it_is);
    case Activation::clamped_silu:
      return clamped_gate<T>(args, row, first);
    case Activation::relu:
      return gate<T>(args, row, first, relu, as_it_is);
    case Activation::relu2:
      return gate<T>(args, row, first, relu2, as_it_is);
    case Activation::none:
      return gate<T>(args, row, first, as_it_is, as_it_is);
  }
}

void gated_activation(Pool& pool, const GatedActivationArgs& args) {
  const int64_t tasks_per_row = ceil_div(args.size, kColumnsPerTask);
  parallel_for(pool, args.num_rows * tasks_per_row, [&](int64_t task, int) {
    const int64_t row = task / tasks_per_row, first = task % tasks_per_row * kColumnsPerTask;
    if (args.dtype == DType::bf16) {
      gate_by<bf16>(args, row, first);
    } else {
      gate_by<float>(args, row, first);
    }
  });
}

template <class T, class Fn>
void transform_part(const TransformArgs& args, int64_t row, int64_t first, const Fn& fn) {
  const T* x = static_cast<const T*>(args.x) + row * args.x_stride;
  const T* addend = args.addend != nullptr ? static_cast<const T*>(args.addend) + row * args.addend_stride : nullptr;
  T* out = static_cast<T*>(args.out) + row * args.size;
  const int64_t end = min_i64(args.size, first + kColumnsPerTask);
  const F16 factor = set1(args.factor);
  for (int64_t i = first; i < end; i += 16) {
    const int64_t n = min_i64(16, end - i);
    F16 result = factor * fn(load_some(x + i, n));
    if (addend != nullptr) result = result + load_some(addend + i, n);
    store_some(out + i, n, result);
  }
}

template <class T>
void transform_by(const TransformArgs& args, int64_t row, int64_t first) {
  switch (args.activation) {
    case Activation::silu:
      return transform_part<T>(args, row, first, [](F16 x) { return silu(x); });
    case Activation::gelu:
      return transform_part<T>(args, row, first, [](F16 x) { return gelu(x); });
    case Activation::gelu_tanh:
      return transform_part<T>(args, row, first, [](F16 x) { return gelu_tanh(x); });
    case Activation::relu:
      return transform_part<T>(args, row, first, relu);
    case Activation::relu2:
      return transform_part<T>(args, row, first, relu2);
    case Activation::clamped_silu:
    case Activation::none:
      return transform_part<T>(args, row, first, [](F16 x) { return x; });
  }
}

void transform(Pool& pool, const TransformArgs& args) {
  const int64_t tasks_per_row = ceil_div(args.size, kColumnsPerTask);
  parallel_for(pool, args.num_rows * tasks_per_row, [&](int64_t task, int) {
    const int64_t row = task / tasks_per_row, first = task % tasks_per_row * kColumnsPerTask;
    if (args.dtype == DType::bf16) {
      transform_by<bf16>(args, row, first);
    } else {
      transform_by<float>(args, row, first);
    }
  });
}

template <class T, class Fn>
void multiply_part(const MultiplyArgs& args, int64_t row, int64_t first, const Fn& fn) {
  const T* x = static_cast<const T*>(args.x) + row * args.x_stride;
  const T* gate = static_cast<const T*>(args.gate) + row * args.gate_stride;
  T* out = static_cast<T*>(args.out) + row * args.size;
  const int64_t end = min_i64(args.size, first + kColumnsPerTask);
  for (int64_t i = first; i < end; i += 16) {
    const int64_t n = min_i64(16, end - i);
    store_some(out + i, n, load_some(x + i, n) * fn(load_some(gate + i, n)));
  }
}

template <class T>
void multiply_by(const MultiplyArgs& args, int64_t row, int64_t first) {
  switch (args.activation) {
    case GateActivation::none:
      return multiply_part<T>(args, row, first, [](F16 x) { return x; });
    case GateActivation::silu:
      return multiply_part<T>(args, row, first, [](F16 x) { return silu(x); });
    case GateActivation::sigmoid:
      return multiply_part<T>(args, row, first, [](F16 x) { return sigmoid(x); });
  }
}

void multiply(Pool& pool, const MultiplyArgs& args) {
  const int64_t tasks_per_row = ceil_div(args.size, kColumnsPerTask);
  parallel_for(pool, args.num_rows * tasks_per_row, [&](int64_t task, int) {
    const int64_t row = task / tasks_per_row, first = task % tasks_per_row * kColumnsPerTask;
    if (args.dtype == DType::bf16) {
      multiply_by<bf16>(args, row, first);
    } else {
      multiply_by<float>(args, row, first);
    }
  });
}

// `values`: room for the group.
template <class T>
void gated_rms_norm_group(const GatedRmsNormArgs& args, int64_t row, int64_t group, float* values) {
  const T* x = static_cast<const T*>(args.x) + row * args.x_stride + group * args.size;
  const T* gate = static_cast<const T*>(args.gate) + row * args.gate_stride + group * args.size;
  const T* weight = static_cast<const T*>(args.weight) + group * args.weight_stride;
  T* out = static_cast<T*>(args.out) + (row * args.num_groups + group) * args.size;
  F16 squares = zero();
  for (int64_t i = 0; i < args.size; i += 16) {
    const int64_t n = min_i64(16, args.size - i);
    F16 v = load_some(x + i, n);
    if (args.gate_first) v = v * silu(load_some(gate + i, n));
    store_some(values + i, n, v);
    squares = squares + v * v;
  }
  const F16 scale = set1(1.0f / __builtin_sqrtf(hsum(squares) / static_cast<float>(args.size) + args.eps));
  for (int64_t i = 0; i < args.size; i += 16) {
    const int64_t n = min_i64(16, args.size - i);
    const F16 normed = load_some(values + i, n) * scale * load_some(weight + i, n);
    store_some(out + i, n, args.gate_first ? normed : normed * silu(load_some(gate + i, n)));
  }
}

void gated_rms_norm(Pool& pool, const GatedRmsNormArgs& args) {
  const int64_t num_parts = args.num_rows * args.num_groups;
  parallel_for(pool, ceil_div(num_parts, kRowsPerTask), [&](int64_t task, int thread) {
    float* values = static_cast<float*>(pool.scratch(thread, args.size * sizeof(float)));
    const int64_t end = min_i64(num_parts, (task + 1) * kRowsPerTask);
    for (int64_t part = task * kRowsPerTask; part < end; ++part) {
      const int64_t row = part / args.num_groups, group = part % args.num_groups;
      if (args.dtype == DType::bf16) {
        gated_rms_norm_group<bf16>(args, row, group, values);
      } else {
        gated_rms_norm_group<float>(args, row, group, values);
      }
    }
  });
}

template <class T>
bool has_not_finite(const T* x, int64_t n, T mask) {
  T found = 0;
  for (int64_t i = 0; i < n; ++i) found |= static_cast<T>((x[i] & mask) == mask);
  return found != 0;
}

bool is_finite(Pool& pool, const IsFiniteArgs& args) {
  int found = 0;
  const int64_t per_task = kBytesPerTask / args.element_bytes;
  parallel_for(pool, ceil_div(args.num_elements, per_task), [&](int64_t task, int) {
    if (__atomic_load_n(&found, __ATOMIC_RELAXED) != 0) return;
    const int64_t first = task * per_task, n = min_i64(per_task, args.num_elements - first);
    const bool here = args.element_bytes == 2
                          ? has_not_finite(static_cast<const uint16_t*>(args.x) + first, n,
                                           static_cast<uint16_t>(args.exponent_mask))
                          : has_not_finite(static_cast<const uint32_t*>(args.x) + first, n, args.exponent_mask);
    if (here) __atomic_store_n(&found, 1, __ATOMIC_RELAXED);
  });
  return found == 0;
}

}  // namespace

extern const ElementwiseKernels elementwise_kernels;
const ElementwiseKernels elementwise_kernels = {rms_norm, layer_norm, gated_activation, transform, multiply, gated_rms_norm, is_finite};

}  // namespace quire::QUIRE_TIER
