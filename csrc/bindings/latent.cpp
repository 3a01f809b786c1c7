#include "bindings/step_graph.h"

namespace quire {

void bind_latent(nb::module_& m) {
  nb::class_<LatentCache>(m, "LatentCache")
      .def("__init__", [](LatentCache* self, uintptr_t data, int64_t num_blocks, int64_t block_size,
                          int64_t latent_size, int64_t rope_size, int dtype) {
        new (self)
            LatentCache{at<void>(data), num_blocks, block_size, latent_size, rope_size, static_cast<DType>(dtype)};
      });
  m.def("latent_attention",
        [](int tier, Pool& pool, uintptr_t query, uintptr_t out, const LatentCache& cache, uintptr_t block_table,
           int64_t max_blocks, uintptr_t query_start_loc, uintptr_t seq_lens, int64_t num_reqs, int64_t num_tokens,
           int64_t num_heads, float scale) {
          const LatentAttentionArgs args{at<void>(query),    at<void>(out),
                                         cache,              at<int32_t>(block_table),
                                         max_blocks,         at<int32_t>(query_start_loc),
                                         at<int32_t>(seq_lens), num_reqs,
                                         num_tokens,         num_heads,
                                         scale};
          return run_noted(tier_at(tier).latent->latent_attention, pool, args);
        });
  m.def("write_latent_tokens",
        [](int tier, Pool& pool, uintptr_t query, int64_t query_stride, int64_t query_size, uintptr_t rotated,
           uintptr_t latent, int64_t latent_stride, uintptr_t norm, float eps, int64_t num_tokens, int64_t num_heads,
           uintptr_t cos, uintptr_t sin, int64_t max_positions, uintptr_t positions, bool are_positions_wide,
           uintptr_t slots, const LatentCache& cache) {
          const LatentTokensArgs args{at<void>(query),
                                      query_stride,
                                      query_size,
                                      at<void>(rotated),
                                      at<void>(latent),
                                      latent_stride,
                                      at<void>(norm),
                                      eps,
                                      num_tokens,
                                      num_heads,
                                      at<float>(cos),
                                      at<float>(sin),
                                      max_positions,
                                      at<void>(positions),
                                      are_positions_wide,
                                      at<int64_t>(slots),
                                      cache};
          return run_noted(tier_at(tier).latent->write_latent_tokens, pool, args);
        });
  m.def("head_linear",
        [](int tier, Pool& pool, uintptr_t x, int64_t x_stride, int64_t x_head_stride, uintptr_t weight, uintptr_t out,
           int64_t out_stride, int64_t out_head_stride, int64_t num_rows, int64_t num_heads, int64_t input_size,
           int64_t output_size, int dtype) {
          const HeadLinearArgs args{at<void>(x),     x_stride,  x_head_stride, at<void>(weight), at<void>(out),
                                    out_stride,      out_head_stride, num_rows, num_heads,       input_size,
                                    output_size,     static_cast<DType>(dtype)};
          run_noted(tier_at(tier).latent->head_linear, pool, args);
        });
}

}  // namespace quire
