// The AMX tile unit: 8 registers of 16 rows x 64 bytes. Own inline assembly, because the intrinsics of GCC 12 tell the
// compiler that a tile configuration is 8 bytes long, and it then drops the stores that fill the rest.
// With QUIRE_TIER_AMX_EMULATED the same operations in plain C++, bit for bit.
//
// Source: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, TDPBF16PS and TDPBSSD.
#pragma once

#include "simd/simd.h"

namespace quire::QUIRE_TIER {

// Rows and row bytes of each tile register; 64 bytes, as `ldtilecfg` reads it. Registers not used have 0 and 0.
struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};

  void set(int tile, int num_rows, int num_row_bytes) {
    rows[tile] = static_cast<uint8_t>(num_rows);
    row_bytes[tile] = static_cast<uint16_t>(num_row_bytes);
  }
};
static_assert(sizeof(TileConfig) == 64, "the tile configuration is 64 bytes");

#if defined(QUIRE_TIER_AMX)

// Per thread, and lost to anyone else who uses tiles: load it at the start of every task.
static inline void tile_configure(const TileConfig& config) { asm volatile("ldtilecfg %0" ::"m"(config) : "memory"); }
static inline void tile_release() { asm volatile("tilerelease" ::: "memory"); }
template <int T>
static inline void tile_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(T) : "memory");
}
// Row i of the tile is at p + i * stride_bytes.
template <int T>
static inline void tile_load(const void* p, int64_t stride_bytes) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride_bytes), "i"(T) : "memory");
}
template <int T>
static inline void tile_store(void* p, int64_t stride_bytes) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(stride_bytes), "i"(T) : "memory");
}
// C[m][n] += sum over k of A[m][k] * B[k][n], bfloat16 pairs to float32: an even and an odd chain, then their sum.
template <int C, int A, int B>
static inline void tile_dot_bf16() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B) : "memory");
}
// int8 to int32: both signed.
template <int C, int A, int B>
static inline void tile_dot_s8s8() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B) : "memory");
}
// int8 to int32: A signed, B unsigned.
template <int C, int A, int B>
static inline void tile_dot_s8u8() {
  asm volatile("tdpbsud %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B) : "memory");
}

#elif defined(QUIRE_TIER_AMX_EMULATED)

struct EmulatedTiles {
  TileConfig config;
  alignas(64) uint8_t data[8][16][64];
};
inline thread_local EmulatedTiles tiles_of_thread;

static inline void tile_configure(const TileConfig& config) {
  tiles_of_thread.config = config;
  __builtin_memset(tiles_of_thread.data, 0, sizeof(tiles_of_thread.data));
}
static inline void tile_release() { tiles_of_thread.config = TileConfig{}; }
template <int T>
static inline void tile_zero() {
  __builtin_memset(tiles_of_thread.data[T], 0, sizeof(tiles_of_thread.data[T]));
}
template <int T>
static inline void tile_load(const void* p, int64_t stride_bytes) {
  tile_zero<T>();
  const EmulatedTiles& tiles = tiles_of_thread;
  for (int i = 0; i < tiles.config.rows[T]; ++i) {
    __builtin_memcpy(tiles_of_thread.data[T][i], static_cast<const uint8_t*>(p) + i * stride_bytes,
                     tiles.config.row_bytes[T]);
  }
}
template <int T>
static inline void tile_store(void* p, int64_t stride_bytes) {
  const EmulatedTiles& tiles = tiles_of_thread;
  for (int i = 0; i < tiles.config.rows[T]; ++i) {
    __builtin_memcpy(static_cast<uint8_t*>(p) + i * stride_bytes, tiles.data[T][i], tiles.config.row_bytes[T]);
  }
}
// Shapes that the processor refuses with an exception end the process here too.
static inline void tile_check(int c, int a, int b) {
  const TileConfig& config = tiles_of_thread.config;
  const bool fits = config.rows[c] > 0 && config.rows[c] == config.rows[a] && config.row_bytes[c] == config.row_bytes[b] &&
                    config.row_bytes[a] == 4 * config.rows[b] && config.rows[b] > 0 && config.row_bytes[b] > 0;
  if (!fits) __builtin_trap();
}
template <int C, int A, int B>
static inline void tile_dot_bf16() {
  tile_check(C, A, B);
  EmulatedTiles& tiles = tiles_of_thread;
  for (int m = 0; m < tiles.config.rows[C]; ++m) {
    float even[16] = {}, odd[16] = {}, sums[16];
    bf16 a[32], b[32];
    __builtin_memcpy(a, tiles.data[A][m], 64);
    for (int k = 0; k < tiles.config.rows[B]; ++k) {
      __builtin_memcpy(b, tiles.data[B][k], 64);
      for (int n = 0; n < 16; ++n) {
        even[n] += widen(a[2 * k]) * widen(b[2 * n]);
        odd[n] += widen(a[2 * k + 1]) * widen(b[2 * n + 1]);
      }
    }
    __builtin_memcpy(sums, tiles.data[C][m], 64);
    for (int n = 0; n < tiles.config.row_bytes[C] / 4; ++n) sums[n] += even[n] + odd[n];
    __builtin_memcpy(tiles.data[C][m], sums, 64);
  }
}
template <int C, int A, int B, class BType>
static inline void tile_dot_int8() {
  tile_check(C, A, B);
  EmulatedTiles& tiles = tiles_of_thread;
  for (int m = 0; m < tiles.config.rows[C]; ++m) {
    int32_t sums[16];
    __builtin_memcpy(sums, tiles.data[C][m], 64);
    for (int k = 0; k < tiles.config.rows[B]; ++k) {
      for (int n = 0; n < tiles.config.row_bytes[C] / 4; ++n) {
        for (int i = 0; i < 4; ++i) {
          sums[n] += static_cast<int8_t>(tiles.data[A][m][4 * k + i]) * static_cast<BType>(tiles.data[B][k][4 * n + i]);
        }
      }
    }
    __builtin_memcpy(tiles.data[C][m], sums, 64);
  }
}
template <int C, int A, int B>
static inline void tile_dot_s8s8() {
  tile_dot_int8<C, A, B, int8_t>();
}
template <int C, int A, int B>
static inline void tile_dot_s8u8() {
  tile_dot_int8<C, A, B, uint8_t>();
}

#endif

}  // namespace quire::QUIRE_TIER
