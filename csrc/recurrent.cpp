// Checks of the indices that kernels of recurrent layers follow into the cache, and of memory that is written while it
// is read as something else: a wrong call is refused.
#include "quire/recurrent.h"

#include <vector>

#include "quire/causal_conv.h"
#include "quire/delta_net.h"
#include "quire/spans.h"

namespace quire {
namespace {

// Whether a block that a request writes is another request's too: tasks of one step run in any order. A block for the
// state after a token is nobody else's, not even its own request's: it is written while others are read.
bool shares_written_block(const RecurrentBatch& batch, int64_t num_blocks) {
  thread_local std::vector<int32_t> writers;  // by block: the request that writes it, plus 1
  if (static_cast<int64_t>(writers.size()) < num_blocks) writers.resize(num_blocks, 0);
  bool is_shared = false;
  for (int64_t i = 0; i < batch.num_reqs; ++i) {
    if (batch.num_rows(i) == 0) continue;
    int32_t& writer = writers[batch.write_blocks[i]];
    is_shared |= writer != 0;
    writer = static_cast<int32_t>(i + 1);
  }
  constexpr int32_t kToken = -1;
  for (int64_t row = 0; batch.token_blocks != nullptr && row < batch.num_tokens; ++row) {
    if (batch.token_block(row) < 0) continue;
    int32_t& writer = writers[batch.token_block(row)];
    is_shared |= writer != 0;
    writer = kToken;
  }
  for (int64_t i = 0; i < batch.num_reqs; ++i) {
    if (batch.num_rows(i) == 0 || batch.is_new(i)) continue;
    const int32_t writer = writers[batch.read_blocks[i]];
    is_shared |= writer != 0 && writer != i + 1;
  }
  for (int64_t i = 0; i < batch.num_reqs; ++i) {
    if (batch.num_rows(i) != 0) writers[batch.write_blocks[i]] = 0;
  }
  for (int64_t row = 0; batch.token_blocks != nullptr && row < batch.num_tokens; ++row) {
    if (batch.token_block(row) >= 0) writers[batch.token_block(row)] = 0;
  }
  return is_shared;
}

}  // namespace

bool overlaps_batch(const Span& written, const RecurrentBatch& batch) {
  const int64_t bytes = batch.num_reqs * 4;
  return overlaps_any(written, Span(batch.query_start_loc, bytes + 4), Span(batch.read_blocks, bytes),
                      Span(batch.write_blocks, bytes),
                      Span(batch.token_blocks, batch.token_blocks == nullptr ? 0 : batch.num_tokens * 4));
}

const char* find_batch_fault(const RecurrentBatch& batch, int64_t num_blocks) {
  const int32_t* starts = batch.query_start_loc;
  if (starts[0] != 0) return "query_start_loc does not start at 0";
  for (int64_t i = 0; i < batch.num_reqs; ++i) {
    if (starts[i + 1] < starts[i] || starts[i + 1] > batch.num_tokens) {
      return "query_start_loc falls, or passes the end of the step's rows";
    }
    if (batch.num_rows(i) == 0) continue;
    const int64_t read = batch.read_blocks[i], written = batch.write_blocks[i];
    if (read < -1 || read >= num_blocks) return "read_blocks names a block that the cache lacks";
    if (written < 0 || written >= num_blocks) return "write_blocks names a block that the cache lacks";
    if (batch.token_block(starts[i + 1] - 1) >= 0) return "token_blocks has a block for the last token of a request";
  }
  if (batch.token_blocks != nullptr) {
    for (int64_t row = 0; row < batch.num_tokens; ++row) {
      const int64_t block = batch.token_blocks[row];
      if (block < -1 || block >= num_blocks) return "token_blocks names a block that the cache lacks";
    }
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

const char* find_fault(const GatedDeltaRuleArgs& args) {
  const RecurrentBatch& batch = args.batch;
  const int64_t bytes = bytes_of(args.dtype), heads = args.num_value_heads, values = heads * args.value_size;
  const Span qkv = span_of(args.qkv, batch.num_tokens, args.qkv_stride, args.row_size(), bytes);
  const Span decay(args.decay, batch.num_tokens * heads * 4), beta(args.beta, batch.num_tokens * heads * 4);
  const Span states = span_of(args.states.data, args.states.num_blocks, args.states.block_stride, args.state_size(), 4);
  const Span out = span_of(args.out, batch.num_tokens, values, values, bytes);
  if (overlaps_any(out, qkv, decay, beta, states) || overlaps_any(states, qkv, decay, beta)) return kOverlap;
  if (overlaps_batch(out, batch) || overlaps_batch(states, batch)) return kOverlap;
  return find_batch_fault(batch, args.states.num_blocks);
}

}  // namespace quire
