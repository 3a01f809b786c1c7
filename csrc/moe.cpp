// Checks of the indices that kernels for mixtures of experts follow: a wrong one is refused, not read.
#include "quire/moe.h"

#include <cstddef>
#include <vector>

#include "quire/gemm.h"
#include "quire/quant.h"

namespace quire {
namespace {

template <class Linear>
const char* find_group_fault(const Grouped<Linear>& grouped) {
  const int64_t num_rows = grouped.linear.num_rows;
  const int32_t *starts = grouped.starts, *x_rows = grouped.linear.x_rows;
  if (starts[0] < 0 || starts[grouped.num_groups] > num_rows) return "starts lie outside the rows";
  for (int64_t group = 0; group < grouped.num_groups; ++group) {
    if (starts[group + 1] < starts[group]) return "starts fall";
  }
  if (x_rows == nullptr) return nullptr;
  for (int64_t row = 0; row < num_rows; ++row) {
    if (x_rows[row] < 0 || x_rows[row] >= grouped.num_x_rows) return "rows names one that x lacks";
  }
  return nullptr;
}

const char* find_place_fault(const int32_t* places, int64_t num_rows) {
  for (int64_t i = 0; i < num_rows; ++i) {
    if (places[i] < 0 || places[i] >= num_rows) return "places names a row past the last";
  }
  return nullptr;
}

}  // namespace

const char* find_fault(const Grouped<LinearArgs>& args) { return find_group_fault(args); }
const char* find_fault(const Grouped<QuantLinearArgs>& args) { return find_group_fault(args); }

const char* find_fault(const ArrangeArgs& args) {
  for (int64_t i = 0; i < args.num_tokens * args.num_chosen; ++i) {
    if (args.expert_ids[i] < 0 || args.expert_ids[i] >= args.num_experts) return "expert_ids names one that is not there";
  }
  for (int64_t expert = 0; expert < args.num_experts; ++expert) {
    if (args.slots[expert] < 0 || args.slots[expert] >= args.num_experts) return "slots names one that is not there";
  }
  return nullptr;
}

void arrange(Pool&, const ArrangeArgs& args) {
  const int64_t num_rows = args.num_tokens * args.num_chosen;
  for (int64_t slot = 0; slot <= args.num_experts; ++slot) args.starts[slot] = 0;
  for (int64_t i = 0; i < num_rows; ++i) ++args.starts[args.slots[args.expert_ids[i]]];
  int32_t end = 0;
  for (int64_t slot = 0; slot <= args.num_experts; ++slot) {
    end += args.starts[slot];
    args.starts[slot] = end;
  }
  // Backwards, so that every start ends where its slot begins.
  for (int64_t i = num_rows - 1; i >= 0; --i) {
    const int32_t row = --args.starts[args.slots[args.expert_ids[i]]];
    args.rows[row] = static_cast<int32_t>(i / args.num_chosen);
    args.places[i] = row;
  }
}

const char* find_fault(const CombineArgs& args) {
  return find_place_fault(args.places, args.num_tokens * args.num_chosen);
}

const char* find_fault(const SpreadArgs& args) {
  const int64_t num_rows = args.num_tokens * args.num_chosen;
  if (const char* fault = find_place_fault(args.places, num_rows)) return fault;
  std::vector<bool> is_written(static_cast<std::size_t>(num_rows));
  for (int64_t i = 0; i < num_rows; ++i) {
    if (is_written[args.places[i]]) return "places names a row twice";
    is_written[args.places[i]] = true;
  }
  return nullptr;
}

}  // namespace quire
