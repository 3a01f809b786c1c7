// Products with packed weights. Every output is one chain of sums over K in tiles of 32 (see the headers), never split
// and in the same order whatever the number of rows and threads: a row's result does not depend on its batch.
#include "quire/gemm.h"

#include "kernels/gemm_parts.h"
#include "kernels/gemm_vector.h"
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

}  // namespace

extern const GemmKernels gemm_kernels;
const GemmKernels gemm_kernels = {linear, pack_rows, read_rows, run_ceiling};

}  // namespace quire::QUIRE_TIER
