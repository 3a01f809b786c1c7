// Mixtures of experts: which experts a token goes to, and the sum of what they made of it. Written once for all tiers.
#include "quire/moe.h"

#include "simd/simd.h"

namespace quire::QUIRE_TIER {
namespace {

constexpr int64_t kRoutedPerTask = 4;  // tokens
constexpr int64_t kColumnsPerTask = 2048;

// A float as an integer of the same order; zeros of both signs are one, NaN lie outside the numbers. Never kTaken.
constexpr int32_t kTaken = INT32_MIN;
inline int32_t order_of(float x) {
  const float y = x + 0.0f;
  int32_t bits;
  __builtin_memcpy(&bits, &y, 4);
  const int32_t order = bits < 0 ? bits ^ 0x7fffffff : bits;
  return order == kTaken ? kTaken + 1 : order;
}

// The largest of `orders`, the first of equals. It is marked as taken.
inline int64_t take_largest(int32_t* orders, int64_t n) {
  int64_t best = 0;
  for (int64_t i = 1; i < n; ++i) {
    if (orders[i] > orders[best]) best = i;
  }
  orders[best] = kTaken;
  return best;
}

// values = e ** (x - largest), and their sum; both hold a multiple of 16 numbers, of which -inf count as none.
float exp_all(const float* x, int64_t padded, float* values) {
  F16 largest = set1(-__builtin_inff()), sum = zero();
  for (int64_t i = 0; i < padded; i += 16) largest = max(load(x + i), largest);
  const F16 most = set1(hmax(largest));
  for (int64_t i = 0; i < padded; i += 16) {
    const F16 value = exp(load(x + i) - most);
    store(values + i, value);
    sum = sum + value;
  }
  return hsum(sum);
}

void divide_all(float* values, int64_t padded, float divisor) {
  for (int64_t i = 0; i < padded; i += 16) store(values + i, load(values + i) / set1(divisor));
}

// One token's choice. Arrays hold a multiple of 16 numbers; logits beyond the experts are -inf.
class Router {
 public:
  Router(const RouteArgs& args, void* memory) : args_(args), padded_(round_up(args.num_experts, 16)) {
    logits_ = static_cast<float*>(memory);
    scores_ = logits_ + padded_;
    choice_ = scores_ + padded_;
    orders_ = reinterpret_cast<int32_t*>(choice_ + padded_);
    group_orders_ = orders_ + padded_;
  }
  static int64_t memory_bytes(const RouteArgs& args) { return 5 * 4 * round_up(args.num_experts, 16); }

  void route(int64_t token) {
    const int64_t n = args_.num_experts;
    __builtin_memcpy(logits_, args_.logits + token * n, static_cast<uint64_t>(n * 4));
    for (int64_t i = n; i < padded_; ++i) logits_[i] = -__builtin_inff();
    int32_t* ids = args_.expert_ids + token * args_.num_chosen;
    float* weights = args_.weights + token * args_.num_chosen;
    if (args_.scoring == Scoring::sparse_mixer) {
      mix(ids, weights);
    } else {
      score();
      choose(ids);
      weigh(ids, weights);
    }
    normalize(weights);
    if (args_.expert_scales == nullptr) return;
    for (int64_t j = 0; j < args_.num_chosen; ++j) weights[j] *= args_.expert_scales[ids[j]];
  }

 private:
  void score() {
    if (args_.scoring == Scoring::softmax) {
      divide_all(scores_, padded_, exp_all(logits_, padded_, scores_));
    } else if (args_.scoring == Scoring::sigmoid) {
      for (int64_t i = 0; i < padded_; i += 16) store(scores_ + i, sigmoid(load(logits_ + i)));
    } else {
      __builtin_memcpy(scores_, logits_, static_cast<uint64_t>(padded_ * 4));
    }
  }

