// Checks of the indices that the scans of state spaces follow into the cache, and of memory that they would read as one
// thing and write as another.
#include "quire/state_space.h"

#include "quire/spans.h"

namespace quire {
namespace {

// Both write to `states` and `out`, which nothing else may share.
template <class... Spans>
const char* find_overlap(const RecurrentBatch& batch, const Span& states, const Span& out, const Spans&... read) {
  const bool is_shared = overlaps_any(states, out, read...) || overlaps_any(out, read...) ||
                         overlaps_batch(states, batch) || overlaps_batch(out, batch);
  return is_shared ? kOverlap : nullptr;
}

}  // namespace

const char* find_fault(const MambaScanArgs& args) {
  const int64_t tokens = args.batch.num_tokens, bytes = bytes_of(args.dtype);
  const int64_t inner = args.inner_size, columns = args.state_size, state = round_up(inner, 16) * columns;
  const char* const overlap = find_overlap(
      args.batch, span_of(args.states.data, args.states.num_blocks, args.states.block_stride, state, 4),
      span_of(args.out, tokens, inner, inner, bytes), span_of(args.x, tokens, args.x_stride, inner, bytes),
      span_of(args.time_step, tokens, args.time_step_stride, inner, bytes),
      span_of(args.b, tokens, args.b_stride, columns, bytes), span_of(args.c, tokens, args.c_stride, columns, bytes),
      span_of(args.gate, tokens, args.gate_stride, inner, bytes), Span(args.a, state * 4), Span(args.skip, inner * 4));
  return overlap != nullptr ? overlap : find_batch_fault(args.batch, args.states.num_blocks);
}

const char* find_fault(const Mamba2ScanArgs& args) {
  const int64_t tokens = args.batch.num_tokens, bytes = bytes_of(args.dtype), heads = args.num_heads;
  const int64_t inner = heads * args.head_size, columns = args.num_groups * args.state_size;
  const char* const overlap = find_overlap(
      args.batch,
      span_of(args.states.data, args.states.num_blocks, args.states.block_stride, inner * args.state_size, 4),
      span_of(args.out, tokens, inner, inner, bytes), span_of(args.x, tokens, args.x_stride, inner, bytes),
      span_of(args.time_step, tokens, args.time_step_stride, heads, bytes),
      span_of(args.b, tokens, args.b_stride, columns, bytes), span_of(args.c, tokens, args.c_stride, columns, bytes),
      span_of(args.gate, tokens, args.gate_stride, inner, bytes), Span(args.a, heads * 4), Span(args.skip, heads * 4),
      Span(args.time_step_bias, heads * 4));
  return overlap != nullptr ? overlap : find_batch_fault(args.batch, args.states.num_blocks);
}

}  // namespace quire
