#include "quire/rows.h"

#include <cstring>

namespace quire {
namespace {

bool is_within(const int64_t* ids, int64_t num_ids, int64_t end) {
  if (ids == nullptr) return num_ids <= end;
  for (int64_t i = 0; i < num_ids; ++i) {
    if (ids[i] < 0 || ids[i] >= end) return false;
  }
  return true;
}

}  // namespace

const char* find_fault(const CopyRowsArgs& args) {
  if (!is_within(args.from, args.num_rows, args.num_x_rows)) return "ids names a row that x lacks";
  if (!is_within(args.to, args.num_rows, args.num_out_rows)) return "ids names a row that the result lacks";
  return nullptr;
}

// On the calling thread: these are the few rows of a step that are sampled, less than it takes to wake another.
void copy_rows(Pool&, const CopyRowsArgs& args) {
  for (int64_t i = 0; i < args.num_rows; ++i) {
    const int64_t from = args.from == nullptr ? i : args.from[i], to = args.to == nullptr ? i : args.to[i];
    std::memcpy(args.out + to * args.out_stride, args.x + from * args.x_stride, args.row_bytes);
  }
}

}  // namespace quire
