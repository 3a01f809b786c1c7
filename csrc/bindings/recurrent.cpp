#include "bindings/step_graph.h"
#include "quire/causal_conv.h"

namespace quire {

void bind_recurrent(nb::module_& m) {
  nb::class_<StateTensor>(m, "StateTensor")
      .def("__init__", [](StateTensor* self, uintptr_t data, int64_t num_blocks, int64_t block_stride) {
        new (self) StateTensor{at<void>(data), num_blocks, block_stride};
      });
  nb::class_<RecurrentBatch>(m, "RecurrentBatch")
      .def("__init__", [](RecurrentBatch* self, uintptr_t query_start_loc, uintptr_t seq_lens, uintptr_t read_blocks,
                          uintptr_t write_blocks, int64_t read_stride, int64_t write_stride, int64_t num_reqs,
                          int64_t num_tokens) {
        new (self) RecurrentBatch{at<int32_t>(query_start_loc), at<int32_t>(seq_lens), at<int32_t>(read_blocks),
                                  at<int32_t>(write_blocks),    read_stride,           write_stride,
                                  num_reqs,                     num_tokens};
      });
  m.def("causal_conv", [](int tier, Pool& pool, uintptr_t x, int64_t x_stride, uintptr_t weight, uintptr_t bias,
                          uintptr_t out, const StateTensor& states, const RecurrentBatch& batch, int64_t channels,
                          int64_t conv_size, bool has_silu, int dtype) {
    const CausalConvArgs args{at<void>(x), x_stride, at<void>(weight), at<void>(bias),
                              at<void>(out), states, batch, channels, conv_size, has_silu,
                              static_cast<DType>(dtype)};
    return run_noted(tier_at(tier).causal_conv->causal_conv, pool, args);
  });
}

}  // namespace quire
