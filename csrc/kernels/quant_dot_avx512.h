// AVX-512 with VNNI.
#pragma once

#include "kernels/quant_dot_vnni.h"

namespace quire::QUIRE_TIER {

constexpr int64_t kBlockQuads = 64;  // 4 KB of each panel: a block of four stays in L1

struct DotScope {
  DotScope(int64_t, int64_t) {}
};
static inline void dot_block(const DotBlock& block) { vnni_dot_block(block); }
static inline void dot_group(const GroupBlock& group) { vnni_dot_group(group); }

}  // namespace quire::QUIRE_TIER
