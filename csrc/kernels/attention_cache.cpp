// Rotary embedding, and the writing and copying of pages. One pass over the tokens of a step.
#include "kernels/attention_cache.h"

#include "kernels/attention_fp8.h"

namespace quire::QUIRE_TIER {
namespace {

constexpr int64_t kTokensPerTask = 8;

// As `rms_norm` of elementwise.cpp does a row.
template <class T>
void normalise_head(const T* x, const T* weight, float eps, int64_t size, T* out) {
  F16 squares = zero();
  for (int64_t i = 0; i < size; i += 16) {
    const F16 v = load_some(x + i, size - i);
    squares = squares + v * v;
  }
  const F16 scale = set1(1.0f / __builtin_sqrtf(hsum(squares) / static_cast<float>(size) + eps));
  for (int64_t i = 0; i < size; i += 16) {
    T normed[16];
    store(normed, load_some(x + i, size - i) * scale);
    store_some(out + i, size - i, load(normed) * load_some(weight + i, size - i));
  }
}

// Element i and element i + half are a pair. `x` may be `out`.
template <class T>
void rotate_head(const T* x, const float* cos, const float* sin, int64_t half, int64_t size, T* out) {
  for (int64_t i = 0; i < half; i += 16) {
    const int64_t n = half - i;
    const F16 first = load_some(x + i, n), second = load_some(x + half + i, n);
    const F16 c = load_some(cos + i, n), s = load_some(sin + i, n);
    store_some(out + i, n, first * c - second * s);
    store_some(out + half + i, n, second * c + first * s);
  }
  if (x != out && 2 * half < size) __builtin_memcpy(out + 2 * half, x + 2 * half, (size - 2 * half) * sizeof(T));
}

template <class C>
void put_key(const C* key, const KvCache& cache, int64_t slot, int64_t kv_head) {
  constexpr int64_t pair = kPair<C>;
  C* page = key_page<C>(cache, slot / cache.block_size, kv_head) + pair * (slot % cache.block_size);
  for (int64_t i = 0; i < cache.head_size; i += pair) {
    __builtin_memcpy(page + i * cache.block_size, key + i, pair * sizeof(C));
  }
}

// A token of a pair is stored by itself: another thread may be writing the other one.
template <class C>
void put_value(const C* value, const KvCache& cache, int64_t slot, int64_t kv_head) {
  constexpr int64_t pair = kPair<C>;
  const int64_t offset = slot % cache.block_size;
  C* row = value_page<C>(cache, slot / cache.block_size, kv_head) + offset / pair * pair * cache.head_size;
  for (int64_t i = 0; i < cache.head_size; ++i) row[i * pair + offset % pair] = value[i];
}

// A head's key and value of one token, in the cache's type.
template <class T>
void put_token(const T* key, const T* value, const KvCache& cache, int64_t slot, int64_t kv_head) {
  if constexpr (sizeof(T) == 2) {
    if (is_fp8(cache.dtype)) {
      uint8_t codes[kMaxHeadSize];
      round_to_codes(fp8_format(cache.dtype), key, cache.head_size, codes);
      put_key(codes, cache, slot, kv_head);
      round_to_codes(fp8_format(cache.dtype), value, cache.head_size, codes);
      put_value(codes, cache, slot, kv_head);
      return;
    }
  }
  put_key(key, cache, slot, kv_head);
  put_value(value, cache, slot, kv_head);
}

template <class T>
void rope_token(const RopeAndCacheArgs& args, int64_t token) {
  const int64_t size = args.cache.head_size, num_kv_heads = args.cache.num_kv_heads, slot = args.slots[token];
  const int64_t position = args.are_positions_wide ? static_cast<const int64_t*>(args.positions)[token]
                                                   : static_cast<const int32_t*>(args.positions)[token];
  const float* cos = args.cos + position * args.half;
  const float* sin = args.sin + position * args.half;
  T* heads = static_cast<T*>(args.qkv) + token * args.qkv_stride;
  T normed[kMaxHeadSize], key[kMaxHeadSize];
  const T* values = heads + (args.num_heads + num_kv_heads) * size;
  const int64_t num_rotated = args.num_heads + (slot >= 0 ? num_kv_heads : 0);
  for (int64_t head = 0; head < num_rotated; ++head) {
    const bool is_key = head >= args.num_heads;
    const T* x = heads + head * size;
    const T* weight = static_cast<const T*>(is_key ? args.k_norm : args.q_norm);
    if (weight != nullptr) {
      normalise_head(x, weight, args.eps, size, normed);
      x = normed;
    }
    rotate_head(x, cos, sin, args.half, size, is_key ? key : heads + head * size);
    const int64_t kv_head = head - args.num_heads;
    if (is_key) put_token(key, values + kv_head * size, args.cache, slot, kv_head);
  }
}

template <class T>
void write_token(const WriteKvArgs& args, int64_t token) {
  if (args.slots[token] < 0) return;
  const T* key = static_cast<const T*>(args.key) + token * args.key_stride;
  const T* value = static_cast<const T*>(args.value) + token * args.value_stride;
  for (int64_t head = 0; head < args.cache.num_kv_heads; ++head) {
    const int64_t first = head * args.cache.head_size;
    put_token(key + first, value + first, args.cache, args.slots[token], head);
  }
}

template <class Fn>
void for_each_token(Pool& pool, int64_t num_tokens, const Fn& fn) {
  parallel_for(pool, ceil_div(num_tokens, kTokensPerTask), [&](int64_t task, int) {
    const int64_t end = min_i64(num_tokens, (task + 1) * kTokensPerTask);
    for (int64_t token = task * kTokensPerTask; token < end; ++token) fn(token);
  });
}

}  // namespace

void rope_and_cache(Pool& pool, const RopeAndCacheArgs& args) {
  for_each_token(pool, args.num_tokens, [&](int64_t token) {
    if (args.cache.dtype == DType::f32) {
      rope_token<float>(args, token);
    } else {
      rope_token<bf16>(args, token);
    }
  });
}

void write_kv(Pool& pool, const WriteKvArgs& args) {
  for_each_token(pool, args.num_tokens, [&](int64_t token) {
    if (args.cache.dtype == DType::f32) {
      write_token<float>(args, token);
    } else {
      write_token<bf16>(args, token);
    }
  });
}

void copy_pages(Pool& pool, const CopyPagesArgs& args) {
  const KvCache& cache = args.cache;
  const int64_t page_bytes = cache.num_kv_heads * 2 * cache.block_size * cache.head_size * bytes_of(cache.dtype);
  char* data = static_cast<char*>(cache.data);
  if (page_bytes == 0) return;  // an empty cache has no address
  parallel_for(pool, args.num_pages, [&](int64_t i, int) {
    if (args.source_ids[i] == args.target_ids[i]) return;
    __builtin_memcpy(data + args.target_ids[i] * page_bytes, data + args.source_ids[i] * page_bytes, page_bytes);
  });
}

}  // namespace quire::QUIRE_TIER
