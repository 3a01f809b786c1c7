#include "bindings/step_graph.h"
#include "quire/causal_conv.h"
#include "quire/delta_net.h"

namespace quire {

void bind_recurrent(nb::module_& m) {
  nb::class_<StateTensor>(m, "StateTensor")
      .def("__init__", [](StateTensor* self, uintptr_t data, int64_t num_blocks, int64_t block_stride) {
        new (self) StateTensor{at<void>(data), num_blocks, block_stride};
      });
  nb::class_<RecurrentBatch>(m, "RecurrentBatch")
      .def("__init__", [](RecurrentBatch* self, uintptr_t query_start_loc, uintptr_t read_blocks,
                          uintptr_t write_blocks, int64_t num_reqs, int64_t num_tokens, uintptr_t token_blocks) {
        new (self) RecurrentBatch{at<int32_t>(query_start_loc), at<int32_t>(read_blocks), at<int32_t>(write_blocks),
                                  num_reqs, num_tokens, at<int32_t>(token_blocks)};
      });
  m.def("causal_conv", [](int tier, Pool& pool, uintptr_t x, int64_t x_stride, uintptr_t weight, uintptr_t bias,
                          uintptr_t out, const StateTensor& states, const RecurrentBatch& batch, int64_t channels,
                          int64_t conv_size, bool has_silu, int dtype) {
    const CausalConvArgs args{at<void>(x), x_stride, at<void>(weight), at<void>(bias),
                              at<void>(out), states, batch, channels, conv_size, has_silu,
                              static_cast<DType>(dtype)};
    return run_noted(tier_at(tier).causal_conv->causal_conv, pool, args);
  });
  m.def("delta_gates", [](int tier, Pool& pool, uintptr_t b, uintptr_t a, int64_t stride, uintptr_t a_log,
                          uintptr_t bias, uintptr_t decay, uintptr_t beta, int64_t num_rows, int64_t num_heads,
                          int dtype) {
    const DeltaGatesArgs args{at<void>(b), at<void>(a), stride, at<float>(a_log), at<float>(bias), at<float>(decay),
                              at<float>(beta), num_rows, num_heads, static_cast<DType>(dtype)};
    run_noted(tier_at(tier).delta_net->delta_gates, pool, args);
  });
  m.def("gated_delta_rule", [](int tier, Pool& pool, uintptr_t qkv, int64_t qkv_stride, uintptr_t decay,
                               uintptr_t beta, uintptr_t out, const StateTensor& states, const RecurrentBatch& batch,
                               int64_t num_key_heads, int64_t num_value_heads, int64_t key_size, int64_t value_size,
                               float scale, int dtype) {
    const GatedDeltaRuleArgs args{at<void>(qkv), qkv_stride, at<float>(decay), at<float>(beta), at<void>(out),
                                  states, batch, num_key_heads, num_value_heads, key_size, value_size, scale,
                                  static_cast<DType>(dtype)};
    return run_noted(tier_at(tier).delta_net->gated_delta_rule, pool, args);
  });
}

}  // namespace quire
