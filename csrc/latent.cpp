// Checks of the indices that the kernels of latent attention follow into the cache, and of memory that they would read
// as one thing and write as another: a wrong one is refused, not read.
#include "quire/latent.h"

#include "quire/spans.h"

namespace quire {
namespace {

Span span_of(const LatentCache& cache) {
  return {cache.data, cache.num_blocks * cache.block_size * cache.width() * bytes_of(cache.dtype)};
}

}  // namespace

const char* find_fault(const LatentAttentionArgs& args) {
  const int64_t bytes = bytes_of(args.cache.dtype), vectors = args.num_tokens * args.num_heads;
  if (overlaps_any(Span(args.out, vectors * args.cache.latent_size * bytes), span_of(args.cache),
                   Span(args.query, vectors * args.cache.width() * bytes),
                   Span(args.block_table, args.num_reqs * args.max_blocks * 4),
                   Span(args.query_start_loc, (args.num_reqs + 1) * 4), Span(args.seq_lens, args.num_reqs * 4))) {
    return kOverlap;
  }
  if (args.num_reqs > 0 && args.query_start_loc[0] != 0) return "query_start_loc does not start at 0";
  for (int64_t i = 0; i < args.num_reqs; ++i) {
    const int64_t first = args.query_start_loc[i], end = args.query_start_loc[i + 1], seq_len = args.seq_lens[i];
    if (end < first || end > args.num_tokens) return "query_start_loc falls, or passes the end of the query";
    if (end == first) continue;
    if (seq_len < end - first) return "seq_lens has a request with fewer tokens than queries";
    const int64_t num_pages = ceil_div(seq_len, args.cache.block_size);
    if (num_pages > args.max_blocks) return "seq_lens has a request with more pages than block_table has columns";
    const int32_t* pages = args.block_table + i * args.max_blocks;
    for (int64_t page = 0; page < num_pages; ++page) {
      if (pages[page] < 0 || pages[page] >= args.cache.num_blocks) {
        return "block_table names a page that the cache lacks";
      }
    }
  }
  return nullptr;
}

const char* find_fault(const LatentTokensArgs& args) {
  const int64_t bytes = bytes_of(args.cache.dtype), tokens = args.num_tokens, width = args.cache.width();
  const int64_t table = args.max_positions * args.cache.rope_size / 2 * 4;
  const Span pages = span_of(args.cache), cos(args.cos, table), sin(args.sin, table);
  const Span rotated(args.rotated, tokens * args.num_heads * width * bytes), slots(args.slots, tokens * 8);
  const Span query = span_of(args.query, tokens, args.query_stride, args.num_heads * args.query_size, bytes);
  const Span latent = span_of(args.latent, tokens, args.latent_stride, width, bytes);
  const Span norm(args.norm, args.cache.latent_size * bytes);
  const Span positions(args.positions, tokens * (args.are_positions_wide ? 8 : 4));
  if (overlaps_any(pages, rotated, query, latent, norm, cos, sin, positions, slots) ||
      overlaps_any(rotated, query, latent, norm, cos, sin, positions, slots)) {
    return kOverlap;
  }
  const int64_t num_slots = args.cache.num_blocks * args.cache.block_size;
  for (int64_t i = 0; i < tokens; ++i) {
    const int64_t position = args.are_positions_wide ? static_cast<const int64_t*>(args.positions)[i]
                                                     : static_cast<const int32_t*>(args.positions)[i];
    if (position < 0 || position >= args.max_positions) return "positions has one that the tables of cos and sin lack";
    if (args.slots[i] >= num_slots) return "slot_mapping names a page past the end of the cache";
  }
  return nullptr;
}

}  // namespace quire
