// Between rows of weights and their packed form.
#pragma once

#include "quire/quant.h"
#include "simd/simd.h"

namespace quire::QUIRE_TIER {

bool pack_int8(Pool& pool, const QuantPackArgs& args);
bool pack_int4(Pool& pool, const QuantPackArgs& args);
void gather_int8(Pool& pool, const QuantGatherArgs& args);
void gather_int4(Pool& pool, const QuantGatherArgs& args);

}  // namespace quire::QUIRE_TIER
