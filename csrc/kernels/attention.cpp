// Attention over paged keys and values: decodes and prompt chunks alike.
//
// A row is one query of one head. Its softmax is taken over splits of 256 tokens, counted from position 0, whose
// results are merged in order; within a split every sum has a fixed order too (attention_tile.h). So a row's bits
// depend on its query, its position and the keys and values it sees, and on nothing else.
//
// Ladder (one thread, AVX-512 of Zen 4, 4 requests of 2048 tokens, heads 32/8 of 128, bfloat16, CPU time):
// 1. no prefetch: 0.22 of the rate of a sequential read
// 2. each tile fetches the next but one into the first-level cache: 0.28, the misses that cache can have in flight
// 3. into the second-level cache: 0.49
// A read of whole 8 KiB pieces at random places, fetched alike, reaches 0.5. benchmarks/kernels/bench_attention.py
// Prompts of 1024 tokens, heads 14/2 of 64, tier avx512_bf16, GFLOP/s, beside 118 of float32 multiply-adds alone:
// 4. chains of multiply-adds: 65
// 5. pairs of bfloat16, and a softmax of half the instructions: 116
// A chunk of 2048 after 4952 tokens, on Zen 5, beside 447 of pairs of bfloat16 alone:
// 6. as 5: 210
// 7. keys and values packed for 240 rows at a time, products at 97% of their ceiling: 265
// 8. the softmax of a block of rows in three passes, sums by the same instruction as the products: 310
// The same beside other programs, 477 of the instruction alone: as 8 292
// 9. keys and values packed for 480 rows at a time: 310
// 10. four rows of two columns, whose totals stay in registers over all tiles of a split: 334
//
// Source: Dao et al. 2022 (FlashAttention), section 3.1 (tiles, online softmax).
#include "quire/attention.h"

#include "kernels/attention_softmax.h"

namespace quire::QUIRE_TIER {
namespace {

// Tiles between a prefetch and its use.
constexpr int64_t kAhead = 2;

template <class T>
class Worker {
 public:
  Worker(const PagedAttentionArgs& args, const Task& task, const Scratch<T>& scratch)
      : args_(args), item_(task.item), task_(task), cache_(args.cache), scratch_(scratch), group_(group_size(args)),
        num_rows_(task.item.num_tokens * group_), padded_(padded_head(args)),
        num_blocks_(ceil_div(num_rows_, kBlockRows<T>)), is_packed_(kHasPairs<T> && num_blocks_ > 1),
        has_codes_(is_fp8(args.cache.dtype)), widener_(fp8_format(args.cache.dtype)), softmax_(args, task.item, scratch),
        pages_(args.block_table + task.item.request * args.max_blocks) {}

  void run() {
    load_queries();
    if (task_.partials == nullptr) start_rows();
    for (int64_t split = task_.first_split; split < task_.end_split; ++split) {
      if (is_packed_) {
        pack_split(split);
      } else if (has_codes_ && num_blocks_ > 1) {
        widen_split(split);
      }
      for (int64_t i = 0; i < num_blocks_; ++i) {
        const Block block = block_at(i * kBlockRows<T>, min_i64(num_rows_, (i + 1) * kBlockRows<T>), split);
        if (block.oldest < block.end) attend(block);
        if (task_.partials == nullptr) {
          if (block.oldest < block.end) merge_block(block);
        } else {
          store_partials(block, split);
        }
      }
    }
    if (task_.partials == nullptr) store_rows();
  }

  // The partials of a cut item, in order.
  void merge() {
    start_rows();
    for (int64_t split = task_.first_split; split < task_.end_split; ++split) {
      for (int64_t row = 0; row < num_rows_; ++row) {
        const float* partial = partial_of(split - item_.first_split(), row);
        merge_rows(row, 1, partial, partial + 1, partial + kPartialHead, 0);
      }
    }
    store_rows();
  }

 private:
  int64_t position_of(int64_t row) const { return item_.position + row / group_; }
  int64_t head_of(int64_t row) const { return item_.kv_head * group_ + row % group_; }
  float* partial_of(int64_t split, int64_t row) const {
    return task_.partials + (split * num_rows_ + row) * partial_stride(args_);
  }

  Block block_at(int64_t first_row, int64_t end_row, int64_t split) const {
    Block block{first_row, end_row - first_row, split * kSplit, 0, 0};
    block.oldest = max_i64(block.base, oldest_seen(args_, position_of(first_row)));
    block.end = min_i64(block.base + kSplit, position_of(first_row + block.num_rows - 1) + 1);
    return block;
  }

