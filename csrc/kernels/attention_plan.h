// Divides a step's attention into tasks of similar cost, long ones first.
//
// An item is one kv head with a few consecutive queries of one request: their heads of the group are the rows that
// share each key and value loaded. An item that is longer than a thread's fair share is cut into runs of splits, whose
// partial results are merged afterwards in the order of the splits: the same numbers as without the cut.
#pragma once

#include "kernels/attention_cache.h"

namespace quire::QUIRE_TIER {
namespace {

// Tokens whose softmax is taken at a time, counted from position 0: one order of additions for a query's result.
constexpr int64_t kSplit = 256;
// Rows of an item, unless the group alone has more.
constexpr int64_t kItemRows = 64;
// Where keys and values are packed first: enough for that to pay.
constexpr int64_t kPackedItemRows = 480;

struct Item {
  int64_t request;
  int64_t kv_head;
  int64_t first_token;  // row of the step's query
  int64_t num_tokens;
  int64_t position;  // of the first token
  // Tokens that any row sees.
  int64_t oldest;
  int64_t end;

  int64_t first_split() const { return oldest / kSplit; }
  int64_t end_split() const { return ceil_div(end, kSplit); }
};

// Splits first .. end - 1 of an item. With partials each split's result goes there, else the item is whole.
struct Task {
  Item item;
  int64_t first_split;
  int64_t end_split;
  float* partials;
};

struct Plan {
  Task* tasks;
  int64_t num_tasks;
  Task* cut_items;  // whole items whose partials are to be merged
  int64_t num_cut_items;
};

inline int64_t group_size(const PagedAttentionArgs& args) { return args.num_heads / args.cache.num_kv_heads; }
inline int64_t item_tokens(const PagedAttentionArgs& args, int64_t max_rows = kItemRows) {
  return max_i64(1, max_rows / group_size(args));
}
inline int64_t padded_head(const PagedAttentionArgs& args) { return round_up(args.cache.head_size, 16); }

// A row's partial result: its maximum, its sum, then its weighted values.
constexpr int64_t kPartialHead = 16;
inline int64_t partial_stride(const PagedAttentionArgs& args) { return kPartialHead + padded_head(args); }

template <class Fn>
inline void for_each_item(const PagedAttentionArgs& args, int64_t max_rows, const Fn& fn) {
  const int64_t step = item_tokens(args, max_rows);
  for (int64_t request = 0; request < args.num_reqs; ++request) {
    const int64_t start = args.query_start_loc[request], end = args.query_start_loc[request + 1];
    const int64_t first_position = args.seq_lens[request] - (end - start);
    for (int64_t token = start; token < end; token += step) {
      const int64_t num_tokens = min_i64(step, end - token), position = first_position + token - start;
      for (int64_t head = 0; head < args.cache.num_kv_heads; ++head) {
        fn(Item{request, head, token, num_tokens, position, oldest_seen(args, position), position + num_tokens});
      }
    }
  }
}

inline int64_t cost_of(const PagedAttentionArgs& args, const Item& item) {
  return (item.end - item.oldest) * ceil_div(item.num_tokens * group_size(args), 8);
}

// Costs within an eighth of each other share a class; classes run from the highest cost to the lowest.
constexpr int64_t kNumClasses = 256;
inline int64_t cost_class(int64_t cost) {
  const int64_t octave = 63 - __builtin_clzll(static_cast<unsigned long long>(cost) | 8);
  return kNumClasses - 1 - ((octave - 3) * 4 + ((cost >> (octave - 2)) & 3));
}

struct Shares {
  int64_t limit;  // an item of a higher cost is cut
  int64_t num_items;
};

inline Shares fair_shares(const PagedAttentionArgs& args, int64_t max_rows, int64_t num_threads) {
  int64_t total = 0, highest = 0, num_items = 0;
  for_each_item(args, max_rows, [&](const Item& item) {
    const int64_t cost = cost_of(args, item);
    total += cost;
    highest = max_i64(highest, cost);
    ++num_items;
  });
  const int64_t fair = ceil_div(total, num_threads);
  const bool is_even = ceil_div(num_items, num_threads) * highest <= fair + fair / 8;
  return {num_threads == 1 || is_even ? highest : max_i64(1, fair / 4), num_items};
}

inline int64_t num_runs(const PagedAttentionArgs& args, const Item& item, int64_t limit) {
  const int64_t wanted = ceil_div(cost_of(args, item), limit), num_splits = item.end_split() - item.first_split();
  const int64_t run = ceil_div(num_splits, min_i64(wanted, num_splits));
  return ceil_div(num_splits, run);
}

// In the pool's shared scratch: the caller holds its lock until the plan is done with.
inline Plan make_plan(Pool& pool, const PagedAttentionArgs& args, int64_t max_rows = kItemRows) {
  const Shares shares = fair_shares(args, max_rows, pool.num_threads());
  const int64_t group = group_size(args), stride = partial_stride(args);
  int64_t starts[kNumClasses + 1] = {}, num_tasks = 0, num_cut = 0, partial_floats = 0;
  for_each_item(args, max_rows, [&](const Item& item) {
    const int64_t runs = num_runs(args, item, shares.limit);
    starts[cost_class(cost_of(args, item) / runs) + 1] += runs;
    num_tasks += runs;
    if (runs == 1) return;
    ++num_cut;
    partial_floats += (item.end_split() - item.first_split()) * item.num_tokens * group * stride;
  });
  for (int64_t i = 0; i < kNumClasses; ++i) starts[i + 1] += starts[i];
  const int64_t task_bytes = round_up((num_tasks + num_cut) * static_cast<int64_t>(sizeof(Task)), 64);
  char* memory = static_cast<char*>(pool.shared_scratch(task_bytes + partial_floats * 4));
  Plan plan{reinterpret_cast<Task*>(memory), num_tasks, reinterpret_cast<Task*>(memory) + num_tasks, 0};
  float* partials = reinterpret_cast<float*>(memory + task_bytes);
  for_each_item(args, max_rows, [&](const Item& item) {
    const int64_t runs = num_runs(args, item, shares.limit), first = item.first_split(), end = item.end_split();
    int64_t& next = starts[cost_class(cost_of(args, item) / runs)];
    if (runs == 1) {
      plan.tasks[next++] = {item, first, end, nullptr};
      return;
    }
    const int64_t run = ceil_div(end - first, runs);
    for (int64_t split = first; split < end; split += run) {
      plan.tasks[next++] = {item, split, min_i64(end, split + run), partials};
    }
    plan.cut_items[plan.num_cut_items++] = {item, first, end, partials};
    partials += (end - first) * item.num_tokens * group * stride;
  });
  return plan;
}

}  // namespace
}  // namespace quire::QUIRE_TIER
