// Checks of the indices that attention kernels follow into the cache, and of memory that they would read as one thing
// and write as another: a wrong one is refused, not read.
#include "quire/attention.h"

#include <algorithm>
#include <vector>

#include "quire/spans.h"

namespace quire {
namespace {

const char* find_slot_fault(const int64_t* slots, int64_t num_tokens, const KvCache& cache) {
  const int64_t num_slots = cache.num_blocks * cache.block_size;
  for (int64_t i = 0; i < num_tokens; ++i) {
    if (slots[i] >= num_slots) return "slot_mapping names a page past the end of the cache";
  }
  return nullptr;
}

Span span_of(const KvCache& cache) {
  const int64_t heads = cache.num_blocks * cache.num_kv_heads;
  return {cache.data, heads * 2 * cache.block_size * cache.head_size * bytes_of(cache.dtype)};
}

}  // namespace

const char* find_fault(const PagedAttentionArgs& args) {
  const int64_t bytes = bytes_of(args.cache.activation_dtype()), row = args.num_heads * args.cache.head_size;
  const int64_t slope_bytes = args.slopes != nullptr ? args.num_heads * 4 : 0;
  const int64_t sink_bytes = args.sinks != nullptr ? args.num_heads * 4 : 0;
  if (overlaps_any(span_of(args.out, args.num_tokens, row, row, bytes), span_of(args.cache),
                   span_of(args.query, args.num_tokens, args.query_stride, row, bytes),
                   Span(args.block_table, args.num_reqs * args.max_blocks * 4),
                   Span(args.query_start_loc, (args.num_reqs + 1) * 4), Span(args.seq_lens, args.num_reqs * 4),
                   Span(args.sinks, sink_bytes), Span(args.slopes, slope_bytes))) {
    return kOverlap;
  }
  const int64_t block_size = args.cache.block_size;
  if (args.num_reqs > 0 && args.query_start_loc[0] != 0) return "query_start_loc does not start at 0";
  for (int64_t i = 0; i < args.num_reqs; ++i) {
    const int64_t first = args.query_start_loc[i], end = args.query_start_loc[i + 1], seq_len = args.seq_lens[i];
    if (end < first || end > args.num_tokens) return "query_start_loc falls, or passes the end of the query";
    if (end == first) continue;
    if (seq_len < end - first) return "seq_lens has a request with fewer tokens than queries";
    const int64_t num_pages = ceil_div(seq_len, block_size);
    if (num_pages > args.max_blocks) return "seq_lens has a request with more pages than block_table has columns";
    const int64_t oldest = oldest_seen(args, seq_len - (end - first));
    const int32_t* pages = args.block_table + i * args.max_blocks;
    uint32_t largest = 0;  // as unsigned, so that negative ids are large
    for (int64_t page = oldest / block_size; page < num_pages; ++page) {
      const uint32_t id = static_cast<uint32_t>(pages[page]);
      largest = id > largest ? id : largest;
    }
    if (static_cast<int64_t>(largest) >= args.cache.num_blocks) return "block_table names a page that the cache lacks";
  }
  return nullptr;
}

const char* find_fault(const RopeAndCacheArgs& args) {
  const int64_t bytes = bytes_of(args.cache.activation_dtype()), size = args.cache.head_size, tokens = args.num_tokens;
  const int64_t row = (args.num_heads + (args.has_kv ? 2 * args.cache.num_kv_heads : 0)) * size;
  const int64_t num_norms = has_gains_of_heads(args) ? args.num_heads : 1;
  const int64_t num_kv_norms = has_gains_of_heads(args) ? args.cache.num_kv_heads : 1;
  const Span pages = span_of(args.cache), qkv = span_of(args.qkv, tokens, args.qkv_stride, row, bytes);
  const Span cos(args.cos, args.max_positions * args.half * 4), sin(args.sin, args.max_positions * args.half * 4);
  const bool has_positions = needs_positions(args);
  const int64_t position_bytes = args.are_positions_wide ? 8 : 4;
  const Span positions(args.positions, args.positions != nullptr ? tokens * position_bytes : 0);
  const Span slots(args.slots, args.has_kv ? tokens * 8 : 0);
  const Span q_norm(args.q_norm, args.q_norm != nullptr ? num_norms * size * bytes : 0);
  const Span k_norm(args.k_norm, args.k_norm != nullptr ? num_kv_norms * size * bytes : 0);
  const Span v_norm(args.v_norm, args.v_norm != nullptr ? size * bytes : 0);
  const Span scales(args.query_scales, args.query_scales != nullptr ? args.max_positions * 4 : 0);
  if (overlaps_any(pages, qkv, cos, sin, positions, slots, q_norm, k_norm, v_norm, scales) ||
      overlaps_any(qkv, cos, sin, positions, slots, q_norm, k_norm, v_norm, scales)) {
    return kOverlap;
  }
  for (int64_t i = 0; has_positions && i < args.num_tokens; ++i) {
    const int64_t position = args.are_positions_wide ? static_cast<const int64_t*>(args.positions)[i]
                                                     : static_cast<const int32_t*>(args.positions)[i];
    if (position < 0 || position >= args.max_positions) return "positions has one that the tables of cos and sin lack";
  }
  return args.has_kv ? find_slot_fault(args.slots, args.num_tokens, args.cache) : nullptr;
}

const char* find_fault(const WriteKvArgs& args) {
  const int64_t bytes = bytes_of(args.cache.activation_dtype()), row = args.cache.num_kv_heads * args.cache.head_size;
  if (overlaps_any(span_of(args.cache), span_of(args.key, args.num_tokens, args.key_stride, row, bytes),
                   span_of(args.value, args.num_tokens, args.value_stride, row, bytes),
                   Span(args.slots, args.num_tokens * 8))) {
    return kOverlap;
  }
  return find_slot_fault(args.slots, args.num_tokens, args.cache);
}

const char* find_fault(const CopyPagesArgs& args) {
  if (overlaps_any(span_of(args.cache), Span(args.source_ids, args.num_pages * 8),
                   Span(args.target_ids, args.num_pages * 8))) {
    return kOverlap;
  }
  for (int64_t i = 0; i < args.num_pages; ++i) {
    const int64_t source = args.source_ids[i], target = args.target_ids[i];
    if (source < 0 || source >= args.cache.num_blocks || target < 0 || target >= args.cache.num_blocks) {
      return "src_ids or dst_ids names a page that the cache lacks";
    }
  }
  // Threads copy pages in any order: one that is written twice, or written and read, would be either.
  std::vector<int64_t> targets(args.target_ids, args.target_ids + args.num_pages);
  std::sort(targets.begin(), targets.end());
  if (std::adjacent_find(targets.begin(), targets.end()) != targets.end()) return "dst_ids names a page twice";
  for (int64_t i = 0; i < args.num_pages; ++i) {
    if (std::binary_search(targets.begin(), targets.end(), args.source_ids[i])) {
      return "dst_ids names a page of src_ids";
    }
  }
  return nullptr;
}

}  // namespace quire
