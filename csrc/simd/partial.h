// Up to sixteen numbers at a time: whole vectors take the branch without a mask.
#pragma once

#include "simd/simd.h"

namespace quire::QUIRE_TIER {

template <class T>
static inline F16 load_some(const T* p, int64_t n) {
  return n == 16 ? load(p) : load_n(p, n);
}
template <class T>
static inline void store_some(T* p, int64_t n, F16 x) {
  n == 16 ? store(p, x) : store_n(p, n, x);
}
// As a number of T, which lies between two operations that round separately.
template <class T>
static inline F16 rounded(F16 x) {
  T values[16];
  store(values, x);
  return load(values);
}

}  // namespace quire::QUIRE_TIER
