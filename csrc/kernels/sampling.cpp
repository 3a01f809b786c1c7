// Tokens from lines of logits. The logits are read once for the largest of each block, a second time only where the
// weight of the whole line is needed; filters then look at the few blocks that can matter. Nothing is sorted but the
// top tokens that a request asked to see.
#include "quire/sampling.h"

#include "kernels/sampling_lines.h"
#include "simd/simd.h"

namespace quire::QUIRE_TIER {
namespace {

constexpr int64_t kLinesPerThread = 2;     // from here on a thread does whole lines: they stay in its cache
constexpr int64_t kFirstCandidates = 128;  // tokens first looked at for top-p

// The largest logit of every block of every line, and the weight of parts of lines, in the pool's shared memory.
class Survey {
 public:
  Survey(Pool& pool, const LogitLines& lines)
      : pool_(pool),
        lines_(lines),
        num_blocks_(ceil_div(lines.vocab_size, kBlock)),
        num_parts_(ceil_div(lines.vocab_size, kColumnsPerTask)) {
    pool.lock();
    const int64_t maxima_bytes = round_up(lines.num_lines * num_blocks_ * 4, 64);
    char* memory = static_cast<char*>(pool.shared_scratch(maxima_bytes + lines.num_lines * num_parts_ * 8));
    maxima_ = reinterpret_cast<float*>(memory);
    weights_ = reinterpret_cast<uint64_t*>(memory + maxima_bytes);
  }
  ~Survey() { pool_.unlock(); }
  Survey(const Survey&) = delete;
  Survey& operator=(const Survey&) = delete;

  Line line(int64_t i) const {
    return {lines_.logits + i * lines_.stride, lines_.vocab_size, maxima_ + i * num_blocks_, num_blocks_};
  }
  int64_t num_parts() const { return num_parts_; }
  const uint64_t* weights(int64_t i) const { return weights_ + i * num_parts_; }

  // Surveys every line i and then calls `finish(i, thread)`. Lines are weighed that are usable and for which
  // `try_score(i, largest logit, score)` is true; none of them when `weighs` is false.
  template <class Score, class TryScore, class Finish>
  void run(bool weighs, const TryScore& try_score, const Finish& finish) const {
    const auto weigh = [&](int64_t i, int64_t part, int64_t end_part) {
      float largest;
      Score score;
      if (weighs && find_largest(line(i), largest) && try_score(i, largest, score)) {
        for (; part < end_part; ++part) weigh_part(i, part, score, score(largest));
      }
    };
    if (lines_.num_lines >= kLinesPerThread * pool_.num_threads()) {
      parallel_for(pool_, lines_.num_lines, [&](int64_t i, int thread) {
        find(i, 0, num_parts_);
        weigh(i, 0, num_parts_);
        finish(i, thread);
      });
      return;
    }
    const int64_t num_tasks = lines_.num_lines * num_parts_;
    parallel_for(pool_, num_tasks, [&](int64_t task, int) {
      find(task / num_parts_, task % num_parts_, task % num_parts_ + 1);
    });
    if (weighs) {
      parallel_for(pool_, num_tasks, [&](int64_t task, int) {
        weigh(task / num_parts_, task % num_parts_, task % num_parts_ + 1);
      });
    }
    parallel_for(pool_, lines_.num_lines, finish);
  }

 private:
  void find(int64_t i, int64_t part, int64_t end_part) const {
    const int64_t end = min_i64(num_blocks_, end_part * kBlocksPerTask);
    find_maxima(line(i).logits, lines_.vocab_size, part * kBlocksPerTask, end, maxima_ + i * num_blocks_);
  }
  template <class Score>
  void weigh_part(int64_t i, int64_t part, const Score& score, float largest) const {
    const int64_t end = min_i64(lines_.vocab_size, (part + 1) * kColumnsPerTask);
    weights_[i * num_parts_ + part] = QUIRE_TIER::weigh(line(i), score, largest, part * kColumnsPerTask, end);
  }

