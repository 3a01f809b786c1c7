#include "bindings/step_graph.h"

namespace quire {
namespace {

CodedLinearArgs make_args(uintptr_t x, int64_t x_stride, uintptr_t x_rows, uintptr_t packed, uintptr_t scales,
                          uintptr_t zeros, uintptr_t order, uintptr_t bias, uintptr_t out, int64_t out_stride,
                          int64_t num_rows, int64_t output_size, int64_t input_size, int64_t group_size, int code,
                          int bias_dtype, int out_dtype, bool is_gated) {
  CodedLinearArgs args{};
  args.x = at<void>(x);
  args.x_stride = x_stride;
  args.weight = at<void>(packed);
  args.bias = at<void>(bias);
  args.out = at<void>(out);
  args.out_stride = out_stride;
  args.num_rows = num_rows;
  args.input_size = input_size;
  args.output_size = output_size;
  args.dtype = DType::bf16;
  args.bias_dtype = static_cast<DType>(bias_dtype);
  args.out_dtype = static_cast<DType>(out_dtype);
  args.is_gated = is_gated;
  args.x_rows = at<int32_t>(x_rows);
  args.scales = at<float>(scales);
  args.zeros = at<uint8_t>(zeros);
  args.group_size = group_size;
  args.code = static_cast<Code>(code);
  args.order = at<int32_t>(order);
  return args;
}

}  // namespace

void bind_coded(nb::module_& m) {
  m.def("linear_coded", [](int tier, Pool& pool, uintptr_t x, int64_t x_stride, uintptr_t packed, uintptr_t scales,
                           uintptr_t zeros, uintptr_t order, uintptr_t bias, uintptr_t out, int64_t out_stride,
                           int64_t num_rows, int64_t output_size, int64_t input_size, int64_t group_size, int code,
                           int bias_dtype, int out_dtype, bool is_gated) {
    const CodedLinearArgs args =
        make_args(x, x_stride, 0, packed, scales, zeros, order, bias, out, out_stride, num_rows, output_size,
                  input_size, group_size, code, bias_dtype, out_dtype, is_gated);
    return run_noted(tier_at(tier).coded->coded_linear, pool, args);
  });
  m.def("grouped_coded",
        [](int tier, Pool& pool, uintptr_t x, int64_t x_stride, uintptr_t x_rows, int64_t num_x_rows, uintptr_t starts,
           int64_t num_groups, uintptr_t packed, uintptr_t scales, uintptr_t zeros, uintptr_t order, uintptr_t bias,
           uintptr_t out, int64_t num_rows, int64_t output_size, int64_t input_size, int64_t group_size, int code,
           int bias_dtype, int out_dtype, bool is_gated) {
          const CodedLinearArgs linear =
              make_args(x, x_stride, x_rows, packed, scales, zeros, order, bias, out, output_size, num_rows,
                        output_size, input_size, group_size, code, bias_dtype, out_dtype, is_gated);
          const Grouped<CodedLinearArgs> args{linear, at<int32_t>(starts), num_groups, num_x_rows};
          return run_noted(tier_at(tier).coded->coded_grouped, pool, args);
        });
  m.def("pack_codes", [](int tier, Pool& pool, uintptr_t codes, int64_t row_stride, uintptr_t scales, uintptr_t zeros,
                         uintptr_t packed, uintptr_t packed_scales, uintptr_t packed_zeros, int64_t first_row,
                         int64_t num_rows, int64_t input_size, int64_t num_groups, int code) {
    const CodedPackArgs args{at<uint8_t>(codes),  row_stride,          at<float>(scales),
                             at<uint8_t>(zeros),  at<uint8_t>(packed), at<float>(packed_scales),
                             at<uint8_t>(packed_zeros), first_row,     num_rows,
                             input_size,          num_groups,          static_cast<Code>(code)};
    nb::gil_scoped_release release;
    return tier_at(tier).coded->coded_pack(pool, args);
  });
  m.def("gather_codes", [](int tier, Pool& pool, uintptr_t ids, uintptr_t packed, uintptr_t scales, uintptr_t zeros,
                           uintptr_t out, int64_t num_rows, int64_t input_size, int64_t group_size, int dtype,
                           int code) {
    const CodedGatherArgs args{at<int64_t>(ids), at<uint8_t>(packed), at<float>(scales), at<uint8_t>(zeros),
                               at<void>(out),    num_rows,            input_size,        group_size,
                               static_cast<DType>(dtype), static_cast<Code>(code)};
    run_noted(tier_at(tier).coded->coded_gather, pool, args);
  });
}

}  // namespace quire
