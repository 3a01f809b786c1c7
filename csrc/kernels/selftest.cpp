// A small product as every matrix kernel of the tier computes it: the probe of its arithmetic, and of the tile unit.
#include "quire/selftest.h"

#include "simd/simd.h"
#include "simd/bf16_dot.h"
#include "simd/tile.h"

namespace quire::QUIRE_TIER {
namespace {

constexpr int kRows = 16;

#if defined(QUIRE_TIER_AMX) || defined(QUIRE_TIER_AMX_EMULATED)

TileConfig full_tiles() {
  TileConfig config;
  for (int tile = 0; tile < 3; ++tile) config.set(tile, 16, 64);
  return config;
}

void product_bf16(const bf16* a, const bf16* b, float* c) {
  tile_configure(full_tiles());
  tile_zero<0>();
  for (int k = 0; k < kSelfTestDepth; k += 32) {
    tile_load<1>(a + k, kSelfTestDepth * 2);
    tile_load<2>(b + k * 16, 64);
    tile_dot_bf16<0, 1, 2>();
  }
  tile_store<0>(c, 64);
  tile_release();
}

void product_int8(const int8_t* a, const int8_t* b, int32_t* c) {
  tile_configure(full_tiles());
  tile_zero<0>();
  // 64 values, then the 32 that are left, in tiles of half the depth.
  tile_load<1>(a, kSelfTestDepth);
  tile_load<2>(b, 64);
  tile_dot_s8s8<0, 1, 2>();
  tile_store<0>(c, 64);
  TileConfig half = full_tiles();
  half.set(1, 16, 32);
  half.set(2, 8, 64);
  tile_configure(half);
  tile_load<0>(c, 64);
  tile_load<1>(a + 64, kSelfTestDepth);
  tile_load<2>(b + 64 * 16, 64);
  tile_dot_s8s8<0, 1, 2>();
  tile_store<0>(c, 64);
  tile_release();
}

#else

#if defined(QUIRE_TIER_AVX512_BF16)

// What bf16_dot.h builds on: the second product of each pair is added before the first, each with one rounding.
void product_bf16(const bf16* a, const bf16* b, float* c) {
  for (int row = 0; row < kRows; ++row) {
    F16 sums = zero();
    for (int tile = 0; tile < kSelfTestDepth; tile += 32) {
      F16 even = zero(), odd = zero();
      for (int k = tile; k < tile + 32; k += 4) {
        F16 right_even, right_odd;
        load_chain_pairs(b + k * 16, b + (k + 2) * 16, right_even, right_odd);
        const bf16* left = a + row * kSelfTestDepth + k;
        even = add_chain_pairs(set1_pair(left[2], left[0]), right_even, even);
        odd = add_chain_pairs(set1_pair(left[3], left[1]), right_odd, odd);
      }
      sums = sums + (even + odd);
    }
    store(c + row * 16, sums);
  }
}

#else

void product_bf16(const bf16* a, const bf16* b, float* c) {
  for (int row = 0; row < kRows; ++row) {
    F16 sums = zero();
    for (int tile = 0; tile < kSelfTestDepth; tile += 32) {
      F16 even = zero(), odd = zero();
      for (int k = tile; k < tile + 32; k += 2) {
        F16 left_even, left_odd, right_even, right_odd;
        bf16 pair[32];
        for (int i = 0; i < 32; ++i) pair[i] = a[row * kSelfTestDepth + k + i % 2];
        load_pairs(pair, left_even, left_odd);
        load_pairs(b + k * 16, right_even, right_odd);
        even = add_exact_product(left_even, right_even, even);
        odd = add_exact_product(left_odd, right_odd, odd);
      }
      sums = sums + (even + odd);
    }
    store(c + row * 16, sums);
  }
}

#endif

void product_int8(const int8_t* a, const int8_t* b, int32_t* c) {
  for (int row = 0; row < kRows; ++row) {
    for (int column = 0; column < 16; ++column) {
      int32_t sum = 0;
      for (int k = 0; k < kSelfTestDepth; ++k) {
        sum += a[row * kSelfTestDepth + k] * b[k / 4 * 64 + column * 4 + k % 4];
      }
      c[row * 16 + column] = sum;
    }
  }
}

#endif

}  // namespace

extern const SelfTestKernels self_test_kernels;
const SelfTestKernels self_test_kernels = {product_bf16, product_int8};

}  // namespace quire::QUIRE_TIER
