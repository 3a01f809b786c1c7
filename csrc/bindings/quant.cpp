#include "bindings/step_graph.h"

namespace quire {
namespace {

template <class Kernel>
void bind_linear(nb::module_& m, const char* name, Kernel QuantKernels::*kernel) {
  m.def(name, [kernel](int tier, Pool& pool, uintptr_t x, int64_t x_stride, uintptr_t packed, uintptr_t scales,
                       uintptr_t bias, uintptr_t out, int64_t out_stride, int64_t num_rows, int64_t output_size, int64_t input_size,
                       int64_t group_size, int x_dtype, int bias_dtype, int out_dtype, bool is_gated) {
    const QuantLinearArgs args{at<void>(x),
                               x_stride,
                               at<uint8_t>(packed),
                               at<void>(scales),
                               at<void>(bias),
                               at<void>(out),
                               out_stride,
                               num_rows,
                               output_size,
                               input_size,
                               group_size,
                               static_cast<DType>(x_dtype),
                               static_cast<DType>(bias_dtype),
                               static_cast<DType>(out_dtype),
                               is_gated,
                               nullptr};
    run_noted(tier_at(tier).quant->*kernel, pool, args);
  });
}

template <class Kernel>
void bind_pack(nb::module_& m, const char* name, Kernel QuantKernels::*kernel) {
  m.def(name, [kernel](int tier, Pool& pool, uintptr_t rows, int64_t row_stride, uintptr_t packed, uintptr_t scales,
                       int64_t first_row, int64_t num_rows, int64_t input_size, int64_t group_size, int dtype) {
    const QuantPackArgs args{at<void>(rows), row_stride, at<uint8_t>(packed), at<void>(scales), first_row, num_rows,
                             input_size,     group_size, static_cast<DType>(dtype)};
    nb::gil_scoped_release release;
    return (tier_at(tier).quant->*kernel)(pool, args);
  });
}

template <class Kernel>
void bind_gather(nb::module_& m, const char* name, Kernel QuantKernels::*kernel) {
  m.def(name, [kernel](int tier, Pool& pool, uintptr_t ids, uintptr_t packed, uintptr_t scales, uintptr_t out,
                       int64_t num_rows, int64_t input_size, int64_t group_size, int dtype) {
    const QuantGatherArgs args{at<int64_t>(ids), at<uint8_t>(packed), at<void>(scales),         at<void>(out), num_rows,
                               input_size,       group_size,          static_cast<DType>(dtype)};
    run_noted(tier_at(tier).quant->*kernel, pool, args);
  });
}

}  // namespace

void bind_quant(nb::module_& m) {
  bind_linear(m, "linear_int8", &QuantKernels::linear_int8);
  bind_linear(m, "linear_int4", &QuantKernels::linear_int4);
  bind_pack(m, "pack_int8", &QuantKernels::pack_int8);
  bind_pack(m, "pack_int4", &QuantKernels::pack_int4);
  bind_gather(m, "gather_int8", &QuantKernels::gather_int8);
  bind_gather(m, "gather_int4", &QuantKernels::gather_int4);
}

}  // namespace quire
