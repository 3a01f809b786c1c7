// Checks of the indices that kernels of recurrent layers follow into the cache, and of memory that is written while it
// is read as something else: a wrong call is refused.
#include "quire/recurrent.h"

#include <vector>

#include "quire/causal_conv.h"
#include "quire/spans.h"

namespace quire {
namespace {

// Whether a block that a request writes is another request's too: tasks of one step run in any order.
bool shares_written_block(const RecurrentBatch& batch, int64_t num_blocks) {
  thread_local std::vector<int32_t> writers;  // by block: the request that writes it, plus 1
  if (static_cast<int64_t>(writers.size()) < num_blocks) writers.resize(num_blocks, 0);
  bool is_shared = false;
  for (int64_t i = 0; i < batch.num_reqs; ++i) {
    if (batch.num_rows(i) == 0) continue;
    int32_t& writer = writers[batch.write_block(i)];
    is_shared |= writer != 0;
    writer = static_cast<int32_t>(i + 1);
  }
  for (int64_t i = 0; i < batch.num_reqs; ++i) {
    if (batch.num_rows(i) == 0 || batch.is_new(i)) continue;
    const int32_t writer = writers[batch.read_block(i)];
    is_shared |= writer != 0 && writer != i + 1;
  }
  for (int64_t i = 0; i < batch.num_reqs; ++i) {
    if (batch.num_rows(i) != 0) writers[batch.write_block(i)] = 0;
  }
  return is_shared;
}

}  // namespace

bool overlaps_batch(const Span& written, const RecurrentBatch& batch) {
  return overlaps_any(written, Span(batch.query_start_loc, (batch.num_reqs + 1) * 4),
                      Span(batch.seq_lens, batch.num_reqs * 4),
                      span_of(batch.read_blocks, batch.num_reqs, batch.read_stride, 1, 4),
                      span_of(batch.write_blocks, batch.num_reqs, batch.write_stride, 1, 4));
}

const char* find_batch_fault(const RecurrentBatch& batch, int64_t num_blocks) {
  const int32_t* starts = batch.query_start_loc;
  if (starts[0] != 0) return "query_start_loc does not start at 0";
  for (int64_t i = 0; i < batch.num_reqs; ++i) {
    if (starts[i + 1] < starts[i] || starts[i + 1] > batch.num_tokens) {
      return "query_start_loc falls, or passes the end of the step's rows";
    }
    if (batch.num_rows(i) == 0) continue;
    if (batch.seq_lens[i] < batch.num_rows(i)) return "seq_lens has a request with fewer tokens than rows";
    const int64_t written = batch.write_block(i), read = batch.is_new(i) ? written : batch.read_block(i);
    if (written < 0 || written >= num_blocks) return "write_blocks names a block that the cache lacks";
    if (read < 0 || read >= num_blocks) return "read_blocks names a block that the cache lacks";
  }
  if (starts[batch.num_reqs] != batch.num_tokens) return "query_start_loc does not end at the end of the step's rows";
  if (shares_written_block(batch, num_blocks)) return "a request writes a block that another one reads or writes";
  return nullptr;
}

const char* find_fault(const CausalConvArgs& args) {
  const RecurrentBatch& batch = args.batch;
  const int64_t bytes = bytes_of(args.dtype), channels = args.channels, history = (args.conv_size - 1) * channels;
  const Span x = span_of(args.x, batch.num_tokens, args.x_stride, channels, bytes);
  const Span weight(args.weight, args.conv_size * channels * bytes), bias = span_of(args.bias, 1, 0, channels, bytes);
  const Span states = span_of(args.states.data, args.states.num_blocks, args.states.block_stride, history, bytes);
  const Span out = span_of(args.out, batch.num_tokens, channels, channels, bytes);
  if (overlaps_any(out, x, weight, bias, states) || overlaps_any(states, x, weight, bias)) return kOverlap;
  if (overlaps_batch(out, batch) || overlaps_batch(states, batch)) return kOverlap;
  return find_batch_fault(batch, args.states.num_blocks);
}

}  // namespace quire
