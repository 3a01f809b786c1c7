#include "bindings/step_graph.h"

namespace quire {
void bind_attention(nb::module_& m) {
  nb::class_<KvCache>(m, "KvCache")
      .def("__init__", [](KvCache* self, uintptr_t data, int64_t num_blocks, int64_t num_kv_heads, int64_t block_size,
                          int64_t head_size, int dtype) {
        new (self) KvCache{at<void>(data), num_blocks, num_kv_heads, block_size, head_size, static_cast<DType>(dtype)};
      });
  m.def("paged_attention",
        [](int tier, Pool& pool, uintptr_t query, int64_t query_stride, uintptr_t out, const KvCache& cache,
           uintptr_t block_table, int64_t max_blocks, uintptr_t query_start_loc, uintptr_t seq_lens, int64_t num_reqs,
           int64_t num_tokens, int64_t num_heads, float scale, int64_t window, float soft_cap, uintptr_t sinks,
           uintptr_t slopes, int64_t chunk) {
          const PagedAttentionArgs args{at<void>(query),
                                        query_stride,
                                        at<void>(out),
                                        cache,
                                        at<int32_t>(block_table),
                                        max_blocks,
                                        at<int32_t>(query_start_loc),
                                        at<int32_t>(seq_lens),
                                        num_reqs,
                                        num_tokens,
                                        num_heads,
                                        scale,
                                        window,
                                        soft_cap,
                                        at<float>(sinks),
                                        at<float>(slopes),
                                        chunk};
          return run_noted(tier_at(tier).attention->paged_attention, pool, args);
        });
  m.def("rope_and_cache",
        [](int tier, Pool& pool, uintptr_t qkv, int64_t qkv_stride, int64_t num_tokens, int64_t num_heads,
           uintptr_t cos, uintptr_t sin, int64_t max_positions, int64_t half, uintptr_t positions,
           bool are_positions_wide, uintptr_t slots, uintptr_t q_norm, uintptr_t k_norm, float eps,
           const KvCache& cache, uintptr_t v_norm, bool are_norms_last, bool are_norms_whole, bool has_kv,
           uintptr_t query_scales, bool are_norms_centered, float limit) {
          const RopeAndCacheArgs args{at<void>(qkv),
                                      qkv_stride,
                                      num_tokens,
                                      num_heads,
                                      at<float>(cos),
                                      at<float>(sin),
                                      max_positions,
                                      half,
                                      at<void>(positions),
                                      are_positions_wide,
                                      at<int64_t>(slots),
                                      at<void>(q_norm),
                                      at<void>(k_norm),
                                      eps,
                                      cache,
                                      at<void>(v_norm),
                                      are_norms_last,
                                      are_norms_whole,
                                      has_kv,
                                      at<float>(query_scales),
                                      are_norms_centered,
                                      limit};
          return run_noted(tier_at(tier).attention->rope_and_cache, pool, args);
        });
  m.def("write_kv", [](int tier, Pool& pool, uintptr_t key, uintptr_t value, int64_t key_stride, int64_t value_stride,
                       int64_t num_tokens, uintptr_t slots, const KvCache& cache) {
    const WriteKvArgs args{at<void>(key), at<void>(value), key_stride, value_stride, num_tokens, at<int64_t>(slots),
                           cache};
    return run_noted(tier_at(tier).attention->write_kv, pool, args);
  });
  m.def("copy_pages", [](int tier, Pool& pool, const KvCache& cache, uintptr_t source_ids, uintptr_t target_ids,
                         int64_t num_pages) {
    const CopyPagesArgs args{cache, at<int64_t>(source_ids), at<int64_t>(target_ids), num_pages};
    return run_noted(tier_at(tier).attention->copy_pages, pool, args);
  });
}

}  // namespace quire
