#include "bindings/step_graph.h"

namespace quire {
namespace {

const BlockFormatKernels& kernels_at(int tier, int format) { return tier_at(tier).block->of[format]; }

QuantLinearArgs linear_args(uintptr_t x, int64_t x_stride, uintptr_t packed, uintptr_t bias, uintptr_t out,
                            int64_t out_stride, int64_t num_rows, int64_t output_size, int64_t input_size, int x_dtype,
                            int bias_dtype, int out_dtype, bool is_gated, uintptr_t x_rows) {
  return {at<void>(x),
          x_stride,
          at<uint8_t>(packed),
          nullptr,
          at<void>(bias),
          at<void>(out),
          out_stride,
          num_rows,
          output_size,
          input_size,
          0,
          static_cast<DType>(x_dtype),
          static_cast<DType>(bias_dtype),
          static_cast<DType>(out_dtype),
          is_gated,
          at<int32_t>(x_rows)};
}

}  // namespace

void bind_block_quant(nb::module_& m) {
  // Inputs and bytes of a block in a file, and of a record in memory.
  m.def("block_layout", [](int format) {
    const BlockLayout& layout = kernels_at(0, format).layout;
    return nb::make_tuple(layout.block_inputs, layout.block_bytes, layout.record_inputs, layout.record_bytes);
  });
  m.def("block_linear", [](int tier, Pool& pool, int format, uintptr_t x, int64_t x_stride, uintptr_t packed,
                           uintptr_t bias, uintptr_t out, int64_t out_stride, int64_t num_rows, int64_t output_size,
                           int64_t input_size, int x_dtype, int bias_dtype, int out_dtype, bool is_gated) {
    run_noted(kernels_at(tier, format).block_linear, pool,
              linear_args(x, x_stride, packed, bias, out, out_stride, num_rows, output_size, input_size, x_dtype,
                          bias_dtype, out_dtype, is_gated, 0));
  });
  m.def("block_grouped", [](int tier, Pool& pool, int format, uintptr_t x, int64_t x_stride, uintptr_t x_rows,
                            int64_t num_x_rows, uintptr_t starts, int64_t num_groups, uintptr_t packed, uintptr_t bias,
                            uintptr_t out, int64_t num_rows, int64_t output_size, int64_t input_size, int x_dtype,
                            int bias_dtype, int out_dtype, bool is_gated) {
    const Grouped<QuantLinearArgs> args{
        linear_args(x, x_stride, packed, bias, out, output_size, num_rows, output_size, input_size, x_dtype, bias_dtype,
                    out_dtype, is_gated, x_rows),
        at<int32_t>(starts), num_groups, num_x_rows};
    return run_noted(kernels_at(tier, format).block_grouped, pool, args);
  });
  m.def("block_pack", [](int tier, Pool& pool, int format, uintptr_t rows, int64_t row_stride, uintptr_t packed,
                         int64_t first_row, int64_t num_rows, int64_t input_size) {
    const BlockPackArgs args{at<uint8_t>(rows), row_stride, at<uint8_t>(packed), first_row, num_rows, input_size};
    nb::gil_scoped_release release;
    return kernels_at(tier, format).block_pack(pool, args);
  });
  m.def("block_gather", [](int tier, Pool& pool, int format, uintptr_t ids, uintptr_t packed, uintptr_t out,
                           int64_t num_rows, int64_t input_size, int dtype) {
    const BlockGatherArgs args{at<int64_t>(ids), at<uint8_t>(packed), at<void>(out), num_rows, input_size,
                               static_cast<DType>(dtype)};
    run_noted(kernels_at(tier, format).block_gather, pool, args);
  });
}

}  // namespace quire