  void load_queries() {
    const int64_t size = cache_.head_size;
    for (int64_t row = 0; row < num_rows_; ++row) {
      const T* query = static_cast<const T*>(args_.query) + (item_.first_token + row / group_) * args_.query_stride +
                       head_of(row) * size;
      float* numbers = scratch_.query + row * scratch_.query_stride;
#if defined(QUIRE_TIER_AVX512_BF16)
      if constexpr (kHasPairs<T>) {
        store_query_pairs(query, size, numbers);
        continue;
      }
#endif
      for (int64_t i = 0; i < size; i += 16) store(numbers + i, load_some(query + i, size - i));
      load_amx_query(scratch_.amx, row, query, size);
    }
  }

  void start_rows() {
    for (int64_t row = 0; row < num_rows_; ++row) {
      scratch_.maxima[row] = args_.sinks ? args_.sinks[head_of(row)] : kLowest;
      scratch_.sums[row] = args_.sinks ? 1.0f : 0.0f;
    }
    for (int64_t i = 0; i < num_rows_ * padded_; i += 16) store(scratch_.outputs + i, zero());
  }

  // Results of the block's rows over its split alone.
  void attend(const Block& block) {
    // Whole tiles of values; scores in sixteen lanes, since the last page may end between.
    const int64_t tiles_begin = block.oldest / kTile * kTile, tiles_end = round_up(block.end, kTile);
    const int64_t begin = block.oldest / 16 * 16, end = round_up(block.end, 16);
    if constexpr (kHasAmx<T>) start_amx(scratch_.amx, block.num_rows);
    find_scores(block, begin, end);
    softmax_.find_weights(block);
    if (is_packed_) return weigh_packed_values(block, tiles_begin, tiles_end);
    for (int64_t i = 0; i < block.num_rows * padded_; i += 16) store(scratch_.block_outputs + i, zero());
    for (int64_t token = tiles_begin; token < tiles_end; token += kTile) {
      add_values(block, token);
    }
    if constexpr (kHasAmx<T>) finish_amx(scratch_.amx);
  }

  void find_scores(const Block& block, int64_t begin, int64_t end) {
#if defined(QUIRE_TIER_AVX512_BF16)
    if (is_packed_) {
      for (int64_t token = begin / kTile * kTile; token < end; token += kTile) {
        multiply_packed_rows<2>(scratch_.query + block.first_row * scratch_.query_stride, scratch_.query_stride,
                                block.num_rows, packed_keys(token), kTileSteps * 2 * kStep,
                                ceil_div(cache_.head_size, 4), scratch_.scores + token - block.base, kScoreStride);
      }
      return;
    }
#endif
    for (int64_t token = begin; token < end;) {
      const int64_t left_of_page = cache_.block_size - token % cache_.block_size;
      const int64_t num = min_i64(min_i64(kTile - token % kTile, left_of_page), end - token);
      float* scores = scratch_.scores + token - block.base;
      const Keys keys = keys_of(block, token, num);
      if constexpr (kHasAmx<T>) {
        multiply_keys_amx(scratch_.amx, block.first_row, keys.data, keys.stride, cache_.head_size, num, keys.ahead,
                          scores, kScoreStride);
      } else {
        multiply_rows<false>(scratch_.query + block.first_row * scratch_.query_stride, scratch_.query_stride,
                             block.num_rows, keys.data, kPair<T> * keys.stride, cache_.head_size, num, keys.ahead,
                             scores, kScoreStride);
      }
      token += num;
    }
  }

  const char* keys_at(int64_t token) const {
    const int64_t size = cache_.head_size, block_size = cache_.block_size;
    const int64_t first = (pages_[token / block_size] * cache_.num_kv_heads + item_.kv_head) * 2 * block_size * size;
    return static_cast<const char*>(cache_.data) + (first + token % block_size * kPair<T>) * bytes_of(cache_.dtype);
  }
  const char* values_at(int64_t token) const {
    const int64_t size = cache_.head_size, offset = token % cache_.block_size;
    return keys_at(token - offset) +
           (cache_.block_size + offset / kPair<T> * kPair<T>) * size * bytes_of(cache_.dtype);
  }

  // Tokens from row to row of the pairs, and how far ahead memory is to be fetched meanwhile, in bytes.
  struct Keys {
    const T* data;
    int64_t stride;
    int64_t ahead;
  };

