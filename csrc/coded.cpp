// Checks of the indices that products with coded weights follow: a wrong one is refused, not read.
#include "quire/coded.h"

namespace quire {
namespace {

const char* find_order_fault(const CodedLinearArgs& args, int64_t num_orders) {
  if (args.order == nullptr) return nullptr;
  for (int64_t i = 0; i < num_orders * args.input_size; ++i) {
    if (args.order[i] < 0 || args.order[i] >= args.input_size) return "order names an input that x lacks";
  }
  return nullptr;
}

}  // namespace

const char* find_fault(const CodedLinearArgs& args) { return find_order_fault(args, 1); }

const char* find_fault(const Grouped<CodedLinearArgs>& args) {
  const Grouped<LinearArgs> groups{args.linear, args.starts, args.num_groups, args.num_x_rows};
  if (const char* fault = find_fault(groups)) return fault;
  return find_order_fault(args.linear, args.num_groups);
}

}  // namespace quire
