// Attention's scores to softmax weights, as the products take them. The sum of a row's weights has one order: by lanes,
// in bfloat16 the second of each two tokens before the first; tiles of 32 tokens in turns to two sums; then both sums.
#pragma once

#include "kernels/attention_scratch.h"

namespace quire::QUIRE_TIER {
namespace {

constexpr float kLowest = -__builtin_inff();
constexpr float kLog2OfE = 1.44269504f;

// Tokens whose weights are found at a time, two tiles; and how many vectors of them in registers.
constexpr int64_t kWeighed = 64;
#if defined(QUIRE_SIMD_AVX512)
constexpr int kVectors = 4;
#else
constexpr int kVectors = 2;
#endif

// Consecutive rows of an item, and the tokens of one split that any of them sees.
struct Block {
  int64_t first_row;
  int64_t num_rows;
  int64_t base;    // first token of the split
  int64_t oldest;  // seen: oldest .. end - 1
  int64_t end;
};

template <class T>
class Softmax {
 public:
  Softmax(const PagedAttentionArgs& args, const Item& item, const Scratch<T>& scratch)
      : args_(args), item_(item), scratch_(scratch), group_(group_size(args)),
        is_plain_(args.scale > 0.0f && args.soft_cap <= 0.0f && args.slopes == nullptr) {}

  // The block's scores become weights, zero for tokens that a row does not see; their maxima and sums too. Row by row in
  // three passes: one alone would wait for its maximum, and again for its sum.
  void find_weights(const Block& block) const {
    const int64_t begin = (block.oldest - block.base) / kWeighed * kWeighed;
    const int64_t end = round_up(block.end - block.base, kWeighed);
    const float scale = is_plain_ ? args_.scale : 1.0f;
    for (int64_t r = 0; r < block.num_rows; ++r) scratch_.block_maxima[r] = find_maximum(block, r, begin, end);
    const F16 factor = set1(sizeof(T) == 2 ? scale * kLog2OfE : scale);
    for (int64_t r = 0; r < block.num_rows; ++r) {
      store(scratch_.lane_sums + 16 * r, weigh_row(r, begin, end, scratch_.block_maxima[r], factor));
    }
    for (int64_t r = 0; r < block.num_rows; ++r) {
      scratch_.block_sums[r] = hsum(load(scratch_.lane_sums + 16 * r));
      scratch_.block_maxima[r] *= scale;
    }
  }

 private:
  // Of a row's scores, those of tokens that it does not see made the lowest. Scores of a plain layer are multiplied by
  // its scale once the maximum is subtracted, any other's before.
  float find_maximum(const Block& block, int64_t r, int64_t begin, int64_t end) const {
    const int64_t position = item_.position + (block.first_row + r) / group_, oldest = oldest_seen(args_, position);
    float* const row = scratch_.scores + r * kScoreStride;
    if (!is_plain_) adjust_row(block, r);
    hide(row, begin, min_i64(oldest - block.base, end));
    hide(row, max_i64(begin, position + 1 - block.base), end);
    F16 tops[2] = {set1(kLowest), set1(kLowest)};
    for (int64_t column = begin; column < end; column += kTile) {
      for (int i = 0; i < 2; ++i) tops[i] = max(tops[i], load(row + column + 16 * i));
    }
    return hmax(max(tops[0], tops[1]));
  }

  void adjust_row(const Block& block, int64_t r) const {
    const int64_t row = block.first_row + r, position = item_.position + row / group_;
    const F16 slope = set1(args_.slopes ? args_.slopes[item_.kv_head * group_ + row % group_] : 0.0f);
    float* const scores = scratch_.scores + r * kScoreStride - block.base;
    for (int64_t token = block.oldest / 16 * 16; token < block.end; token += 16) {
      store(scores + token, adjust(load(scores + token), slope, static_cast<float>(token - position)));
    }
  }

  // Scores to what the softmax is taken of.
  F16 adjust(F16 score, F16 slope, float distance) const {
    score = score * set1(args_.scale);
    if (args_.soft_cap > 0.0f) score = set1(args_.soft_cap) * tanh(score / set1(args_.soft_cap));
    if (args_.slopes != nullptr) score = score + slope * (lane_numbers() + set1(distance));
    return score;
  }

  // Scores of columns first .. end - 1 become those of no weight.
  static void hide(float* row, int64_t first, int64_t end) {
    for (; first < end; first += 16) store_some(row + first, end - first, set1(kLowest));
  }

  // Returns the sum of the weights, by lanes.
  F16 weigh_row(int64_t r, int64_t begin, int64_t end, float maximum, F16 factor) const {
    float* const row = scratch_.scores + r * kScoreStride;
    F16 sums[2] = {zero(), zero()};
    if (maximum == kLowest) {  // no token has a weight
      for (int64_t column = begin; column < end; column += kTile) put_weights(r, row, column, zero(), zero(), zero());
    } else {
      const F16 highest = set1(maximum);
      for (int64_t column = begin; column < end; column += kWeighed) weigh(r, row, column, highest, factor, sums);
    }
    return sums[0] + sums[1];
  }

  // Scores of kWeighed tokens to weights, added to the sums of their tiles.
  void weigh(int64_t r, float* row, int64_t column, F16 highest, F16 factor, F16 (&sums)[2]) const {
    for (int64_t first = column; first < column + kWeighed; first += 16 * kVectors) {
      F16 weights[kVectors];
      for (int i = 0; i < kVectors; ++i) weights[i] = (load(row + first + 16 * i) - highest) * factor;
      if constexpr (sizeof(T) == 2) {
        exp2_coarse_inplace(weights);
      } else {
        for (int i = 0; i < kVectors; ++i) weights[i] = exp(weights[i]);
      }
      for (int i = 0; i < kVectors; i += 2) {
        F16& sum = sums[(first - column) / kTile + i / 2];
        sum = put_weights(r, row, first + 16 * i, weights[i], weights[i + 1], sum);
      }
    }
  }

  // Stores the weights of 32 tokens; returns `sum` with them added as they are then.
  F16 put_weights(int64_t r, float* row, int64_t column, F16 first, F16 second, F16 sum) const {
#if defined(QUIRE_TIER_AVX512_BF16)
    if constexpr (kHasPairs<T>) return store_weight_pairs(row + column / 2, first, second, sum);
#endif
    if constexpr (sizeof(T) == 2) {
      first = as_bf16(first);
      second = as_bf16(second);
    }
    if constexpr (kHasAmx<T>) {
      store_amx_weights(scratch_.amx, r, column, first);
      store_amx_weights(scratch_.amx, r, column + 16, second);
    } else {
      store(row + column, first);
      store(row + column + 16, second);
    }
    if constexpr (sizeof(T) == 2) {
      F16 even, odd;
      split_pairs(first, second, even, odd);
      return (sum + odd) + even;
    }
    return (sum + first) + second;
  }

  const PagedAttentionArgs& args_;
  const Item& item_;
  const Scratch<T>& scratch_;
  const int64_t group_;
  const bool is_plain_;
};

}  // namespace
}  // namespace quire::QUIRE_TIER
