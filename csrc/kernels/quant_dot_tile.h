// AMX: u8 weights as they are stored are B tiles, rows of q are A tiles. Up to 16 rows: one row of tiles by four
// panels. More: 2 x 2 tiles, each A and B tile loaded for two products. On the processor a few rows go to VNNI, which
// needs no tiles and unpacks nibbles in registers; emulated, they go to tiles too.
#pragma once

#include "simd/tile.h"

#if defined(QUIRE_TIER_AMX)
#include "kernels/quant_dot_vnni.h"
#endif

namespace quire::QUIRE_TIER {

constexpr int64_t kBlockQuads = 128;
constexpr int64_t kTileQuads = 16;

#if defined(QUIRE_TIER_AMX)
static inline bool goes_to_vnni(int64_t rows) { return rows <= kVnniRows; }
#else
static inline bool goes_to_vnni(int64_t) { return false; }
#endif

class DotScope {
 public:
  // tile_quads: 16, or 8 where the groups of k are that short.
  DotScope(int64_t rows, int64_t tile_quads) : has_tiles_(!goes_to_vnni(rows)) {
    if (!has_tiles_) return;
    const int tile_rows = static_cast<int>(min_i64(rows, 16)), quads = static_cast<int>(tile_quads);
    TileConfig config;
    for (int tile = 0; tile < 4; ++tile) config.set(tile, tile_rows, 64);
    for (int tile = 4; tile < 6; ++tile) config.set(tile, tile_rows, 4 * quads);
    for (int tile = 6; tile < 8; ++tile) config.set(tile, quads, 64);
    tile_configure(config);
  }
  ~DotScope() {
    if (has_tiles_) tile_release();
  }
  DotScope(const DotScope&) = delete;
  DotScope& operator=(const DotScope&) = delete;

 private:
  bool has_tiles_;
};

constexpr int64_t kSumsStride = kDotCols * 4;

// Tiles 0 .. 3 = sums of R row tiles x P panels, tile 2 r + p; R = 1 uses all four as panels.
template <int T>
static inline void load_sums(const DotBlock& block, int64_t m, int64_t p) {
  tile_load<T>(block.sums + m * kDotCols + p * kPanelSize, kSumsStride);
}
template <int T>
static inline void store_sums(const DotBlock& block, int64_t m, int64_t p) {
  tile_store<T>(block.sums + m * kDotCols + p * kPanelSize, kSumsStride);
}
static inline void fetch_tile(const uint8_t* next) {
  for (int line = 0; line < 16; ++line) prefetch_l2(next + 64 * line);
}

template <int P>
static inline void dot_panel(const uint8_t* w, const uint8_t* next, bool has_next) {
  tile_load<6 + P % 2>(w, 64);
  tile_dot_s8u8<P, 4, 6 + P % 2>();
  if (has_next) fetch_tile(next);
}

// One row of tiles by all panels of the block.
static inline void dot_tile_row(const DotBlock& block, int64_t m, int64_t tile_quads, bool has_next) {
  const int64_t panels = block.panels;
  const PanelOffsets& offsets = block.w_offsets;
  load_sums<0>(block, m, 0);
  if (panels > 1) load_sums<1>(block, m, 1);
  if (panels > 2) load_sums<2>(block, m, 2);
  if (panels > 3) load_sums<3>(block, m, 3);
  for (int64_t k = 0; k < block.quads; k += tile_quads) {
    const uint8_t* w = block.w + k * 64;
    const uint8_t* next = has_next ? block.next + k * 64 : w;
    tile_load<4>(block.q + m * block.q_stride + k * 4, block.q_stride);
    dot_panel<0>(w, next, has_next);
    if (panels > 1) dot_panel<1>(w + offsets.at(1), next + offsets.at(1), has_next);
    if (panels > 2) dot_panel<2>(w + offsets.at(2), next + offsets.at(2), has_next);
    if (panels > 3) dot_panel<3>(w + offsets.at(3), next + offsets.at(3), has_next);
  }
  store_sums<0>(block, m, 0);
  if (panels > 1) store_sums<1>(block, m, 1);
  if (panels > 2) store_sums<2>(block, m, 2);
  if (panels > 3) store_sums<3>(block, m, 3);
}

// Two row tiles by two panels.
static inline void dot_tile_square(const DotBlock& block, int64_t m, int64_t p, int64_t tile_quads, bool has_next) {
  load_sums<0>(block, m, p);
  load_sums<1>(block, m, p + 1);
  load_sums<2>(block, m + 16, p);
  load_sums<3>(block, m + 16, p + 1);
  for (int64_t k = 0; k < block.quads; k += tile_quads) {
    const int8_t* q = block.q + m * block.q_stride + k * 4;
    const uint8_t* w = block.w + block.w_offsets.at(p) + k * 64;
    tile_load<4>(q, block.q_stride);
    tile_load<5>(q + 16 * block.q_stride, block.q_stride);
    tile_load<6>(w, 64);
    tile_load<7>(w + block.w_offsets.odd, 64);
    tile_dot_s8u8<0, 4, 6>();
    tile_dot_s8u8<2, 5, 6>();
    tile_dot_s8u8<1, 4, 7>();
    tile_dot_s8u8<3, 5, 7>();
    if (has_next) {
      fetch_tile(block.next + block.w_offsets.at(p) + k * 64);
      fetch_tile(block.next + block.w_offsets.at(p + 1) + k * 64);
    }
  }
  store_sums<0>(block, m, p);
  store_sums<1>(block, m, p + 1);
  store_sums<2>(block, m + 16, p);
  store_sums<3>(block, m + 16, p + 1);
}

// Rows beyond `rows` in a last tile of a taller block are computed from whatever lies there, and dropped.
static inline void tile_dot_block(const DotBlock& block) {
  const int64_t tile_quads = min_i64(kTileQuads, block.quads);
  const bool has_next = block.next != nullptr;
  if (block.rows <= 16 || block.panels < kDotPanels) {
    for (int64_t m = 0; m < block.rows; m += 16) dot_tile_row(block, m, tile_quads, has_next && m == 0);
    return;
  }
  const int64_t paired_rows = ceil_div(block.rows, 16) / 2 * 32;
  for (int64_t p = 0; p < kDotPanels; p += 2) {
    for (int64_t m = 0; m < paired_rows; m += 32) dot_tile_square(block, m, p, tile_quads, has_next && m == 0);
  }
  if (paired_rows < block.rows) dot_tile_row(block, paired_rows, tile_quads, false);
}

static inline void tile_dot_group(const GroupBlock& group) {
  dot_unpacked_group(group, [](const DotBlock& block) { tile_dot_block(block); });
}

#if defined(QUIRE_TIER_AMX)
static inline void dot_block(const DotBlock& block) {
  goes_to_vnni(block.rows) ? vnni_dot_block(block) : tile_dot_block(block);
}
static inline void dot_group(const GroupBlock& group) {
  goes_to_vnni(group.rows) ? vnni_dot_group(group) : tile_dot_group(group);
}
#else
static inline void dot_block(const DotBlock& block) { tile_dot_block(block); }
static inline void dot_group(const GroupBlock& group) { tile_dot_group(group); }
#endif

}  // namespace quire::QUIRE_TIER
