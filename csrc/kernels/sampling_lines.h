// What the sampling kernels share: the largest logit of each block of a line, exact sums of weights, exact selection.
//
// Every result is a set or an integer sum, so it cannot depend on threads, tiers or the order of work. A weight is
// e ** (score - largest) in units of 2 ** -42, rounded down to an integer: sums over 2 ** 20 tokens stay below 2 ** 63,
// and a token less than 2 ** -42 times as likely as the likeliest weighs nothing.
#pragma once

#include "quire/sampling.h"
#include "simd/simd.h"

namespace quire::QUIRE_TIER {
namespace {

constexpr int64_t kBlock = 256;          // columns whose largest logit is kept
constexpr int64_t kColumnsPerTask = 16384;
constexpr int64_t kBlocksPerTask = kColumnsPerTask / kBlock;
constexpr int kFractionBits = 42;
constexpr float kWeightlessBelow = -29.5f;  // e ** -29.12 is 2 ** -42
constexpr uint32_t kAllLanes = 0xffffu;

inline float infinity() { return __builtin_inff(); }
inline uint32_t lanes_below(int64_t n) { return n >= 16 ? kAllLanes : (1u << n) - 1; }
inline F16 load_or(const float* p, int64_t n, F16 otherwise) {
  return n >= 16 ? load(p) : select_bits(lanes_below(n), load_n(p, n), otherwise);
}

// A score is a function of a logit that never falls: per lane and alone, with the same bits.
struct Plain {
  F16 operator()(F16 x) const { return x; }
  float operator()(float x) const { return x; }
};
struct Tempered {
  float temperature;
  F16 operator()(F16 x) const { return temperature == 1.0f ? x : x / set1(temperature); }
  float operator()(float x) const { return x / temperature; }
};
struct LogSoftmax {
  float largest, log_total;
  F16 operator()(F16 x) const { return (x - set1(largest)) - set1(log_total); }
  float operator()(float x) const { return (x - largest) - log_total; }
};

// One line and the largest logit of each of its blocks.
struct Line {
  const float* logits;
  int64_t size;
  const float* maxima;
  int64_t num_blocks;
};

// The largest of p[0 .. n), ignoring NaN; lanes of `unusable` become 1 where there is NaN or +inf.
inline float largest_of(const float* p, int64_t n, F16& unusable) {
  const F16 low = set1(-infinity()), high = set1(infinity()), one = set1(1.0f);
  F16 a = low, b = low;
  int64_t i = 0;
  for (; i + 32 <= n; i += 32) {
    const F16 x = load(p + i), y = load(p + i + 16);
    a = max(x, a);  // operands in this order: NaN leaves `a`
    b = max(y, b);
    unusable = select_less(x, high, unusable, one);
    unusable = select_less(y, high, unusable, one);
  }
  for (; i < n; i += 16) {
    const F16 x = load_or(p + i, n - i, low);
    a = max(x, a);
    unusable = select_less(x, high, unusable, one);
  }
  return hmax(max(a, b));
}

// Fills `maxima` of some blocks; the first of them is NaN when any logit is NaN or +inf.
inline void find_maxima(const float* logits, int64_t size, int64_t first_block, int64_t end_block, float* maxima) {
  F16 unusable = zero();
  for (int64_t block = first_block; block < end_block; ++block) {
    const int64_t start = block * kBlock;
    maxima[block] = largest_of(logits + start, min_i64(kBlock, size - start), unusable);
  }
  if (hmax(unusable) > 0.0f) maxima[first_block] = __builtin_nanf("");
}

// False when the line holds NaN or +inf, or nothing finite.
inline bool find_largest(const Line& line, float& largest) {
  F16 unusable = zero();
  largest = largest_of(line.maxima, line.num_blocks, unusable);
  return !(hmax(unusable) > 0.0f) && largest > -infinity();
}

// The lowest id whose logit is `largest`.
inline int32_t find_id(const Line& line, float largest) {
  for (int64_t block = 0; block < line.num_blocks; ++block) {
    if (line.maxima[block] != largest) continue;
    for (int64_t i = block * kBlock;; ++i) {
      if (line.logits[i] == largest) return static_cast<int32_t>(i);
    }
  }
  return -1;
}

// The weights of sixteen scores, given less the largest score: e ** x in units of 2 ** -42. x <= 0, not NaN.
inline Fixed16 weights_of(F16 x) {
  const ExpParts parts = exp_parts(max(x, set1(kWeightlessBelow)));
  return to_fixed(parts.mantissa * pow2(parts.exponent + set1(static_cast<float>(kFractionBits))));
}
inline uint64_t total_of(const Fixed16& sums) {
  uint64_t lanes[16], total = 0;
  store(lanes, sums);
  for (int i = 0; i < 16; ++i) total += lanes[i];
  return total;
}

// The weight of the columns [start, end) of a line, `start` at a block.
template <class Score>
uint64_t weigh(const Line& line, const Score& score, float largest, int64_t start, int64_t end) {
  const F16 top = set1(largest), none = set1(-infinity());
  Fixed16 sums = fixed_zero();
  for (; start < end; start += kBlock) {
    if (score(line.maxima[start / kBlock]) - largest < kWeightlessBelow) continue;
    const int64_t block_end = min_i64(end, start + kBlock);
    for (int64_t i = start; i < block_end; i += 16) {
      sums = sums + weights_of(score(load_or(line.logits + i, block_end - i, none)) - top);
    }
  }
  return total_of(sums);
}

// Integers in the order of the floats; both zeros are one.
inline uint32_t key_of(float x) {
  const float canonical = x + 0.0f;
  uint32_t bits;
  __builtin_memcpy(&bits, &canonical, 4);
  return bits ^ ((bits >> 31) != 0 ? 0xffffffffu : 0x80000000u);
}
inline float score_of_key(uint32_t key) {
  const uint32_t bits = key ^ ((key >> 31) != 0 ? 0x80000000u : 0xffffffffu);
  float x;
  __builtin_memcpy(&x, &bits, 4);
  return x;
}

struct Selected {
  uint32_t key;
  uint64_t above;  // weight of the larger keys
};

// The smallest key whose larger keys weigh less than `wanted`, which is in [1, weight of all]. `weights` null: 1 each.
// Digit by digit below the bits that all share: only keys with the digits found so far stay. Overwrites both.
inline Selected select(uint32_t* keys, uint64_t* weights, int64_t n, uint64_t wanted) {
  uint32_t differing = 0;
  for (int64_t i = 0; i < n; ++i) differing |= keys[i] ^ keys[0];
  uint64_t above = 0;
  for (int bits = differing == 0 ? 0 : 32 - __builtin_clz(differing); bits > 0 && n > 1;) {
    const int shift = bits > 8 ? bits - 8 : 0;
    uint64_t bins[256] = {};
    for (int64_t i = 0; i < n; ++i) bins[keys[i] >> shift & 255u] += weights != nullptr ? weights[i] : 1;
    uint32_t digit = 255;
    while (digit > 0 && above + bins[digit] < wanted) above += bins[digit--];
    int64_t kept = 0;
    for (int64_t i = 0; i < n; ++i) {
      const bool is_kept = (keys[i] >> shift & 255u) == digit;
      keys[kept] = keys[i];
      if (weights != nullptr) weights[kept] = weights[i];
      kept += is_kept;
    }
    n = kept;
    bits = shift;
  }
  return {keys[0], above};
}

// Falling order, by merging runs; `spare` is as long. Returns where the result lies.
inline uint64_t* sort_falling(uint64_t* values, uint64_t* spare, int64_t n) {
  for (int64_t run = 1; run < n; run *= 2) {
    for (int64_t start = 0; start < n; start += 2 * run) {
      const int64_t middle = min_i64(n, start + run), end = min_i64(n, start + 2 * run);
      int64_t a = start, b = middle;
      for (int64_t i = start; i < end; ++i) {
        spare[i] = b == end || (a < middle && values[a] > values[b]) ? values[a++] : values[b++];
      }
    }
    uint64_t* const other = values;
    values = spare;
    spare = other;
  }
  return values;
}

// Tokens taken out of a line, in rising id; and room to select among them.
struct Candidates {
  static constexpr int64_t kBytesPerToken = 28;