  Pool& pool_;
  const LogitLines& lines_;
  int64_t num_blocks_, num_parts_;
  float* maxima_;
  uint64_t* weights_;
};

inline uint64_t sum(const uint64_t* weights, int64_t n) {
  uint64_t total = 0;
  for (int64_t i = 0; i < n; ++i) total += weights[i];
  return total;
}

// How much weight tokens likelier than the last one kept must stay below.
inline uint64_t wanted_weight(uint64_t total, double top_p) {
  const double wanted = __builtin_ceil(top_p * static_cast<double>(total));
  if (!(wanted > 1.0)) return 1;
  return wanted < static_cast<double>(total) ? static_cast<uint64_t>(wanted) : total;
}

// floor(uniform * total), exactly; below total.
inline uint64_t scaled_uniform(double uniform, uint64_t total) {
  const uint64_t numerator = static_cast<uint64_t>(uniform * 9007199254740992.0);  // 2 ** 53
  return static_cast<uint64_t>((static_cast<unsigned __int128>(numerator) * total) >> 53);
}

// The draw from one line. Lines without a minimum or a count of tokens need the weights of their parts.
class Draw {
 public:
  Draw(const SampleArgs& args, int64_t i, const Line& line, float largest)
      : line_(line), score_{args.temperature[i]}, largest_(score_(largest)), top_p_(args.top_p[i]),
        uniform_(args.uniforms[i]), log_min_p_(args.log_min_p[i]), top_k_(args.top_k[i]) {}

  static bool is_filtered(const SampleArgs& args, int64_t i) {
    const bool has_top_k = args.top_k[i] > 0 && args.top_k[i] < args.lines.vocab_size;
    return has_top_k || args.log_min_p[i] > -infinity();
  }

  float threshold() const { return threshold_; }

  int32_t run(bool is_filtered, const uint64_t* parts, int64_t num_parts, Candidates& candidates) {
    uint64_t total;
    if (is_filtered) {
      filter(candidates);
      total = candidates.weigh(largest_);
    } else {
      total = sum(parts, num_parts);
      if (!(top_p_ < 1.0)) return draw_from_parts(parts, scaled_uniform(uniform_, total));
      collect_nucleus(candidates, total);
    }
    if (top_p_ < 1.0) total = keep_nucleus(candidates, total);
    uint64_t left = scaled_uniform(uniform_, total);
    for (int64_t i = 0;; ++i) {
      if (candidates.weights[i] > left) return candidates.ids[i];
      left -= candidates.weights[i];
    }
  }

 private:
  // min-p and top-k.
  void filter(Candidates& candidates) {
    if (log_min_p_ > -infinity()) threshold_ = largest_ + (log_min_p_ < 0.0f ? log_min_p_ : 0.0f);
    const bool has_top_k = top_k_ > 0 && top_k_ < line_.size;
    if (has_top_k) {
      const float bound = bound_for_count(line_, score_, top_k_, candidates.keys);
      threshold_ = bound > threshold_ ? bound : threshold_;
    }
    candidates.collect(line_, score_, threshold_);
    if (!has_top_k || candidates.count <= top_k_) return;
    candidates.set_keys();
    threshold_ = score_of_key(select(candidates.keys, nullptr, candidates.count, top_k_).key);
    candidates.keep_from(threshold_);
  }

  // At least the tokens that top-p keeps, of a line that no other filter cut; fills their weights.
  void collect_nucleus(Candidates& candidates, uint64_t total) const {
    const uint64_t wanted = wanted_weight(total, top_p_);
    candidates.collect(line_, score_,
                       bound_for_count(line_, score_, min_i64(kFirstCandidates, line_.num_blocks), candidates.keys));
    if (candidates.weigh(largest_) >= wanted) return;
    // All tokens below an even share of what top-p drops weigh less than that together.
    const double share = (1.0 - top_p_) * static_cast<double>(total) / static_cast<double>(line_.size);
    const float bound = largest_ + static_cast<float>(__builtin_log(share / (int64_t{1} << kFractionBits))) - 0.01f;
    candidates.collect(line_, score_, bound < largest_ ? bound : -infinity());
    if (candidates.weigh(largest_) >= wanted) return;
    candidates.collect(line_, score_, -infinity());
    candidates.weigh(largest_);
  }