  // Scores rise with logits, of which fewer are equal: these decide where nothing is added to the scores.
  void choose(int32_t* ids) {
    const int64_t n = args_.num_experts;
    const bool are_logits = args_.correction == nullptr && args_.num_groups == 1;
    for (int64_t i = 0; i < n; ++i) {
      choice_[i] = are_logits ? logits_[i] : args_.correction == nullptr ? scores_[i] : scores_[i] + args_.correction[i];
    }
    choose_groups();
    const int64_t group_size = n / args_.num_groups;
    for (int64_t i = 0; i < n; ++i) {
      orders_[i] = group_orders_[i / group_size] == kTaken ? order_of(choice_[i]) : kTaken;
    }
    for (int64_t j = 0; j < args_.num_chosen; ++j) ids[j] = static_cast<int32_t>(take_largest(orders_, n));
  }

  // The chosen groups are marked as taken.
  void choose_groups() {
    const int64_t group_size = args_.num_experts / args_.num_groups;
    for (int64_t group = 0; group < args_.num_groups; ++group) {
      const float* choice = choice_ + group * group_size;
      float best = choice[0], second = -__builtin_inff();
      for (int64_t i = 1; i < group_size; ++i) {
        second = choice[i] > best ? best : choice[i] > second ? choice[i] : second;
        best = choice[i] > best ? choice[i] : best;
      }
      group_orders_[group] = order_of(args_.sums_two && group_size > 1 ? best + second : best);
    }
    for (int64_t i = 0; i < args_.num_chosen_groups; ++i) take_largest(group_orders_, args_.num_groups);
  }

  void weigh(const int32_t* ids, float* weights) {
    const int64_t n = args_.num_chosen;
    for (int64_t j = 0; j < n; ++j) weights[j] = scores_[ids[j]];
    if (args_.scoring != Scoring::softmax_of_chosen) return;
    const int64_t padded = round_up(n, 16);
    for (int64_t j = 0; j < padded; ++j) choice_[j] = j < n ? weights[j] : -__builtin_inff();
    divide_all(scores_, padded, exp_all(choice_, padded, scores_));
    __builtin_memcpy(weights, scores_, static_cast<uint64_t>(n * 4));
  }

  // Source: Liu et al. 2024 (GRIN: GRadient-INformed MoE), section 2, without its noise.
  void mix(int32_t* ids, float* weights) {
    for (int64_t i = 0; i < args_.num_experts; ++i) orders_[i] = order_of(logits_[i]);
    for (int64_t j = 0; j < args_.num_chosen; ++j) {
      const int64_t best = take_largest(orders_, args_.num_experts);
      const float most = logits_[best];
      for (int64_t i = 0; i < padded_; ++i) {
        const float logit = logits_[i], size = logit < 0.0f ? -logit : logit;
        const bool is_far = (most - logit) / (size > most ? size : most) > 2.0f * args_.jitter;
        const bool is_taken = i < args_.num_experts && orders_[i] == kTaken && i != best;
        choice_[i] = is_far || is_taken ? -__builtin_inff() : logit;
      }
      const float sum = exp_all(choice_, padded_, scores_);
      ids[j] = static_cast<int32_t>(best);
      weights[j] = scores_[best] / sum;
    }
  }

  void normalize(float* weights) {
    float sum = args_.is_normalized ? 1e-20f : 1.0f;
    for (int64_t j = 0; j < args_.num_chosen && args_.is_normalized; ++j) sum += weights[j];
    for (int64_t j = 0; j < args_.num_chosen; ++j) weights[j] = weights[j] / sum * args_.scale;
  }

