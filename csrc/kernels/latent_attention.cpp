// Attention over paged latents: decodes and prompt chunks alike, and the writing of latents to their pages.
//
// All heads share one key and one value a token, and the value is the key's first part. An item is a few queries of one
// request with up to kItemRows rows, a row for each query and head. Softmax and sums have the order of attention.cpp:
// splits of 256 tokens counted from position 0, merged in order, so that a row's bits depend on its query, its position
// and the latents it sees alone.
//
// A page holds rows of tokens. Of a split the item copies what it sees in the two orders that the products read: keys
// with tokens side by side, values with pairs of tokens side by side. All rows of the item share the copies.
//
// Source: DeepSeek-AI 2024 (DeepSeek-V2), section 2.1, with the matrices of keys and values absorbed into queries and
// outputs; Dao et al. 2022 (FlashAttention), section 3.1 (tiles, online softmax).
#include "quire/latent.h"

#include "kernels/attention_scratch.h"
#include "kernels/latent_parts.h"
#include "simd/transpose.h"

namespace quire::QUIRE_TIER {
namespace {

constexpr float kLowest = -__builtin_inff();
constexpr float kLog2OfE = 1.44269504f;

// The shape that attention_plan.h divides into items: a "kv head" is a group of heads.
PagedAttentionArgs plan_args(const LatentAttentionArgs& args) {
  int64_t num_groups = ceil_div(args.num_heads, kItemRows);
  while (args.num_heads % num_groups != 0) ++num_groups;
  PagedAttentionArgs plan{};
  plan.cache.num_kv_heads = num_groups;
  plan.cache.head_size = args.cache.latent_size;
  plan.query_start_loc = args.query_start_loc;
  plan.seq_lens = args.seq_lens;
  plan.num_reqs = args.num_reqs;
  plan.num_tokens = args.num_tokens;
  plan.num_heads = args.num_heads;
  return plan;
}

// Rows whose scores are held at a time: by pairs of bfloat16, enough for even groups of any number of heads.
#if defined(QUIRE_TIER_AVX512_BF16)
template <class T>
constexpr int64_t kLatentRows = kHasPairs<T> ? 4 * kRegisterRows<T> : kBlockRows<T>;
#else
template <class T>
constexpr int64_t kLatentRows = kBlockRows<T>;
#endif

// What a thread needs for one task.
template <class T>
struct LatentScratch {
  float* query;  // [rows of the item][query_stride]
  int64_t query_stride;
  float* maxima;  // [rows of the item], and so on: the results so far
  float* sums;
  float* outputs;       // [rows of the item][padded latent]
  float* scores;        // [kLatentRows][kScoreStride], then the softmax weights
  float* block_maxima;  // of one block and split
  float* block_sums;
  float* block_outputs;
  T* keys;    // of a split, by tiles of kTile tokens: [width / pair][kTile][pair]
  T* values;  // likewise: [kTile / pair][latent_size][pair]
  AmxScratch amx;
};

template <class T>
int64_t lay_out_latent(const LatentAttentionArgs& args, const PagedAttentionArgs& plan, char* memory,
                       LatentScratch<T>& scratch) {
  char* const start = memory;
  const int64_t padded = padded_head(plan), width = args.cache.width();
  const int64_t num_rows = round_up(item_tokens(plan) * group_size(plan), kLatentRows<T>);
  scratch.query_stride = round_up(width, 16) + 16;
  scratch.query = take<float>(memory, num_rows * scratch.query_stride);
  scratch.maxima = take<float>(memory, num_rows);
  scratch.sums = take<float>(memory, num_rows);
  scratch.outputs = take<float>(memory, num_rows * padded);
  scratch.scores = take<float>(memory, kLatentRows<T> * kScoreStride);
  scratch.block_maxima = take<float>(memory, kLatentRows<T>);
  scratch.block_sums = take<float>(memory, kLatentRows<T>);
  scratch.block_outputs = take<float>(memory, kLatentRows<T> * padded);
  scratch.keys = take<T>(memory, kSplit * width);
  scratch.values = take<T>(memory, kSplit * args.cache.latent_size);
  memory += lay_out_amx(memory, num_rows, width, scratch.amx);
  return memory - start;
}

// Consecutive rows of an item, and the tokens of one split that any of them sees: base .. end - 1.
struct LatentBlock {
  int64_t first_row;
  int64_t num_rows;
  int64_t base;
  int64_t end;
};

template <class T>
class LatentWorker {
 public:
  LatentWorker(const LatentAttentionArgs& args, const PagedAttentionArgs& plan, const Task& task,
               const LatentScratch<T>& scratch)
      : args_(args), cache_(args.cache), task_(task), item_(task.item), scratch_(scratch), group_(group_size(plan)),
        num_rows_(task.item.num_tokens * group_), num_blocks_(ceil_div(num_rows_, kLatentRows<T>)),
        padded_(padded_head(plan)), partial_stride_(partial_stride(plan)), width_(args.cache.width()),
        latent_(args.cache.latent_size), pages_(args.block_table + task.item.request * args.max_blocks) {}

