// Addresses within a KV cache, and the kernels that write it (attention_cache.cpp).
#pragma once

#include "quire/attention.h"
#include "simd/simd.h"

namespace quire::QUIRE_TIER {

void rope_and_cache(Pool& pool, const RopeAndCacheArgs& args);
void write_kv(Pool& pool, const WriteKvArgs& args);
void copy_pages(Pool& pool, const CopyPagesArgs& args);

namespace {

// Elements that lie together along the contracted dimension: two for the products in pairs of bfloat16.
template <class T>
constexpr int64_t kPair = 1;
template <>
constexpr int64_t kPair<bf16> = 2;
template <>
constexpr int64_t kPair<uint8_t> = 2;  // codes of eight-bit floats

template <class T>
inline T* key_page(const KvCache& cache, int64_t page, int64_t kv_head) {
  return static_cast<T*>(cache.data) + (page * cache.num_kv_heads + kv_head) * 2 * cache.block_size * cache.head_size;
}
template <class T>
inline T* value_page(const KvCache& cache, int64_t page, int64_t kv_head) {
  return key_page<T>(cache, page, kv_head) + cache.block_size * cache.head_size;
}

template <class T>
inline F16 load_some(const T* p, int64_t n) {
  return n >= 16 ? load(p) : load_n(p, n);
}
template <class T>
inline void store_some(T* p, int64_t n, F16 x) {
  if (n >= 16) {
    store(p, x);
  } else {
    store_n(p, n, x);
  }
}

}  // namespace
}  // namespace quire::QUIRE_TIER
