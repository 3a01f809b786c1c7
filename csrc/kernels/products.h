// Products as tasks of the pool: one product, or those of all groups of rows at once.
//
// How a tier computes a product is a class. Its tasks arrange the inputs as the inner loops take them, then compute the
// outputs; no bit of an output depends on how they are divided.
//
//   Product(args, memory, num_threads)                   `num_threads` share its tasks
//   static int64_t memory_bytes(args)                    of the arranged inputs
//   static constexpr int64_t kSerialInputs               that one thread arranges in less time than several
//   int64_t num_arranging() const; void arrange(task) const
//   int64_t num_tasks() const;     void run(pool, task, thread) const
#pragma once

#include "quire/grouped.h"
#include "quire/pool.h"
#include "simd/simd.h"

namespace quire::QUIRE_TIER {

// The row of x that a row of the result is made of.
template <class Args>
static inline int64_t x_row(const Args& args, int64_t row) {
  return args.x_rows == nullptr ? row : args.x_rows[row];
}

template <class Product>
static inline void run_product(const Product& product, Pool& pool, int64_t num_inputs) {
  const int64_t num_arranging = product.num_arranging();
  if (num_inputs <= Product::kSerialInputs) {
    parallel_for(pool, min_i64(1, num_arranging), [&](int64_t, int) {
      for (int64_t task = 0; task < num_arranging; ++task) product.arrange(task);
    });
  } else {
    parallel_for(pool, num_arranging, [&](int64_t task, int) { product.arrange(task); });
  }
  parallel_for(pool, product.num_tasks(), [&](int64_t task, int thread) { product.run(pool, task, thread); });
}

// The product of all rows of `args` with one matrix.
template <class Product, class Args>
static void run_one(Pool& pool, const Args& args) {
  const PoolLock lock(pool);
  const int64_t bytes = Product::memory_bytes(args);
  char* memory = bytes == 0 ? nullptr : static_cast<char*>(pool.shared_scratch(bytes));
  run_product(Product(args, memory, pool.num_threads()), pool, args.num_rows * args.input_size);
}

// The products of the groups that have rows, as one whose tasks are theirs, one behind the other.
template <class Product>
class GroupProducts {
 public:
  static constexpr int64_t kSerialInputs = Product::kSerialInputs;

  struct Entry {
    Product product;
    int64_t first_arranging, first_task;
  };

  explicit GroupProducts(Entry* entries) : entries_(entries) {}

  void add(const Product& product) {
    entries_[count_++] = {product, num_arranging_, num_tasks_};
    num_arranging_ += product.num_arranging();
    num_tasks_ += product.num_tasks();
  }

  int64_t num_arranging() const { return num_arranging_; }
  void arrange(int64_t task) const {
    const Entry& entry = entry_of(task, &Entry::first_arranging);
    entry.product.arrange(task - entry.first_arranging);
  }
  int64_t num_tasks() const { return num_tasks_; }
  void run(Pool& pool, int64_t task, int thread) const {
    const Entry& entry = entry_of(task, &Entry::first_task);
    entry.product.run(pool, task - entry.first_task, thread);
  }

 private:
  // The one that `task` belongs to: the last that begins there or before. Those without tasks begin where the next does.
  const Entry& entry_of(int64_t task, int64_t Entry::* first) const {
    int64_t low = 0, high = count_ - 1;
    while (low < high) {
      const int64_t middle = (low + high + 1) / 2;
      if (entries_[middle].*first <= task) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    return entries_[low];
  }

  Entry* entries_;
  int64_t count_ = 0, num_arranging_ = 0, num_tasks_ = 0;
};

// The arguments of one group's product, but for its weight. Distances between rows are in bytes.
template <class Args>
static inline Args rows_of_group(const Grouped<Args>& grouped, int64_t group, int64_t x_stride, int64_t out_stride) {
  Args args = grouped.linear;
  const int64_t first = grouped.starts[group];
  args.num_rows = grouped.starts[group + 1] - first;
  args.out = static_cast<char*>(args.out) + first * out_stride;
  if (args.bias != nullptr) {
    const int64_t num_outputs = args.is_gated ? 2 * args.output_size : args.output_size;
    args.bias = static_cast<const char*>(args.bias) + group * num_outputs * bytes_of(args.bias_dtype);
  }
  if (args.x_rows != nullptr) {
    args.x_rows += first;
  } else {
    args.x = static_cast<const char*>(args.x) + first * x_stride;
  }
  return args;
}

// args_of(group): the arguments of that group's product alone.
template <class Product, class Args, class ArgsOf>
static void run_groups(Pool& pool, const Grouped<Args>& grouped, const ArgsOf& args_of) {
  using Products = GroupProducts<Product>;
  const PoolLock lock(pool);
  int64_t num_active = 0, bytes = 0;
  for (int64_t group = 0; group < grouped.num_groups; ++group) {
    const Args args = args_of(group);
    if (args.num_rows == 0) continue;
    ++num_active;
    bytes += round_up(Product::memory_bytes(args), kCacheLine);
  }
  if (num_active == 0) return;
  const int64_t entries_bytes = round_up(num_active * static_cast<int64_t>(sizeof(typename Products::Entry)), kCacheLine);
  char* memory = static_cast<char*>(pool.shared_scratch(entries_bytes + bytes));
  Products products(reinterpret_cast<typename Products::Entry*>(memory));
  memory += entries_bytes;
  const int64_t num_rows = grouped.linear.num_rows, num_threads = pool.num_threads();
  for (int64_t group = 0; group < grouped.num_groups; ++group) {
    const Args args = args_of(group);
    if (args.num_rows == 0) continue;
    // Few rows: the time is that of the weights, of which every group has as many. Many: that of the rows.
    const int64_t share = max_i64(ceil_div(num_threads, num_active), ceil_div(num_threads * args.num_rows, num_rows));
    products.add(Product(args, memory, static_cast<int>(share)));
    memory += round_up(Product::memory_bytes(args), kCacheLine);
  }
  run_product(products, pool, num_rows * grouped.linear.input_size);
}

}  // namespace quire::QUIRE_TIER