  int64_t count;
  int32_t* ids;
  float* scores;
  uint32_t* keys;
  uint64_t* weights;
  uint64_t* spare;

  // With room for one vector past the last token.
  static int64_t bytes(int64_t size) { return kBytesPerToken * room_for(size); }
  Candidates(void* memory, int64_t size) : count(0) {
    const int64_t room = room_for(size);
    weights = static_cast<uint64_t*>(memory);
    spare = weights + room;
    ids = reinterpret_cast<int32_t*>(spare + room);
    scores = reinterpret_cast<float*>(ids + room);
    keys = reinterpret_cast<uint32_t*>(scores + room);
  }

  static int64_t room_for(int64_t size) { return round_up(size, 16) + 16; }

  // Every token with a score of at least `bound`.
  template <class Score>
  void collect(const Line& line, const Score& score, float bound) {
    const F16 low = set1(bound);
    count = 0;
    for (int64_t block = 0; block < line.num_blocks; ++block) {
      if (score(line.maxima[block]) < bound) continue;
      const int64_t end = min_i64(line.size, (block + 1) * kBlock);
      for (int64_t i = block * kBlock; i < end; i += 16) {
        const F16 values = score(load_or(line.logits + i, end - i, zero()));
        const uint32_t bits = ~less_mask(values, low) & lanes_below(end - i);
        if (bits != 0) count += pack(bits, values, static_cast<int32_t>(i), scores + count, ids + count);
      }
    }
  }

