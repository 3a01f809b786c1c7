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

#if defined(QUIRE_TIER_AMX) || defined(QUIRE_TIER_AMX_EMULATED)
using Bf16Product = TileProduct;
#elif defined(QUIRE_TIER_AVX512_BF16)
using Bf16Product = PairProduct;
#else
using Bf16Product = VectorProduct<bf16>;
#endif

void linear(Pool& pool, const LinearArgs& args) {
  if (args.num_rows == 0 || args.output_size == 0) return;
  args.dtype == DType::f32 ? run_one<VectorProduct<float>>(pool, args) : run_one<Bf16Product>(pool, args);
}

LinearArgs args_of_group(const Grouped<LinearArgs>& grouped, int64_t group) {
  const LinearArgs& all = grouped.linear;
  const int64_t num_tiles = packed_panels(all) * ceil_div(all.input_size, kTileDepth);
  LinearArgs args = rows_of_group(grouped, group, all.x_stride * bytes_of(all.dtype),
                                  all.out_stride * bytes_of(all.out_dtype));
  args.weight = static_cast<const char*>(all.weight) + group * num_tiles * kTileSize * bytes_of(all.dtype);
  return args;
}

void grouped_linear(Pool& pool, const Grouped<LinearArgs>& grouped) {
  if (grouped.linear.output_size == 0) return;
  const auto args_of = [&](int64_t group) { return args_of_group(grouped, group); };
  if (grouped.linear.dtype == DType::f32) {
    run_groups<VectorProduct<float>>(pool, grouped, args_of);
  } else {
    run_groups<Bf16Product>(pool, grouped, args_of);
  }
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
  const Division d = divide(first, 1, kVectorRows, args.num_rows <= kStreamRows ? kStreamPanels : kVectorPanels);
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
const GemmKernels gemm_kernels = {linear, grouped_linear, pack_rows, read_rows, run_ceiling};

}  // namespace quire::QUIRE_TIER