  // Keys of `num` tokens of one page and one tile.
  Keys keys_of(const Block& block, int64_t token, int64_t num) {
    if constexpr (sizeof(T) == 2) {
      if (has_codes_) {
        const bool has_all = num_blocks_ > 1;
        bf16* keys = scratch_.keys + (has_all ? (token - block.base) / kTile * kTile * cache_.head_size : 0) +
                     token % kTile * kPair<T>;
        if (!has_all) widen_keys(token, num, bytes_to_next(block, token, true, keys_at(token)), keys);
        return {keys, kTile, 0};
      }
    }
    const char* keys = keys_at(token);
    return {reinterpret_cast<const T*>(keys), cache_.block_size, bytes_to_next(block, token, true, keys)};
  }

  void widen_keys(int64_t token, int64_t num, int64_t ahead, bf16* out) const {
    const uint8_t* codes = reinterpret_cast<const uint8_t*>(keys_at(token));
    if (num == kTile && cache_.block_size == kTile) {
      widen_codes(widener_, codes, kTile * cache_.head_size, ahead, out);
      return;
    }
    for (int64_t i = 0; i < cache_.head_size / 2; ++i) {
      widen_codes(widener_, codes + 2 * i * cache_.block_size, 2 * num, ahead, out + 2 * i * kTile);
    }
  }

  // Values of a tile; tokens outside oldest .. end - 1 are zeros.
  void widen_values(int64_t token, int64_t oldest, int64_t end, int64_t ahead, bf16* out) const {
    const int64_t size = cache_.head_size;
    for (int64_t t = 0; t < kTile; t += 2, out += 2 * size) {
      const int64_t first = max_i64(oldest, token + t), last = min_i64(end, token + t + 2);
      if (first >= last) {
        __builtin_memset(out, 0, 2 * size * sizeof(bf16));
        continue;
      }
      widen_codes(widener_, reinterpret_cast<const uint8_t*>(values_at(first)), 2 * size, ahead, out);
      if (last - first == 2) continue;
      for (int64_t i = 0; i < size; ++i) out[2 * i + 1 - first % 2].bits = 0;
    }
  }

  // All that any row of the item sees of a split.
  void widen_split(int64_t split) {
    if constexpr (sizeof(T) == 2) {
      const int64_t base = split * kSplit;
      const int64_t oldest = max_i64(base, item_.oldest), end = min_i64(base + kSplit, item_.end);
      for (int64_t token = oldest / 16 * 16; token < end; token += 16) {
        bf16* keys = scratch_.keys + (token - base) / kTile * kTile * cache_.head_size + token % kTile * 2;
        widen_keys(token, 16, 0, keys);
      }
      for (int64_t token = oldest / kTile * kTile; token < end; token += kTile) {
        widen_values(token, oldest, end, 0, scratch_.values + (token - base) * cache_.head_size);
      }
    }
  }

#if defined(QUIRE_TIER_AVX512_BF16)
  float* packed_keys(int64_t token) const {
    return scratch_.packed_keys + token % kSplit / kTile * packed_tile_size(cache_.head_size, kTile);
  }
  float* packed_values(int64_t token) const {
    return scratch_.packed_values + token % kSplit / kTile * packed_tile_size(kTile, cache_.head_size);
  }

  // All that any row of the item sees of a split. Values of other tokens are zeros: their weight is zero too.
  void pack_split(int64_t split) {
    if constexpr (kHasPairs<T>) {
      const int64_t size = cache_.head_size, base = split * kSplit;
      const Block seen{0, num_rows_, base, max_i64(base, item_.oldest), min_i64(base + kSplit, item_.end)};
      for (int64_t token = seen.oldest / kTile * kTile; token < seen.end; token += kTile) {
        for (int64_t half = token; half < token + kTile; half += 16) {
          if (half + 16 <= seen.oldest || half >= seen.end) continue;
          pack_keys(half, packed_keys(token) + half % kTile / 16 * kStep);
        }
        pack_tile(value_tile(seen, token, 0), 2 * size, kTile, size, packed_values(token));
      }
    }
  }

  // Of 16 tokens.
  void pack_keys(int64_t token, float* out) const {
    if constexpr (kHasPairs<T>) {
      const bf16* keys = reinterpret_cast<const bf16*>(keys_at(token));
      if (has_codes_) widen_keys(token, 16, 0, scratch_.keys);
      pack_columns<true>(has_codes_ ? scratch_.keys : keys, 2 * (has_codes_ ? kTile : cache_.block_size),
                         cache_.head_size, 16, 2, out);
    }
  }

