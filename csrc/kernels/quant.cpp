#include "quire/quant.h"

#include "simd/simd.h"

namespace quire::QUIRE_TIER {

extern const QuantKernels quant_kernels;
const QuantKernels quant_kernels = {0};

}  // namespace quire::QUIRE_TIER
