#include "bindings/step_graph.h"

namespace quire {

void bind_state_space(nb::module_& m) {
  m.def("mamba_scan",
        [](int tier, Pool& pool, uintptr_t x, int64_t x_stride, uintptr_t time_step, int64_t time_step_stride,
           uintptr_t b, int64_t b_stride, uintptr_t c, int64_t c_stride, uintptr_t gate, int64_t gate_stride,
           uintptr_t a, uintptr_t skip, uintptr_t out, int64_t inner_size, int64_t state_size,
           const StateTensor& states, const RecurrentBatch& batch, int dtype) {
          const MambaScanArgs args{at<void>(x),    x_stride,    at<void>(time_step),      time_step_stride,
                                   at<void>(b),    b_stride,    at<void>(c),              c_stride,
                                   at<void>(gate), gate_stride, at<float>(a),             at<float>(skip),
                                   at<void>(out),  inner_size,  state_size,               states,
                                   batch,          static_cast<DType>(dtype)};
          return run_noted(tier_at(tier).state_space->mamba_scan, pool, args);
        });
  m.def("mamba2_scan",
        [](int tier, Pool& pool, uintptr_t x, int64_t x_stride, uintptr_t time_step, int64_t time_step_stride,
           uintptr_t b, int64_t b_stride, uintptr_t c, int64_t c_stride, uintptr_t gate, int64_t gate_stride,
           uintptr_t a, uintptr_t skip, uintptr_t time_step_bias, float min_time_step, float max_time_step,
           uintptr_t out, int64_t num_heads, int64_t head_size, int64_t num_groups, int64_t state_size,
           const StateTensor& states, const RecurrentBatch& batch, int dtype) {
          const Mamba2ScanArgs args{at<void>(x),
                                    x_stride,
                                    at<void>(time_step),
                                    time_step_stride,
                                    at<void>(b),
                                    b_stride,
                                    at<void>(c),
                                    c_stride,
                                    at<void>(gate),
                                    gate_stride,
                                    at<float>(a),
                                    at<float>(skip),
                                    at<float>(time_step_bias),
                                    min_time_step,
                                    max_time_step,
                                    at<void>(out),
                                    num_heads,
                                    head_size,
                                    num_groups,
                                    state_size,
                                    states,
                                    batch,
                                    static_cast<DType>(dtype)};
          return run_noted(tier_at(tier).state_space->mamba2_scan, pool, args);
        });
}

}  // namespace quire