  // The values of tokens begin .. end - 1, two columns of sixteen at a time: their tiles are as far apart as all of a
  // tile's columns take.
  void weigh_packed_values(const Block& block, int64_t begin, int64_t end) {
    const int64_t size = cache_.head_size, stride = packed_tile_size(kTile, size);
    const int64_t num_steps = (end - begin) / kTile * kTileSteps;
    const float *const weights = scratch_.scores + (begin - block.base) / 2, *values = packed_values(begin);
    for (int64_t column = 0; column < size; column += 32, values += kTileSteps * 2 * kStep) {
      const auto multiply = column + 16 < size ? multiply_packed_rows<2> : multiply_packed_rows<1>;
      multiply(weights, kScoreStride, block.num_rows, values, stride, num_steps, scratch_.block_outputs + column,
               padded_);
    }
  }
#else
  void pack_split(int64_t) {}
  void weigh_packed_values(const Block&, int64_t, int64_t) {}
#endif

  // How far from `here`, a tile of keys or values, the memory is that the item reads kAhead tiles later. 0 when its
  // earlier rows have just read it.
  int64_t bytes_to_next(const Block& block, int64_t token, bool is_key, const char* here) const {
    if (block.first_row > 0) return 0;
    const char* next = here;
    const int64_t later = token + kAhead * kTile;
    if (later < block.end) {
      next = is_key ? keys_at(later) : values_at(later);
    } else {
      const int64_t over = (later - round_up(block.end, kTile)) / kTile * kTile;
      if (is_key) {
        next = values_at(min_i64(block.oldest / kTile * kTile + over, block.end - 1));
      } else if (block.base + kSplit + over < item_.end) {
        next = keys_at(block.base + kSplit + over);
      }
    }
    return next - here;
  }

  // The values of 32 tokens as one tile. Tokens outside oldest .. end - 1 are zeros: their weight is zero, but what
  // lies there may be anything.
  const T* value_tile(const Block& block, int64_t token, int64_t ahead) {
    const int64_t block_size = cache_.block_size, size = cache_.head_size, oldest = block.oldest, end = block.end;
    constexpr int64_t pair = kPair<T>;
    if constexpr (sizeof(T) == 2) {
      if (has_codes_) {
        if (num_blocks_ > 1 && !is_packed_) return scratch_.values + (token - block.base) * size;
        widen_values(token, oldest, end, ahead, scratch_.values);
        return scratch_.values;
      }
    }
    if (block_size % kTile == 0 && token >= oldest && token + kTile <= end) {
      return reinterpret_cast<const T*>(values_at(token));
    }
    __builtin_memset(scratch_.values, 0, kTile * size * sizeof(T));
    for (int64_t t = 0; t < kTile; t += pair) {
      const int64_t first = max_i64(oldest, token + t), last = min_i64(end, token + t + pair);
      if (first >= last) continue;
      const T* values = reinterpret_cast<const T*>(values_at(first));
      T* tile = scratch_.values + t * size;
      if (last - first == pair) {
        __builtin_memcpy(tile, values, pair * size * sizeof(T));
      } else {
        for (int64_t i = 0; i < size; ++i) tile[i * pair + first % pair] = values[i * pair + first % pair];
      }
    }
    return scratch_.values;
  }

  void add_values(const Block& block, int64_t token) {
    const int64_t size = cache_.head_size, column = token - block.base;
    const char* const first = values_at(max_i64(token, block.oldest));
    const int64_t to_next = bytes_to_next(block, token, false, first);
    const T* values = value_tile(block, token, to_next);
    // Codes were fetched as they were widened; a copied tile's next one is as far from the copy.
    const char* const here = reinterpret_cast<const char*>(values);
    const int64_t ahead = has_codes_ || to_next == 0 ? 0 : first + to_next - here;
    if constexpr (kHasAmx<T>) {
      add_values_amx(scratch_.amx, column, values, size, ahead, scratch_.block_outputs, padded_);
    } else {
      constexpr int64_t per_float = kHasPairs<T> ? 2 : 1;
      multiply_rows<true>(scratch_.scores + column / per_float, kScoreStride, block.num_rows, values, kPair<T> * size,
                          kTile, size, ahead, scratch_.block_outputs, padded_);
    }
  }

  void merge_block(const Block& block) {
    merge_rows(block.first_row, block.num_rows, scratch_.block_maxima, scratch_.block_sums, scratch_.block_outputs,
               padded_);
  }

