// Lanes: one register of floats, whatever its width. The inner loops of products keep many of them, and an F16 of
// several registers would spill.
#pragma once

#include "quire/gemm.h"
#include "simd/simd.h"

namespace quire::QUIRE_TIER {

#if defined(QUIRE_SIMD_AVX512)

using Lanes = __m512;
constexpr int kMaxRows = 11;  // rows of a register block: two chains each, and two registers of weights
static inline Lanes lanes_of(float x) { return _mm512_set1_ps(x); }
static inline Lanes lanes_load(const float* p) { return _mm512_loadu_ps(p); }
static inline void lanes_store(float* p, Lanes x) { _mm512_storeu_ps(p, x); }
static inline Lanes lanes_add(Lanes a, Lanes b) { return _mm512_add_ps(a, b); }
static inline Lanes lanes_mul(Lanes a, Lanes b) { return _mm512_mul_ps(a, b); }
// a * b + c for exact products.
static inline Lanes lanes_fma(Lanes a, Lanes b, Lanes c) { return _mm512_fmadd_ps(a, b, c); }
static inline void lanes_split(const bf16* p, Lanes& even, Lanes& odd) {
  const __m512i pairs = _mm512_loadu_si512(p);
  even = _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16));
  odd = _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
}

#elif defined(QUIRE_TIER_AVX2)

using Lanes = __m256;
constexpr int kMaxRows = 4;  // two registers of outputs each, for one chain at a time: see kWide
static inline Lanes lanes_of(float x) { return _mm256_set1_ps(x); }
static inline Lanes lanes_load(const float* p) { return _mm256_loadu_ps(p); }
static inline void lanes_store(float* p, Lanes x) { _mm256_storeu_ps(p, x); }
static inline Lanes lanes_add(Lanes a, Lanes b) { return _mm256_add_ps(a, b); }
static inline Lanes lanes_mul(Lanes a, Lanes b) { return _mm256_mul_ps(a, b); }
static inline Lanes lanes_fma(Lanes a, Lanes b, Lanes c) { return _mm256_fmadd_ps(a, b, c); }
static inline void lanes_split(const bf16* p, Lanes& even, Lanes& odd) { split_half(p, even, odd); }

#else

// Four floats: a register of every processor with vectors at all, and scalars elsewhere.
typedef float Lanes __attribute__((vector_size(16)));
typedef uint32_t LaneBits __attribute__((vector_size(16)));
constexpr int kMaxRows = 6;
static inline Lanes lanes_of(float x) { return Lanes{x, x, x, x}; }
static inline Lanes lanes_load(const float* p) {
  Lanes x;
  __builtin_memcpy(&x, p, sizeof(x));
  return x;
}
static inline void lanes_store(float* p, Lanes x) { __builtin_memcpy(p, &x, sizeof(x)); }
static inline Lanes lanes_add(Lanes a, Lanes b) { return a + b; }
static inline Lanes lanes_mul(Lanes a, Lanes b) { return a * b; }
static inline Lanes lanes_fma(Lanes a, Lanes b, Lanes c) { return a * b + c; }
static inline void lanes_split(const bf16* p, Lanes& even, Lanes& odd) {
  LaneBits pairs;
  __builtin_memcpy(&pairs, p, sizeof(pairs));
  even = reinterpret_cast<Lanes>(pairs << 16);
  odd = reinterpret_cast<Lanes>(pairs & 0xffff0000u);
}

#endif

constexpr int kLanes = sizeof(Lanes) / sizeof(float);

// Sixteen lanes of a pair of inputs in a tile, from lane `first` on: weights of the first input, and of the second.
static inline void load_pair(const bf16* tile, int pair, int first, Lanes& even, Lanes& odd) {
  lanes_split(tile + pair * 32 + 2 * first, even, odd);
}
static inline void load_pair(const float* tile, int pair, int first, Lanes& even, Lanes& odd) {
  even = lanes_load(tile + pair * 32 + first);
  odd = lanes_load(tile + pair * 32 + 16 + first);
}

// The same of one input of the pair: 0 = the first.
template <int I, class T>
static inline Lanes load_one(const T* tile, int pair, int first) {
  Lanes of_pair[2];
  load_pair(tile, pair, first, of_pair[0], of_pair[1]);
  return of_pair[I];
}

// One step of a chain: bfloat16 products are exact in float32, so one rounding; float32 products round, then the sum.
template <class T>
static inline Lanes chain(Lanes a, Lanes b, Lanes c);
template <>
inline Lanes chain<bf16>(Lanes a, Lanes b, Lanes c) {
  return lanes_fma(a, b, c);
}
template <>
inline Lanes chain<float>(Lanes a, Lanes b, Lanes c) {
  return lanes_add(lanes_mul(a, b), c);
}

}  // namespace quire::QUIRE_TIER