  // top-p, given the weight of all tokens before it. Returns the weight of those it keeps.
  uint64_t keep_nucleus(Candidates& candidates, uint64_t total) {
    candidates.set_keys();
    __builtin_memcpy(candidates.spare, candidates.weights, sizeof(uint64_t) * candidates.count);
    const uint64_t wanted = wanted_weight(total, top_p_);
    threshold_ = score_of_key(select(candidates.keys, candidates.spare, candidates.count, wanted).key);
    return candidates.keep_weights_from(threshold_);
  }

  int32_t draw_from_parts(const uint64_t* parts, uint64_t left) const {
    int64_t part = 0;
    for (; parts[part] <= left; ++part) left -= parts[part];
    const int64_t end = min_i64(line_.size, (part + 1) * kColumnsPerTask);
    const F16 top = set1(largest_), none = set1(-infinity());
    for (int64_t i = part * kColumnsPerTask;; i += 16) {
      uint64_t lanes[16];
      store(lanes, weights_of(score_(load_or(line_.logits + i, end - i, none)) - top));
      for (int lane = 0; lane < 16; ++lane) {
        if (lanes[lane] > left) return static_cast<int32_t>(i + lane);
        left -= lanes[lane];
      }
    }
  }

  const Line& line_;
  Tempered score_;
  float largest_;  // score
  double top_p_;
  double uniform_;
  float log_min_p_;
  int32_t top_k_;
  float threshold_ = -infinity();
};

// Cold enough to overflow, a draw is the likeliest token too.
inline bool is_drawn(const SampleArgs& args, int64_t i, float largest) {
  if (args.temperature == nullptr || !(args.temperature[i] > 0.0f)) return false;
  const float score = largest / args.temperature[i];
  return score < infinity() && score > -infinity();
}

void sample_line(const SampleArgs& args, const Survey& survey, int64_t i, Pool& pool, int thread) {
  const Line line = survey.line(i);
  float largest, threshold = -infinity();
  if (!find_largest(line, largest)) {
    args.token_ids[i] = -1;
  } else if (!is_drawn(args, i, largest)) {
    args.token_ids[i] = find_id(line, largest);
  } else {
    Candidates candidates(pool.scratch(thread, Candidates::bytes(line.size)), line.size);
    Draw draw(args, i, line, largest);
    args.token_ids[i] = draw.run(Draw::is_filtered(args, i), survey.weights(i), survey.num_parts(), candidates);
    threshold = draw.threshold();
  }
  if (args.thresholds != nullptr) args.thresholds[i] = threshold;
}

void sample(Pool& pool, const SampleArgs& args) {
  const int64_t num_lines = args.lines.num_lines;
  if (num_lines == 0) return;
  const Survey survey(pool, args.lines);
  bool weighs = false;
  for (int64_t i = 0; args.temperature != nullptr && i < num_lines; ++i) {
    weighs |= args.temperature[i] > 0.0f && !Draw::is_filtered(args, i);
  }
  const auto try_score = [&](int64_t i, float largest, Tempered& score) {
    if (!is_drawn(args, i, largest) || Draw::is_filtered(args, i)) return false;
    score.temperature = args.temperature[i];
    return true;
  };
  survey.run<Tempered>(weighs, try_score,
                       [&](int64_t i, int thread) { sample_line(args, survey, i, pool, thread); });
}

// The first two words of Philox4x32-10 make 53 random bits.
// Source: Salmon, Moraes, Dror, Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3", section 3.3.
inline double philox_uniform(uint64_t seed, uint64_t position, uint32_t stream) {
  uint32_t key[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
  uint32_t word[4] = {static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32), stream, 0};
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53} * word[0], b = uint64_t{0xCD9E8D57} * word[2];
    const uint32_t next0 = static_cast<uint32_t>(b >> 32) ^ word[1] ^ key[0];
    const uint32_t next2 = static_cast<uint32_t>(a >> 32) ^ word[3] ^ key[1];
    word[1] = static_cast<uint32_t>(b);
    word[3] = static_cast<uint32_t>(a);
    word[0] = next0;
    word[2] = next2;
    key[0] += 0x9E3779B9u;
    key[1] += 0xBB67AE85u;
  }
  const uint64_t mantissa = static_cast<uint64_t>(word[0]) << 21 | word[1] >> 11;
  return static_cast<double>(mantissa) * (1.0 / 9007199254740992.0);  // 2 ** -53
}

