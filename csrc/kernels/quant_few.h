// A few rows times one panel of int8 or int4 weights, read from end to end: one stream from memory.
//
// dot_few_bytes and dot_few_nibbles, for 1 .. kFewByteRows and kFewNibbleRows rows. Other tiers take panels as they take
// four: 0 rows are few.
#pragma once

#include "kernels/quant_tasks.h"

namespace quire::QUIRE_TIER {

// The weights of one panel, and those that are wanted after its end.
struct WeightPanel {
  const uint8_t* packed;
  int64_t bytes;
  const uint8_t* next;

  const uint8_t* ahead_of(int64_t at) const {
    const int64_t ahead = at + kFetchAhead;
    return ahead < bytes ? packed + ahead : next + (ahead - bytes);
  }
};

// Groups of int4 weights: their scales, and what the sums of each begin with.
struct GroupScales {
  int64_t units;          // of 32 inputs in a group
  const bf16* scales;     // [groups][16]
  const int32_t* starts;  // [rows][groups]
  int64_t groups;
};

// The rows of x that a panel is multiplied with.
struct InputRows {
  const int8_t* q;  // [count][stride]
  int64_t stride;
  int64_t count;
};

}  // namespace quire::QUIRE_TIER

#if defined(QUIRE_SIMD_AVX512) && !defined(QUIRE_TIER_AMX)
#include "kernels/quant_few_vnni.h"
#elif defined(QUIRE_TIER_AVX2)
#include "kernels/quant_few_avx2.h"
#else

namespace quire::QUIRE_TIER {

constexpr int64_t kFewByteRows = 0, kFewNibbleRows = 0;

static inline void dot_few_bytes(const InputRows&, const WeightPanel&, const int32_t*, int32_t*) {}
static inline void dot_few_nibbles(const InputRows&, const WeightPanel&, const GroupScales&, float*) {}

}  // namespace quire::QUIRE_TIER

#endif
