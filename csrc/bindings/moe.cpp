#include "bindings/step_graph.h"

namespace quire {
namespace {

template <class Kernel>
void bind_grouped(nb::module_& m, const char* name, Kernel QuantKernels::*kernel) {
  m.def(name, [kernel](int tier, Pool& pool, uintptr_t x, int64_t x_stride, uintptr_t x_rows, int64_t num_x_rows,
                       uintptr_t starts, int64_t num_groups, uintptr_t packed, uintptr_t scales, uintptr_t bias,
                       uintptr_t out, int64_t num_rows, int64_t output_size, int64_t input_size, int64_t group_size,
                       int x_dtype, int bias_dtype, int out_dtype, bool is_gated) {
    const QuantLinearArgs linear{at<void>(x),
                                 x_stride,
                                 at<uint8_t>(packed),
                                 at<void>(scales),
                                 at<void>(bias),
                                 at<void>(out),
                                 output_size,
                                 num_rows,
                                 output_size,
                                 input_size,
                                 group_size,
                                 static_cast<DType>(x_dtype),
                                 static_cast<DType>(bias_dtype),
                                 static_cast<DType>(out_dtype),
                                 is_gated,
                                 at<int32_t>(x_rows)};
    const Grouped<QuantLinearArgs> args{linear, at<int32_t>(starts), num_groups, num_x_rows};
    return run_noted(tier_at(tier).quant->*kernel, pool, args);
  });
}

}  // namespace

void bind_moe(nb::module_& m) {
  bind_grouped(m, "grouped_int8", &QuantKernels::grouped_int8);
  bind_grouped(m, "grouped_int4", &QuantKernels::grouped_int4);
  m.def("grouped_linear",
        [](int tier, Pool& pool, uintptr_t x, int64_t x_stride, uintptr_t x_rows, int64_t num_x_rows, uintptr_t starts,
           int64_t num_groups, uintptr_t weight, uintptr_t bias, uintptr_t out, int64_t num_rows, int64_t output_size,
           int64_t input_size, int dtype, int bias_dtype, int out_dtype, bool is_gated) {
          const LinearArgs linear{at<void>(x),
                                  x_stride,
                                  at<void>(weight),
                                  at<void>(bias),
                                  at<void>(out),
                                  output_size,
                                  num_rows,
                                  input_size,
                                  output_size,
                                  static_cast<DType>(dtype),
                                  static_cast<DType>(bias_dtype),
                                  static_cast<DType>(out_dtype),
                                  is_gated,
                                  at<int32_t>(x_rows)};
          const Grouped<LinearArgs> args{linear, at<int32_t>(starts), num_groups, num_x_rows};
          return run_noted(tier_at(tier).gemm->grouped_linear, pool, args);
        });
  m.def("route", [](int tier, Pool& pool, uintptr_t logits, uintptr_t correction, uintptr_t expert_ids,
                    uintptr_t weights, uintptr_t starts, uintptr_t rows, uintptr_t places, int64_t num_tokens,
                    int64_t num_experts, int64_t num_chosen, int64_t num_groups, int64_t num_chosen_groups,
                    int scoring, bool sums_two, bool is_normalized, float scale, float jitter,
                    uintptr_t expert_scales) {
    const RouteArgs args{at<float>(logits),
                         at<float>(correction),
                         at<int32_t>(expert_ids),
                         at<float>(weights),
                         at<int32_t>(starts),
                         at<int32_t>(rows),
                         at<int32_t>(places),
                         num_tokens,
                         num_experts,
                         num_chosen,
                         num_groups,
                         num_chosen_groups,
                         static_cast<Scoring>(scoring),
                         sums_two,
                         is_normalized,
                         scale,
                         jitter,
                         at<float>(expert_scales)};
    run_noted(tier_at(tier).moe->route, pool, args);
  });
  m.def("arrange_rows", [](Pool& pool, uintptr_t expert_ids, uintptr_t slots, uintptr_t starts, uintptr_t rows,
                           uintptr_t places, int64_t num_tokens, int64_t num_experts, int64_t num_chosen) {
    const ArrangeArgs args{at<int32_t>(expert_ids), at<int32_t>(slots),  at<int32_t>(starts), at<int32_t>(rows),
                           at<int32_t>(places),     num_tokens,          num_experts,         num_chosen};
    return run_noted(arrange, pool, args);
  });
  m.def("combine_experts", [](int tier, Pool& pool, uintptr_t rows, uintptr_t places, uintptr_t weights,
                              uintptr_t shared, uintptr_t shared_gate, uintptr_t out, int64_t num_tokens,
                              int64_t num_chosen, int64_t size, int dtype) {
    const CombineArgs args{at<void>(rows), at<int32_t>(places),    at<float>(weights), at<void>(shared),
                           at<float>(shared_gate), at<void>(out), num_tokens,         num_chosen,
                           size,           static_cast<DType>(dtype)};
    return run_noted(tier_at(tier).moe->combine, pool, args);
  });
  m.def("spread_rows", [](int tier, Pool& pool, uintptr_t x, int64_t x_stride, uintptr_t places, uintptr_t weights,
                          uintptr_t out, int64_t num_tokens, int64_t num_chosen, int64_t size, int dtype) {
    const SpreadArgs args{at<void>(x),   x_stride,   at<int32_t>(places), at<float>(weights),
                          at<void>(out), num_tokens, num_chosen,          size,
                          static_cast<DType>(dtype)};
    return run_noted(tier_at(tier).moe->spread, pool, args);
  });
}

}  // namespace quire
