// Checks of the indices that attention kernels follow into the cache: a wrong one is refused, not read.
#include "quire/attention.h"

namespace quire {
namespace {

const char* find_slot_fault(const int64_t* slots, int64_t num_tokens, const KvCache& cache) {
  const int64_t num_slots = cache.num_blocks * cache.block_size;
  for (int64_t i = 0; i < num_tokens; ++i) {
    if (slots[i] >= num_slots) return "slot_mapping names a page past the end of the cache";
  }
  return nullptr;
}

}  // namespace

const char* find_fault(const PagedAttentionArgs& args) {
  const int64_t block_size = args.cache.block_size;
  if (args.num_reqs > 0 && args.query_start_loc[0] != 0) return "query_start_loc does not start at 0";
  for (int64_t i = 0; i < args.num_reqs; ++i) {
    const int64_t first = args.query_start_loc[i], end = args.query_start_loc[i + 1], seq_len = args.seq_lens[i];
    if (end < first || end > args.num_tokens) return "query_start_loc falls, or passes the end of the query";
    if (end == first) continue;
    if (seq_len < end - first) return "seq_lens has a request with fewer tokens than queries";
    const int64_t num_pages = ceil_div(seq_len, block_size);
    if (num_pages > args.max_blocks) return "seq_lens has a request with more pages than block_table has columns";
    const int64_t oldest = args.window > 0 ? max_i64(0, seq_len - (end - first) - args.window + 1) : 0;
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
  for (int64_t i = 0; i < args.num_tokens; ++i) {
    const int64_t position = args.are_positions_wide ? static_cast<const int64_t*>(args.positions)[i]
                                                     : static_cast<const int32_t*>(args.positions)[i];
    if (position < 0 || position >= args.max_positions) return "positions has one that the tables of cos and sin lack";
  }
  return find_slot_fault(args.slots, args.num_tokens, args.cache);
}

const char* find_fault(const WriteKvArgs& args) { return find_slot_fault(args.slots, args.num_tokens, args.cache); }

const char* find_fault(const CopyPagesArgs& args) {
  for (int64_t i = 0; i < args.num_pages; ++i) {
    const int64_t source = args.source_ids[i], target = args.target_ids[i];
    if (source < 0 || source >= args.cache.num_blocks || target < 0 || target >= args.cache.num_blocks) {
      return "src_ids or dst_ids names a page that the cache lacks";
    }
  }
  return nullptr;
}

}  // namespace quire