  const RouteArgs& args_;
  int64_t padded_;
  float *logits_, *scores_, *choice_;
  int32_t *orders_, *group_orders_;
};

// Rows of all experts, in the order of experts and then of tokens.
void sort_by_expert(const RouteArgs& args) {
  const int64_t num_rows = args.num_tokens * args.num_chosen;
  int32_t* starts = args.starts;
  for (int64_t expert = 0; expert <= args.num_experts; ++expert) starts[expert] = 0;
  for (int64_t i = 0; i < num_rows; ++i) ++starts[args.expert_ids[i]];
  int32_t end = 0;
  for (int64_t expert = 0; expert <= args.num_experts; ++expert) {
    end += starts[expert];
    starts[expert] = end;
  }
  // Backwards, so that every start ends where its expert begins.
  for (int64_t i = num_rows - 1; i >= 0; --i) {
    const int32_t row = --starts[args.expert_ids[i]];
    args.rows[row] = static_cast<int32_t>(i / args.num_chosen);
    args.places[i] = row;
  }
}

void route(Pool& pool, const RouteArgs& args) {
  parallel_for(pool, ceil_div(args.num_tokens, kRoutedPerTask), [&](int64_t task, int thread) {
    Router router(args, pool.scratch(thread, Router::memory_bytes(args)));
    const int64_t end = min_i64(args.num_tokens, (task + 1) * kRoutedPerTask);
    for (int64_t token = task * kRoutedPerTask; token < end; ++token) router.route(token);
  });
  sort_by_expert(args);
}

template <class T>
void combine_columns(const CombineArgs& args, int64_t token, int64_t first) {
  const int64_t end = min_i64(args.size, first + kColumnsPerTask);
  const int32_t* places = args.places + token * args.num_chosen;
  const float* weights = args.weights == nullptr ? nullptr : args.weights + token * args.num_chosen;
  const T* shared = args.shared == nullptr ? nullptr : static_cast<const T*>(args.shared) + token * args.size;
  F16 gate = set1(1.0f);
  if (args.shared_gate != nullptr) gate = sigmoid(set1(args.shared_gate[token]));
  for (int64_t i = first; i < end; i += 16) {
    const int64_t n = min_i64(16, end - i);
    F16 sum = zero();
    for (int64_t j = 0; j < args.num_chosen; ++j) {
      const F16 values = load_n(static_cast<const T*>(args.rows) + places[j] * args.size + i, n);
      sum = sum + (weights == nullptr ? values : values * set1(weights[j]));
    }
    if (shared != nullptr) sum = sum + load_n(shared + i, n) * gate;
    store_n(static_cast<T*>(args.out) + token * args.size + i, n, sum);
  }
}

template <class T>
void spread_columns(const SpreadArgs& args, int64_t token, int64_t first) {
  const int64_t end = min_i64(args.size, first + kColumnsPerTask);
  const T* x = static_cast<const T*>(args.x) + token * args.x_stride;
  for (int64_t j = 0; j < args.num_chosen; ++j) {
    const F16 weight = set1(args.weights[token * args.num_chosen + j]);
    T* out = static_cast<T*>(args.out) + args.places[token * args.num_chosen + j] * args.size;
    for (int64_t i = first; i < end; i += 16) {
      const int64_t n = min_i64(16, end - i);
      store_n(out + i, n, load_n(x + i, n) * weight);
    }
  }
}

// fn(token, first column) for all of a result [num_tokens][size].
template <class Args, class Fn>
void for_each_part(Pool& pool, const Args& args, const Fn& fn) {
  const int64_t per_token = ceil_div(args.size, kColumnsPerTask);
  parallel_for(pool, args.num_tokens * per_token,
               [&](int64_t task, int) { fn(task / per_token, task % per_token * kColumnsPerTask); });
}

void combine(Pool& pool, const CombineArgs& args) {
  for_each_part(pool, args, [&](int64_t token, int64_t first) {
    args.dtype == DType::bf16 ? combine_columns<bf16>(args, token, first) : combine_columns<float>(args, token, first);
  });
}

void spread(Pool& pool, const SpreadArgs& args) {
  for_each_part(pool, args, [&](int64_t token, int64_t first) {
    args.dtype == DType::bf16 ? spread_columns<bf16>(args, token, first) : spread_columns<float>(args, token, first);
  });
}

}  // namespace

extern const MoeKernels moe_kernels;
const MoeKernels moe_kernels = {route, combine, spread};

}  // namespace quire::QUIRE_TIER
