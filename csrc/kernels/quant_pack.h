// Between rows of weights and their packed form.
#pragma once

#include "quire/quant.h"
#include "simd/simd.h"

namespace quire::QUIRE_TIER {

bool pack_int8(Pool& pool, const QuantPackArgs& args);
bool pack_int4(Pool& pool, const QuantPackArgs& args);
void gather_int8(Pool& pool, const QuantGatherArgs& args);
void gather_int4(Pool& pool, const QuantGatherArgs& args);

// Units of 32 k of a panel of nibbles to bytes [8 quads][16][4] a unit.
static inline void unpack_units(const uint8_t* __restrict packed, int64_t units, uint8_t* __restrict out) {
  for (int64_t u = 0; u < units; ++u, packed += kInt4UnitBytes, out += 2 * kInt4UnitBytes) {
    for (int64_t i = 0; i < kInt4UnitBytes; ++i) {
      out[i] = packed[i] & 15;
      out[kInt4UnitBytes + i] = packed[i] >> 4;
    }
  }
}

}  // namespace quire::QUIRE_TIER
