// Products with packed weights. Every output is one chain of sums over K in tiles of 32 (see the headers), never split
// and in the same order whatever the number of rows and threads: a row's result does not depend on its batch.
#include "quire/gemm.h"

#include "kernels/gemm_parts.h"
#include "kernels/gemm_vector.h"
#include "kernels/latent_parts.h"
#if defined(QUIRE_TIER_AVX512_BF16)
#include "kernels/gemm_pairs.h"
#endif
#if defined(QUIRE_TIER_AMX) || defined(QUIRE_TIER_AMX_EMULATED)
#include "kernels/gemm_tiles.h"
#endif

namespace quire::QUIRE_TIER {
namespace {

void linear(Pool& pool, const LinearArgs& args) {
  if (args.num_rows == 0 || args.output_size == 0) return;
  if (args.dtype == DType::f32) return linear_vector<float>(pool, args);
#if defined(QUIRE_TIER_AMX) || defined(QUIRE_TIER_AMX_EMULATED)
  linear_tiles(pool, args);
#else
#if defined(QUIRE_TIER_AVX512_BF16)
  if (args.num_rows > kStreamRows) return linear_pairs(pool, args);
#endif
  linear_vector<bf16>(pool, args);
#endif
}

LinearArgs product_of_head(const HeadLinearArgs& args, int64_t head) {
  const int64_t size = bytes_of(args.dtype);
  const int64_t weight_size = ceil_div(args.output_size, kPanelSize) * ceil_div(args.input_size, kTileDepth) * kTileSize;
  LinearArgs product{};
  product.x = static_cast<const char*>(args.x) + head * args.x_head_stride * size;
  product.x_stride = args.x_stride;
  product.weight = static_cast<const char*>(args.weight) + head * weight_size * size;
  product.out = static_cast<char*>(args.out) + head * args.out_head_stride * size;
  product.out_stride = args.out_stride;
  product.num_rows = args.num_rows;
  product.input_size = args.input_size;
  product.output_size = args.output_size;
  product.dtype = product.bias_dtype = product.out_dtype = args.dtype;
  return product;
}

// Tasks of all heads at once.
template <class T>
void head_linear_vector(Pool& pool, const HeadLinearArgs& args) {
  const LinearArgs first = product_of_head(args, 0);
  const Division d = divide(first, 1, kVectorRows, args.num_rows <= kStreamRows ? kStreams : kVectorPanels);
  parallel_for(pool, args.num_heads * d.num_tasks(), [&](int64_t task, int thread) {
    const LinearArgs product = product_of_head(args, task / d.num_tasks());
    VectorTask<T>(pool, product, d, task % d.num_tasks(), thread).run();
  });
}

}  // namespace

// Where many rows have kernels of their own, the product of each head is large enough for all threads.
void head_linear(Pool& pool, const HeadLinearArgs& args) {
  if (args.num_rows == 0 || args.num_heads == 0 || args.output_size == 0) return;
  if (args.dtype == DType::f32) return head_linear_vector<float>(pool, args);
  if (args.num_rows <= kStreamRows) return head_linear_vector<bf16>(pool, args);
  for (int64_t head = 0; head < args.num_heads; ++head) linear(pool, product_of_head(args, head));
}

extern const GemmKernels gemm_kernels;
const GemmKernels gemm_kernels = {linear, pack_rows, read_rows, run_ceiling};

}  // namespace quire::QUIRE_TIER
