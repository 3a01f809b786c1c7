#include "bindings/step_graph.h"
#include "quire/rows.h"

namespace quire {

void bind_elementwise(nb::module_& m) {
  m.def("rms_norm",
        [](int tier, Pool& pool, uintptr_t x, int64_t x_stride, uintptr_t residual, uintptr_t weight, uintptr_t out,
           int64_t num_rows, int64_t size, float eps, int dtype) {
          const RmsNormArgs args{at<void>(x),   x_stride, at<void>(residual), at<void>(weight),
                                 at<void>(out), num_rows, size,               eps,
                                 static_cast<DType>(dtype)};
          run_noted(tier_at(tier).elementwise->rms_norm, pool, args);
        });
  m.def("layer_norm",
        [](int tier, Pool& pool, uintptr_t x, int64_t x_stride, uintptr_t residual, uintptr_t weight, uintptr_t bias,
           uintptr_t out, int64_t num_rows, int64_t size, float eps, int dtype) {
          const LayerNormArgs args{at<void>(x),   x_stride, at<void>(residual), at<void>(weight), at<void>(bias),
                                   at<void>(out), num_rows, size,               eps,              static_cast<DType>(dtype)};
          run_noted(tier_at(tier).elementwise->layer_norm, pool, args);
        });
  m.def("gated_activation", [](int tier, Pool& pool, uintptr_t x, int64_t x_stride, uintptr_t out, int64_t num_rows,
                               int64_t size, int activation, int dtype, float limit, float alpha, float offset) {
    const GatedActivationArgs args{
        at<void>(x), x_stride, at<void>(out), num_rows, size, static_cast<Activation>(activation),
        static_cast<DType>(dtype), limit, alpha, offset};
    run_noted(tier_at(tier).elementwise->gated_activation, pool, args);
  });
  m.def("transform", [](int tier, Pool& pool, uintptr_t x, int64_t x_stride, uintptr_t addend, int64_t addend_stride,
                        uintptr_t out, int64_t num_rows, int64_t size, float factor, int activation, int dtype) {
    const TransformArgs args{at<void>(x), x_stride, at<void>(addend), addend_stride, at<void>(out), num_rows, size,
                             factor, static_cast<Activation>(activation), static_cast<DType>(dtype)};
    run_noted(tier_at(tier).elementwise->transform, pool, args);
  });
  m.def("multiply", [](int tier, Pool& pool, uintptr_t x, int64_t x_stride, uintptr_t gate, int64_t gate_stride,
                       uintptr_t out, int64_t num_rows, int64_t size, int activation, int dtype) {
    const MultiplyArgs args{at<void>(x), x_stride, at<void>(gate), gate_stride, at<void>(out), num_rows, size,
                            static_cast<GateActivation>(activation), static_cast<DType>(dtype)};
    run_noted(tier_at(tier).elementwise->multiply, pool, args);
  });
  m.def("gated_rms_norm",
        [](int tier, Pool& pool, uintptr_t x, int64_t x_stride, uintptr_t gate, int64_t gate_stride, uintptr_t weight,
           int64_t weight_stride, uintptr_t out, int64_t num_rows, int64_t num_groups, int64_t size, float eps,
           bool gate_first, int dtype) {
          const GatedRmsNormArgs args{at<void>(x), x_stride, at<void>(gate), gate_stride, at<void>(weight),
                                      weight_stride, at<void>(out), num_rows, num_groups, size, eps, gate_first,
                                      static_cast<DType>(dtype)};
          run_noted(tier_at(tier).elementwise->gated_rms_norm, pool, args);
        });
  m.def("copy_rows", [](Pool& pool, uintptr_t x, int64_t x_stride, int64_t num_x_rows, uintptr_t from, uintptr_t out,
                        int64_t out_stride, int64_t num_out_rows, uintptr_t to, int64_t num_rows, int64_t row_bytes) {
    const CopyRowsArgs args{at<char>(x),  x_stride,   num_x_rows,   at<int64_t>(from), at<char>(out),
                            out_stride,   num_out_rows, at<int64_t>(to), num_rows,      row_bytes};
    return run_noted(copy_rows, pool, args);
  });
  m.def("is_finite", [](int tier, Pool& pool, uintptr_t x, int64_t num_elements, int64_t element_bytes,
                        uint32_t exponent_mask) {
    const IsFiniteArgs args{at<void>(x), num_elements, element_bytes, exponent_mask};
    nb::gil_scoped_release release;
    return tier_at(tier).elementwise->is_finite(pool, args);
  });
}

}  // namespace quire
