#include "quire/sampling.h"

#include "simd/simd.h"

namespace quire::QUIRE_TIER {

extern const SamplingKernels sampling_kernels;
const SamplingKernels sampling_kernels = {0};

}  // namespace quire::QUIRE_TIER
