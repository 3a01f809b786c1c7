// Plain C++.
#pragma once

namespace quire::QUIRE_TIER {

constexpr int64_t kBlockQuads = 64;

struct DotScope {
  DotScope(int64_t, int64_t) {}
};

static inline void dot_block(const DotBlock& block) {
  for (int64_t m = 0; m < block.rows; ++m) {
    for (int64_t p = 0; p < block.panels; ++p) {
      int32_t* out = block.sums + m * kDotCols + p * kPanelSize;
      uint32_t sums[kPanelSize];  // partial sums with the offset may pass 2 ** 31; the whole never does
      __builtin_memcpy(sums, out, sizeof(sums));
      const int8_t* q = block.q + m * block.q_stride;
      const uint8_t* w = block.w + block.w_offsets.at(p);
      for (int64_t k = 0; k < block.quads; ++k, q += 4, w += 64) {
        for (int n = 0; n < kPanelSize; ++n) {
          const uint8_t* v = w + 4 * n;
          sums[n] += static_cast<uint32_t>(q[0] * v[0] + q[1] * v[1] + q[2] * v[2] + q[3] * v[3]);
        }
      }
      __builtin_memcpy(out, sums, sizeof(sums));
    }
  }
}

static inline void dot_group(const GroupBlock& group) {
  dot_unpacked_group(group, [](const DotBlock& block) { dot_block(block); });
}

}  // namespace quire::QUIRE_TIER