  // Adds results of one split to those of rows first .. first + num - 1, row by row, 16 rows' factors at a time.
  // A maximum of -inf: the row sees none of the split.
  void merge_rows(int64_t first, int64_t num, const float* maxima, const float* sums, const float* outputs,
                  int64_t output_stride) {
    for (int64_t i = 0; i < num; i += 16) {
      float *const before = scratch_.maxima + first + i, *const total = scratch_.sums + first + i;
      const int64_t n = min_i64(16, num - i);
      const F16 merged = max(load_some(maxima + i, n), load_some(before, n));
      const F16 keep = exp(load_some(before, n) - merged), add = exp(load_some(maxima + i, n) - merged);
      float keeps[16], adds[16];
      store(keeps, keep);
      store(adds, add);
      const F16 sum = load_some(total, n) * keep + load_some(sums + i, n) * add;
      const F16 lowest = set1(-__FLT_MAX__), given = load_some(maxima + i, n);
      store_some(total, n, select_less(given, lowest, load_some(total, n), sum));
      store_some(before, n, merged);
      for (int64_t r = 0; r < n; ++r) {
        if (maxima[i + r] == kLowest) continue;
        const F16 keep_row = set1(keeps[r]), add_row = set1(adds[r]);
        float* totals = scratch_.outputs + (first + i + r) * padded_;
        const float* added = outputs + (i + r) * output_stride;
        for (int64_t c = 0; c < padded_; c += 16) {
          store(totals + c, load(totals + c) * keep_row + load(added + c) * add_row);
        }
      }
    }
  }

  void store_partials(const Block& block, int64_t split) {
    const bool sees_any = block.oldest < block.end;
    for (int64_t r = 0; r < block.num_rows; ++r) {
      float* partial = partial_of(split - item_.first_split(), block.first_row + r);
      partial[0] = sees_any ? scratch_.block_maxima[r] : kLowest;
      if (partial[0] == kLowest) continue;
      partial[1] = scratch_.block_sums[r];
      __builtin_memcpy(partial + kPartialHead, scratch_.block_outputs + r * padded_, padded_ * sizeof(float));
    }
  }

  void store_rows() {
    const int64_t size = cache_.head_size;
    for (int64_t row = 0; row < num_rows_; ++row) {
      T* out = static_cast<T*>(args_.out) +
               ((item_.first_token + row / group_) * args_.num_heads + head_of(row)) * size;
      const F16 sum = set1(scratch_.sums[row]);
      const float* totals = scratch_.outputs + row * padded_;
      // Adding zero: the sign of a zero could tell which tokens without weight were in the tiles.
      for (int64_t i = 0; i < size; i += 16) store_some(out + i, size - i, load(totals + i) / sum + zero());
    }
  }

  const PagedAttentionArgs& args_;
  const Item& item_;
  const Task& task_;
  const KvCache& cache_;
  const Scratch<T>& scratch_;
  const int64_t group_, num_rows_, padded_;
  const int64_t num_blocks_;
  const bool is_packed_;
  const bool has_codes_;
  const Fp8Widener widener_;
  const Softmax<T> softmax_;
  const int32_t* pages_;
};

template <class T>
void attend_all(Pool& pool, const PagedAttentionArgs& args) {
  const Plan plan = make_plan(pool, args, max_item_rows<T>(args));
  Scratch<T> sizes;
  const int64_t bytes = lay_out<T>(args, nullptr, sizes);
  parallel_for(pool, plan.num_tasks, [&](int64_t i, int thread) {
    Scratch<T> scratch;
    lay_out<T>(args, static_cast<char*>(pool.scratch(thread, bytes)), scratch);
    Worker<T>(args, plan.tasks[i], scratch).run();
  });
  parallel_for(pool, plan.num_cut_items, [&](int64_t i, int thread) {
    Scratch<T> scratch;
    lay_out<T>(args, static_cast<char*>(pool.scratch(thread, bytes)), scratch);
    Worker<T>(args, plan.cut_items[i], scratch).merge();
  });
}

void paged_attention(Pool& pool, const PagedAttentionArgs& args) {
  const int64_t num_used = args.num_reqs > 0 ? args.query_start_loc[args.num_reqs] : 0;
  const int64_t row_bytes = args.num_heads * args.cache.head_size * (args.cache.dtype == DType::f32 ? 4 : 2);
  if (num_used < args.num_tokens) {
    __builtin_memset(static_cast<char*>(args.out) + num_used * row_bytes, 0, (args.num_tokens - num_used) * row_bytes);
  }
  if (num_used == 0) return;
  pool.lock();
  if (args.cache.dtype == DType::f32) {
    attend_all<float>(pool, args);
  } else {
    attend_all<bf16>(pool, args);
  }
  pool.unlock();
}

}  // namespace

extern const AttentionKernels attention_kernels;
const AttentionKernels attention_kernels = {paged_attention, rope_and_cache, write_kv, copy_pages};

}  // namespace quire::QUIRE_TIER
