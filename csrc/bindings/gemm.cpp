#include "bindings/step_graph.h"

namespace quire {

void bind_gemm(nb::module_& m) {
  m.def("linear",
        [](int tier, Pool& pool, uintptr_t x, int64_t x_stride, uintptr_t weight, uintptr_t bias, uintptr_t out,
           int64_t out_stride, int64_t num_rows, int64_t input_size, int64_t output_size, int dtype, int bias_dtype,
           int out_dtype, bool is_gated) {
          const LinearArgs args{at<void>(x),
                                x_stride,
                                at<void>(weight),
                                at<void>(bias),
                                at<void>(out),
                                out_stride,
                                num_rows,
                                input_size,
                                output_size,
                                static_cast<DType>(dtype),
                                static_cast<DType>(bias_dtype),
                                static_cast<DType>(out_dtype),
                                is_gated,
                                nullptr};
          run_noted(tier_at(tier).gemm->linear, pool, args);
        });
  m.def("pack_rows",
        [](int tier, Pool& pool, uintptr_t rows, int64_t row_stride, int row_type, uintptr_t packed, int packed_dtype,
           int64_t num_rows, int64_t input_size, int64_t first_row) {
          const PackArgs args{at<void>(rows),
                              row_stride,
                              static_cast<RowType>(row_type),
                              at<void>(packed),
                              static_cast<DType>(packed_dtype),
                              num_rows,
                              input_size,
                              first_row};
          nb::gil_scoped_release release;
          return tier_at(tier).gemm->pack_rows(pool, args);
        });
  m.def("read_packed_rows",
        [](int tier, Pool& pool, uintptr_t packed, int dtype, uintptr_t ids, int64_t first_row, int64_t num_rows,
           int64_t input_size, uintptr_t out) {
          const ReadRowsArgs args{at<void>(packed), static_cast<DType>(dtype), at<int64_t>(ids), first_row,
                                  num_rows,         input_size,                at<void>(out)};
          run_noted(tier_at(tier).gemm->read_rows, pool, args);
        });
  m.def("run_ceiling", [](int tier, Pool& pool, int ceiling, uintptr_t data, int64_t bytes, int64_t steps) {
    nb::gil_scoped_release release;
    return tier_at(tier).gemm->run_ceiling(pool, static_cast<Ceiling>(ceiling), at<void>(data), bytes, steps);
  });
}

}  // namespace quire
