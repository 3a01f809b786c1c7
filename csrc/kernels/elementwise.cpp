// One pass over rows of activations: memory bound, so written once for all tiers on F16.
#include "quire/elementwise.h"

#include "simd/simd.h"

namespace quire::QUIRE_TIER {
namespace {

constexpr int64_t kRowsPerTask = 4;

template <class T>
inline F16 row_values(const T* x, T* residual, int64_t i, int64_t n) {
  if (residual == nullptr) return n == 16 ? load(x + i) : load_n(x + i, n);
  const F16 sum = n == 16 ? load(x + i) + load(residual + i) : load_n(x + i, n) + load_n(residual + i, n);
  store_n(residual + i, n, sum);
  return n == 16 ? load(residual + i) : load_n(residual + i, n);  // as rounded
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
    T normed[16];  // rounded before the product, as the families' own code does
    store(normed, load_n(source + i, n) * scale);
    store_n(out + i, n, load(normed) * load_n(weight + i, n));
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

}  // namespace

extern const ElementwiseKernels elementwise_kernels;
const ElementwiseKernels elementwise_kernels = {rms_norm};

}  // namespace quire::QUIRE_TIER
