#include "quire/attention.h"

#include "simd/simd.h"

namespace quire::QUIRE_TIER {

extern const AttentionKernels attention_kernels;
const AttentionKernels attention_kernels = {0};

}  // namespace quire::QUIRE_TIER