void uniforms(const UniformArgs& args) {
  for (int64_t i = 0; i < args.count; ++i) {
    args.uniforms[i] = philox_uniform(args.seeds[i], args.positions[i], args.stream);
  }
}

void apply_penalties(Pool& pool, const PenaltyArgs& args) {
  parallel_for(pool, args.num_entries, [&](int64_t entry, int) {
    const int64_t line = args.line_ids[entry];
    if (line < 0 || line >= args.lines.num_lines) return;
    float* logits = args.lines.logits + line * args.lines.stride;
    const float* strengths = args.strengths + 3 * entry;
    for (int64_t i = args.starts[entry]; i < args.starts[entry + 1]; ++i) {
      const int64_t id = args.ids[i];
      if (id < 0 || id >= args.lines.vocab_size) continue;
      const float value = logits[id] > 0.0f ? logits[id] / strengths[0] : logits[id] * strengths[0];
      const float presence = args.counts[i] > 0.0f ? strengths[2] : 0.0f;
      logits[id] = (value - strengths[1] * args.counts[i]) - presence;
    }
  });
}

void apply_bitmask(Pool& pool, const BitmaskArgs& args) {
  const int64_t vocab_size = args.lines.vocab_size, num_words = ceil_div(vocab_size, 32);
  const int64_t num_parts = ceil_div(vocab_size, kColumnsPerTask);
  parallel_for(pool, args.num_masks * num_parts, [&](int64_t task, int) {
    const int64_t mask = task / num_parts, start = task % num_parts * kColumnsPerTask;
    const int64_t line = args.line_ids != nullptr ? args.line_ids[mask] : mask;
    if (line < 0 || line >= args.lines.num_lines) return;
    float* logits = args.lines.logits + line * args.lines.stride;
    const int32_t* words = args.masks + mask * num_words;
    const int64_t end = min_i64(vocab_size, start + kColumnsPerTask);
    const F16 impossible = set1(-infinity());
    for (int64_t i = start; i < end; i += 16) {
      const uint32_t allowed = static_cast<uint32_t>(words[i / 32]) >> (i & 16) & kAllLanes;
      if (allowed == kAllLanes) continue;
      if (end - i >= 16) {
        store(logits + i, allowed == 0 ? impossible : select_bits(allowed, load(logits + i), impossible));
      } else {
        store_n(logits + i, end - i, select_bits(allowed, load_n(logits + i, end - i), impossible));
      }
    }
  });
}

// The natural logarithm of x >= 1 within 1e-15, by arithmetic alone: the same bits on every machine.
inline double log_of(double x) {
  int64_t bits;
  __builtin_memcpy(&bits, &x, 8);
  int64_t exponent = (bits >> 52) - 1023;
  bits = (bits & 0xfffffffffffff) | int64_t{1023} << 52;
  double mantissa;
  __builtin_memcpy(&mantissa, &bits, 8);
  if (mantissa > 1.41421356) {
    mantissa *= 0.5;
    ++exponent;
  }
  const double s = (mantissa - 1.0) / (mantissa + 1.0);  // log(m) = 2 artanh(s)
  double series = 0.0;
  for (int k = 23; k > 0; k -= 2) series = series * (s * s) + 1.0 / k;
  return 2.0 * s * series + static_cast<double>(exponent) * 0.69314718055994530942;
}

