#include "quire/gemm.h"

#include "simd/simd.h"

namespace quire::QUIRE_TIER {

extern const GemmKernels gemm_kernels;
const GemmKernels gemm_kernels = {0};

}  // namespace quire::QUIRE_TIER