  void run() {
    load_queries();
    if (task_.partials == nullptr) start_rows();
    for (int64_t split = task_.first_split; split < task_.end_split; ++split) {
      copy_split(split);
      for (int64_t i = 0; i < num_blocks_; ++i) {
        const LatentBlock block = block_at(i * num_rows_ / num_blocks_, (i + 1) * num_rows_ / num_blocks_, split);
        if (block.base < block.end) attend(block);
        if (task_.partials != nullptr) {
          store_partials(block, split);
        } else if (block.base < block.end) {
          merge_rows(block.first_row, block.num_rows, scratch_.block_maxima, scratch_.block_sums,
                     scratch_.block_outputs, padded_);
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
        const float* partial = partial_of(split, row);
        merge_rows(row, 1, partial, partial + 1, partial + kPartialHead, 0);
      }
    }
    store_rows();
  }

 private:
  int64_t position_of(int64_t row) const { return item_.position + row / group_; }
  // Of a row's vector among those of the step's tokens and heads.
  int64_t vector_of(int64_t row) const {
    return (item_.first_token + row / group_) * args_.num_heads + item_.kv_head * group_ + row % group_;
  }
  float* partial_of(int64_t split, int64_t row) const {
    return task_.partials + ((split - item_.first_split()) * num_rows_ + row) * partial_stride_;
  }

  LatentBlock block_at(int64_t first_row, int64_t end_row, int64_t split) const {
    const int64_t base = split * kSplit;
    return {first_row, end_row - first_row, base, min_i64(base + kSplit, position_of(end_row - 1) + 1)};
  }

  void load_queries() {
    for (int64_t row = 0; row < num_rows_; ++row) {
      const T* query = static_cast<const T*>(args_.query) + vector_of(row) * width_;
      float* numbers = scratch_.query + row * scratch_.query_stride;
#if defined(QUIRE_TIER_AVX512_BF16)
      if constexpr (kHasPairs<T>) {
        store_query_pairs(query, width_, numbers);
        continue;
      }
#endif
      for (int64_t i = 0; i < width_; i += 16) store(numbers + i, load_some(query + i, width_ - i));
      load_amx_query(scratch_.amx, row, query, width_);
    }
  }

  void start_rows() {
    for (int64_t row = 0; row < num_rows_; ++row) {
      scratch_.maxima[row] = kLowest;
      scratch_.sums[row] = 0.0f;
    }
    for (int64_t i = 0; i < num_rows_ * padded_; i += 16) store(scratch_.outputs + i, zero());
  }

  const T* token_at(int64_t token) const {
    const int64_t page = pages_[token / cache_.block_size];
    return static_cast<const T*>(cache_.data) + (page * cache_.block_size + token % cache_.block_size) * width_;
  }

  // What any row of the item sees of a split, as keys and as values.
  void copy_split(int64_t split) {
    const int64_t base = split * kSplit, end = min_i64(base + kSplit, item_.end);
    constexpr int64_t size = sizeof(T);
    for (int64_t token = base; token < end; token += 16) {
      T* keys = scratch_.keys + (token - base) / kTile * kTile * width_ + token % kTile * kPair<T>;
      transpose_16_rows(reinterpret_cast<const char*>(token_at(token)), width_ * size, width_ / kPair<T>,
                        reinterpret_cast<char*>(keys), kTile * kPair<T> * size);
    }
    for (int64_t token = base; token < round_up(end, kTile); token += kPair<T>) {
      copy_values(token, end, scratch_.values + (token - base) * latent_);
    }
  }

  // A pair of tokens side by side, or one token. Those from `end` on are zeros: their weight is zero, but what lies
  // there may be anything.
  void copy_values(int64_t token, int64_t end, bf16* out) const {
    if (token >= end) {
      __builtin_memset(out, 0, 2 * latent_ * sizeof(bf16));
      return;
    }
    const bf16 *first = token_at(token), *second = first + width_;
    const uint32_t keep = token + 1 < end ? 0xffffffffu : 0;
    for (int64_t i = 0; i < latent_; ++i) {
      const uint32_t pair = first[i].bits | (static_cast<uint32_t>(second[i].bits) << 16 & keep);
      __builtin_memcpy(out + 2 * i, &pair, 4);
    }
  }
  void copy_values(int64_t token, int64_t end, float* out) const {
    if (token < end) {
      __builtin_memcpy(out, token_at(token), latent_ * sizeof(float));
    } else {
      __builtin_memset(out, 0, latent_ * sizeof(float));
    }
  }

  // Results of the block's rows over its split alone.
  void attend(const LatentBlock& block) {
    const int64_t num_tokens = block.end - block.base;
    if constexpr (kHasAmx<T>) start_amx(scratch_.amx, block.num_rows);
    for (int64_t token = 0; token < num_tokens; token += kTile) {
      find_scores(block, token, min_i64(kTile, round_up(num_tokens - token, 16)));
    }
    for (int64_t r = 0; r < block.num_rows; ++r) find_weights(block, r);
    for (int64_t i = 0; i < block.num_rows * padded_; i += 16) store(scratch_.block_outputs + i, zero());
    for (int64_t token = 0; token < num_tokens; token += kTile) add_values(block, token);
    if constexpr (kHasAmx<T>) finish_amx(scratch_.amx);
  }

  // Of `num` tokens of a tile that begins at `token` of the split.
  void find_scores(const LatentBlock& block, int64_t token, int64_t num) {
    const T* keys = scratch_.keys + token * width_;
    if constexpr (kHasAmx<T>) {
      multiply_keys_amx(scratch_.amx, block.first_row, keys, kTile, width_, num, 0, scratch_.scores + token,
                        kScoreStride);
    } else {
      multiply_rows<false>(scratch_.query + block.first_row * scratch_.query_stride, scratch_.query_stride,
                           block.num_rows, keys, kPair<T> * kTile, width_, num, 0, scratch_.scores + token,
                           kScoreStride);
    }
  }

  // A row's scores become softmax weights, zeros past its position. The scale comes once the maximum is subtracted.
  void find_weights(const LatentBlock& block, int64_t r) {
    float* const row = scratch_.scores + r * kScoreStride;
    const int64_t num_seen = position_of(block.first_row + r) + 1 - block.base;
    const int64_t num_tokens = round_up(block.end - block.base, 16), end = round_up(num_tokens, kTile);
    F16 top = set1(kLowest);
    for (int64_t token = 0; token < num_tokens; token += 16) {
      F16 score = load(row + token);
      if (token + 16 > num_seen) {
        score = select_less(lane_numbers(), set1(static_cast<float>(num_seen - token)), score, set1(kLowest));
        store(row + token, score);
      }
      top = max(top, score);
    }
    const float maximum = hmax(top);
    scratch_.block_maxima[r] = maximum * args_.scale;
    const int64_t num_weighed = maximum == kLowest ? 0 : num_tokens;
    const F16 highest = set1(maximum), factor = set1(sizeof(T) == 2 ? args_.scale * kLog2OfE : args_.scale);
    F16 sum = zero();
    for (int64_t token = 0; token < num_weighed; token += 16) {
      F16 weights[1] = {(load(row + token) - highest) * factor};
      if constexpr (sizeof(T) == 2) {
        exp2_coarse_inplace(weights);
      } else {
        weights[0] = exp(weights[0]);
      }
      sum = sum + put_weights(r, token, weights[0]);
    }
    for (int64_t token = num_weighed; token < end; token += 16) put_weights(r, token, zero());
    scratch_.block_sums[r] = hsum(sum);
  }

  // Stores the weights of 16 tokens as the products take them; returns them as they are then.
  F16 put_weights(int64_t r, int64_t token, F16 weights) {
    float* const row = scratch_.scores + r * kScoreStride;
#if defined(QUIRE_TIER_AVX512_BF16)
    if constexpr (kHasPairs<T>) return store_weight_pairs(row + token / 2, weights);
#endif
    if constexpr (sizeof(T) == 2) weights = as_bf16(weights);
    if constexpr (kHasAmx<T>) {
      store_amx_weights(scratch_.amx, r, token, weights);
    } else {
      store(row + token, weights);
    }
    return weights;
  }

  void add_values(const LatentBlock& block, int64_t token) {
    const T* values = scratch_.values + token * latent_;
    if constexpr (kHasAmx<T>) {
      add_values_amx(scratch_.amx, token, values, latent_, 0, scratch_.block_outputs, padded_);
    } else {
      constexpr int64_t per_float = kHasPairs<T> ? 2 : 1;
      multiply_rows<true>(scratch_.scores + token / per_float, kScoreStride, block.num_rows, values,
                          kPair<T> * latent_, kTile, latent_, 0, scratch_.block_outputs, padded_);
    }
  }

  // Adds results of one split to those of rows first .. first + num - 1. A maximum of -inf: the row sees none of it.
  void merge_rows(int64_t first, int64_t num, const float* maxima, const float* sums, const float* outputs,
                  int64_t output_stride) {
    for (int64_t r = 0; r < num; ++r) {
      if (maxima[r] == kLowest) continue;
      float &before = scratch_.maxima[first + r], &total = scratch_.sums[first + r];
      const float merged = before > maxima[r] ? before : maxima[r];
      const F16 keep = exp(set1(before - merged)), add = exp(set1(maxima[r] - merged));
      float sum[16];
      store(sum, set1(total) * keep + set1(sums[r]) * add);
      total = sum[0];
      before = merged;
      float* totals = scratch_.outputs + (first + r) * padded_;
      const float* added = outputs + r * output_stride;
      for (int64_t c = 0; c < padded_; c += 16) store(totals + c, load(totals + c) * keep + load(added + c) * add);
    }
  }

  void store_partials(const LatentBlock& block, int64_t split) {
    const bool sees_any = block.base < block.end;
    for (int64_t r = 0; r < block.num_rows; ++r) {
      float* partial = partial_of(split, block.first_row + r);
      partial[0] = sees_any ? scratch_.block_maxima[r] : kLowest;
      if (partial[0] == kLowest) continue;
      partial[1] = scratch_.block_sums[r];
      __builtin_memcpy(partial + kPartialHead, scratch_.block_outputs + r * padded_, padded_ * sizeof(float));
    }
  }

  void store_rows() {
    for (int64_t row = 0; row < num_rows_; ++row) {
      T* out = static_cast<T*>(args_.out) + vector_of(row) * latent_;
      const F16 sum = set1(scratch_.sums[row]);
      const float* totals = scratch_.outputs + row * padded_;
      // Adding zero: the sign of a zero could tell which tokens without weight were in the tiles.
      for (int64_t i = 0; i < latent_; i += 16) store_some(out + i, latent_ - i, load(totals + i) / sum + zero());
    }
  }

  const LatentAttentionArgs& args_;
  const LatentCache& cache_;
  const Task& task_;
  const Item& item_;
  const LatentScratch<T>& scratch_;
  const int64_t group_, num_rows_, num_blocks_, padded_, partial_stride_, width_, latent_;
  const int32_t* pages_;
};

template <class T>
void attend_all(Pool& pool, const LatentAttentionArgs& args) {
  const PagedAttentionArgs shape = plan_args(args);
  const Plan plan = make_plan(pool, shape);
  LatentScratch<T> sizes;
  const int64_t bytes = lay_out_latent<T>(args, shape, nullptr, sizes);
  auto worker = [&](const Task& task, int thread, auto&& run) {
    LatentScratch<T> scratch;
    lay_out_latent<T>(args, shape, static_cast<char*>(pool.scratch(thread, bytes)), scratch);
    run(LatentWorker<T>(args, shape, task, scratch));
  };
  parallel_for(pool, plan.num_tasks, [&](int64_t i, int thread) {
    worker(plan.tasks[i], thread, [](LatentWorker<T>&& of_task) { of_task.run(); });
  });
  parallel_for(pool, plan.num_cut_items, [&](int64_t i, int thread) {
    worker(plan.cut_items[i], thread, [](LatentWorker<T>&& of_task) { of_task.merge(); });
  });
}

void latent_attention(Pool& pool, const LatentAttentionArgs& args) {
  const int64_t num_used = args.num_reqs > 0 ? args.query_start_loc[args.num_reqs] : 0;
  const int64_t row_bytes = args.num_heads * args.cache.latent_size * bytes_of(args.cache.dtype);
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

constexpr int64_t kTokensPerTask = 8;

// Element i and element i + half are a pair.
template <class T>
void rotate(const T* x, const float* cos, const float* sin, int64_t half, T* out) {
  for (int64_t i = 0; i < half; i += 16) {
    const int64_t n = half - i;
    const F16 first = load_some(x + i, n), second = load_some(x + half + i, n);
    const F16 c = load_some(cos + i, n), s = load_some(sin + i, n);
    store_some(out + i, n, first * c - second * s);
    store_some(out + half + i, n, second * c + first * s);
  }
}

// As `rms_norm` of elementwise.cpp does a row.
template <class T>
void normalise(const T* x, const T* gains, float eps, int64_t size, T* out) {
  F16 squares = zero();
  for (int64_t i = 0; i < size; i += 16) {
    const F16 v = load_some(x + i, size - i);
    squares = squares + v * v;
  }
  const F16 scale = set1(1.0f / __builtin_sqrtf(hsum(squares) / static_cast<float>(size) + eps));
  for (int64_t i = 0; i < size; i += 16) {
    T normed[16];
    store(normed, load_some(x + i, size - i) * scale);
    store_some(out + i, size - i, load(normed) * load_some(gains + i, size - i));
  }
}

template <class T>
void write_token(const LatentTokensArgs& args, int64_t token) {
  const LatentCache& cache = args.cache;
  const int64_t half = cache.rope_size / 2, width = cache.width(), slot = args.slots[token];
  const int64_t position = args.are_positions_wide ? static_cast<const int64_t*>(args.positions)[token]
                                                   : static_cast<const int32_t*>(args.positions)[token];
  const float *cos = args.cos + position * half, *sin = args.sin + position * half;
  const T* query = static_cast<const T*>(args.query) + token * args.query_stride + args.query_size - cache.rope_size;
  T* rotated = static_cast<T*>(args.rotated) + token * args.num_heads * width + cache.latent_size;
  for (int64_t head = 0; head < args.num_heads; ++head) {
    rotate(query + head * args.query_size, cos, sin, half, rotated + head * width);
  }
  if (slot < 0) return;
  const T* latent = static_cast<const T*>(args.latent) + token * args.latent_stride;
  T* row = static_cast<T*>(cache.data) + slot * width;
  normalise(latent, static_cast<const T*>(args.norm), args.eps, cache.latent_size, row);
  rotate(latent + cache.latent_size, cos, sin, half, row + cache.latent_size);
}

void write_latent_tokens(Pool& pool, const LatentTokensArgs& args) {
  parallel_for(pool, ceil_div(args.num_tokens, kTokensPerTask), [&](int64_t task, int) {
    const int64_t end = min_i64(args.num_tokens, (task + 1) * kTokensPerTask);
    for (int64_t token = task * kTokensPerTask; token < end; ++token) {
      args.cache.dtype == DType::f32 ? write_token<float>(args, token) : write_token<bf16>(args, token);
    }
  });
}

}  // namespace

extern const LatentKernels latent_kernels;
const LatentKernels latent_kernels = {latent_attention, write_latent_tokens, head_linear};

}  // namespace quire::QUIRE_TIER
