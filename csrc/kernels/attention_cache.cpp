// Rotary embedding, and the writing and copying of pages. One pass over the tokens of a step.
#include "kernels/attention_cache.h"

#include "kernels/attention_fp8.h"

namespace quire::QUIRE_TIER {
namespace {

constexpr int64_t kTokensPerTask = 8;

// One over the root of the mean square, as `rms_norm` of elementwise.cpp finds it.
template <class T>
float norm_factor(const T* x, int64_t size, float eps) {
  F16 squares = zero();
  for (int64_t i = 0; i < size; i += 16) {
    const F16 v = load_some(x + i, size - i);
    squares = squares + v * v;
  }
  return 1.0f / __builtin_sqrtf(hsum(squares) / static_cast<float>(size) + eps);
}

// `x` may be `out`.
template <class T>
void normalise_head(const T* x, const T* weight, float factor, int64_t size, T* out) {
  const F16 scale = set1(factor);
  for (int64_t i = 0; i < size; i += 16) {
    T normed[16];
    store(normed, load_some(x + i, size - i) * scale);
    store_some(out + i, size - i, load(normed) * load_some(weight + i, size - i));
  }
}

// As `layer_norm` of elementwise.cpp, without a bias. `x` may be `out`.
template <class T>
void centre_head(const T* x, const T* weight, int64_t size, float eps, T* out) {
  F16 sums = zero(), squares = zero();
  for (int64_t i = 0; i < size; i += 16) sums = sums + load_some(x + i, size - i);
  const F16 mean = set1(hsum(sums) / static_cast<float>(size));
  for (int64_t i = 0; i < size; i += 16) {
    float lanes[16];
    store(lanes, load_some(x + i, size - i) - mean);
    const F16 centered = load_some(lanes, size - i);  // with zeros in lanes past the end
    squares = squares + centered * centered;
  }
  const F16 scale = set1(1.0f / __builtin_sqrtf(hsum(squares) / static_cast<float>(size) + eps));
  for (int64_t i = 0; i < size; i += 16) {
    store_some(out + i, size - i, (load_some(x + i, size - i) - mean) * scale * load_some(weight + i, size - i));
  }
}

// Minimum and maximum take their arguments in such an order that NaN passes through. `x` may be `out`.
template <class T>
void limit_head(const T* x, float limit, int64_t size, T* out) {
  const F16 most = set1(limit), least = set1(-limit);
  for (int64_t i = 0; i < size; i += 16) {
    store_some(out + i, size - i, max(least, min(most, load_some(x + i, size - i))));
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
void scale_head(T* x, float factor, int64_t size) {
  for (int64_t i = 0; i < size; i += 16) store_some(x + i, size - i, load_some(x + i, size - i) * set1(factor));
}

inline int64_t position_of(const RopeAndCacheArgs& args, int64_t token) {
  if (!needs_positions(args)) return 0;
  return args.are_positions_wide ? static_cast<const int64_t*>(args.positions)[token]
                                 : static_cast<const int32_t*>(args.positions)[token];
}

// A query or key head: normed, cut and rotated. With a mean over all heads `of_all` is its factor. `x` may be `out`.
template <class T>
void prepare_head(const RopeAndCacheArgs& args, int64_t position, const T* x, const T* gains, float of_all, T* out) {
  const int64_t size = args.cache.head_size, half = args.half;
  T normed[kMaxHeadSize];
  if (gains != nullptr && !args.are_norms_last) {
    if (args.are_norms_centered) {
      centre_head(x, gains, size, args.eps, normed);
    } else {
      normalise_head(x, gains, args.are_norms_whole ? of_all : norm_factor(x, size, args.eps), size, normed);
    }
    x = normed;
  }
  if (args.limit > 0.0f) {
    limit_head(x, args.limit, size, normed);
    x = normed;
  }
  rotate_head(x, args.cos + position * half, args.sin + position * half, half, size, out);
  if (gains != nullptr && args.are_norms_last) {
    normalise_head(out, gains, norm_factor(out, size, args.eps), size, out);
  }
}

// The gains of one head, and the factor of a mean over `num_heads` heads.
template <class T>
struct Norm {
  Norm(const RopeAndCacheArgs& args, const void* weight, const T* heads, int64_t num_heads)
      : gains(static_cast<const T*>(weight)), step(has_gains_of_heads(args) ? args.cache.head_size : 0) {
    if (gains == nullptr || !args.are_norms_whole) return;
    of_all = norm_factor(heads, num_heads * args.cache.head_size, args.eps);
  }
  const T* gains_of(int64_t head) const { return gains != nullptr ? gains + head * step : nullptr; }

  const T* gains;
  int64_t step;
  float of_all = 0.0f;
};

template <class T>
void rope_token(const RopeAndCacheArgs& args, int64_t token) {
  const int64_t size = args.cache.head_size, num_kv_heads = args.cache.num_kv_heads;
  const int64_t position = position_of(args, token), slot = args.has_kv ? args.slots[token] : -1;
  T* queries = static_cast<T*>(args.qkv) + token * args.qkv_stride;
  const Norm<T> q_norm(args, args.q_norm, queries, args.num_heads);
  for (int64_t head = 0; head < args.num_heads; ++head) {
    T* query = queries + head * size;
    prepare_head(args, position, query, q_norm.gains_of(head), q_norm.of_all, query);
    if (args.query_scales != nullptr) scale_head(query, args.query_scales[position], size);
  }
  if (slot < 0) return;
  const T* keys = queries + args.num_heads * size;
  const T* v_norm = static_cast<const T*>(args.v_norm);
  const Norm<T> k_norm(args, args.k_norm, keys, num_kv_heads);
  T key[kMaxHeadSize], normed[kMaxHeadSize];
  for (int64_t head = 0; head < num_kv_heads; ++head) {
    const T* value = keys + (num_kv_heads + head) * size;
    prepare_head(args, position, keys + head * size, k_norm.gains_of(head), k_norm.of_all, key);
    if (v_norm != nullptr) {
      normalise_head(value, v_norm, norm_factor(value, size, args.eps), size, normed);
      value = normed;
    }
    if (args.limit > 0.0f) {
      limit_head(value, args.limit, size, normed);
      value = normed;
    }
    put_token(key, value, args.cache, slot, head);
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