  void keep_from(float bound) {
    int64_t kept = 0;
    for (int64_t i = 0; i < count; ++i) {
      ids[kept] = ids[i];
      scores[kept] = scores[i];
      kept += scores[i] >= bound;
    }
    count = kept;
  }

  // Keeps `weights` too; returns their sum.
  uint64_t keep_weights_from(float bound) {
    int64_t kept = 0;
    uint64_t total = 0;
    for (int64_t i = 0; i < count; ++i) {
      const bool is_kept = scores[i] >= bound;
      ids[kept] = ids[i];
      scores[kept] = scores[i];
      weights[kept] = weights[i];
      total += is_kept ? weights[i] : 0;
      kept += is_kept;
    }
    count = kept;
    return total;
  }

  void set_keys() {
    for (int64_t i = 0; i < count; ++i) keys[i] = key_of(scores[i]);
  }

  // Fills `weights`; returns their sum.
  uint64_t weigh(float largest) {
    uint64_t total = 0;
    const F16 top = set1(largest), none = set1(-infinity());
    for (int64_t i = 0; i < count; i += 16) {
      store(weights + i, weights_of(load_or(scores + i, count - i, none) - top));
    }
    for (int64_t i = 0; i < count; ++i) total += weights[i];
    return total;
  }
};

// A score that at least `count` tokens of the line reach, -inf when the blocks cannot tell. Overwrites `keys`.
template <class Score>
float bound_for_count(const Line& line, const Score& score, int64_t count, uint32_t* keys) {
  if (count > line.num_blocks) return -infinity();
  for (int64_t i = 0; i < line.num_blocks; ++i) keys[i] = key_of(score(line.maxima[i]));
  return score_of_key(select(keys, nullptr, line.num_blocks, static_cast<uint64_t>(count)).key);
}

}  // namespace
}  // namespace quire::QUIRE_TIER