template <class Score>
int64_t count_from(const Line& line, const Score& score, float bound) {
  int64_t count = 0;
  const F16 low = set1(bound);
  for (int64_t block = 0; block < line.num_blocks; ++block) {
    if (score(line.maxima[block]) < bound) continue;
    const int64_t end = min_i64(line.size, (block + 1) * kBlock);
    for (int64_t i = block * kBlock; i < end; i += 16) {
      const uint32_t below = less_mask(score(load_or(line.logits + i, end - i, zero())), low);
      count += __builtin_popcount(~below & lanes_below(end - i));
    }
  }
  return count;
}

// The `wanted` largest scores, falling; of equals the lowest ids.
template <class Score>
void write_top(const Line& line, const Score& score, int64_t wanted, Candidates& found, int32_t* ids, float* scores) {
  found.collect(line, score, bound_for_count(line, score, wanted, found.keys));
  found.set_keys();
  const Selected last = select(found.keys, nullptr, found.count, wanted);
  int64_t equals_left = wanted - static_cast<int64_t>(last.above), n = 0;
  for (int64_t i = 0; i < found.count; ++i) {
    const uint32_t key = key_of(found.scores[i]);
    if (key < last.key || (key == last.key && equals_left-- <= 0)) continue;
    found.weights[n++] = static_cast<uint64_t>(key) << 32 | (0xffffffffu - static_cast<uint32_t>(found.ids[i]));
  }
  const uint64_t* sorted = sort_falling(found.weights, found.spare, n);
  for (int64_t i = 0; i < n; ++i) {
    ids[i] = static_cast<int32_t>(0xffffffffu - static_cast<uint32_t>(sorted[i]));
    scores[i] = score(line.logits[ids[i]]);
  }
}

template <class Score>
void write_line(const LogprobsArgs& args, int64_t i, const Line& line, const Score& score, Candidates& candidates) {
  const int32_t token_id = args.token_ids[i];
  if (token_id >= 0 && token_id < line.size) {
    args.scores[i * args.width] = score(line.logits[token_id]);
    args.ranks[i] = static_cast<int32_t>(count_from(line, score, args.scores[i * args.width]));
  }
  const int64_t num_top = min_i64(line.size, min_i64(args.width - 1, args.num_top[i]));
  if (num_top <= 0) return;
  write_top(line, score, num_top, candidates, args.ids + i * args.width + 1, args.scores + i * args.width + 1);
}

void logprobs(Pool& pool, const LogprobsArgs& args) {
  if (args.lines.num_lines == 0) return;
  const Survey survey(pool, args.lines);
  const auto try_score = [](int64_t, float, Plain&) { return true; };
  survey.run<Plain>(!args.is_logits, try_score, [&](int64_t i, int thread) {
    const Line line = survey.line(i);
    const int64_t num_top = min_i64(line.size, min_i64(args.width - 1, args.num_top[i]));
    for (int64_t j = 0; j <= num_top; ++j) {
      args.ids[i * args.width + j] = j == 0 ? args.token_ids[i] : static_cast<int32_t>(j - 1);
      args.scores[i * args.width + j] = __builtin_nanf("");
    }
    args.ranks[i] = 0;
    float largest;
    if (!find_largest(line, largest)) return;
    Candidates candidates(pool.scratch(thread, Candidates::bytes(line.size)), line.size);
    if (args.is_logits) return write_line(args, i, line, Plain{}, candidates);
    const double total = static_cast<double>(sum(survey.weights(i), survey.num_parts()));
    const double unit = static_cast<double>(int64_t{1} << kFractionBits);
    write_line(args, i, line, LogSoftmax{largest, static_cast<float>(log_of(total / unit))}, candidates);
  });
}

}  // namespace

extern const SamplingKernels sampling_kernels;
const SamplingKernels sampling_kernels = {uniforms, sample, apply_penalties, apply_bitmask, logprobs};

}  // namespace quire::QUIRE_TIER
