// From float32 sums to the outputs: bias, activation, rounding.
#pragma once

#include "quire/gemm.h"
#include "simd/bf16_dot.h"
#include "simd/simd.h"

namespace quire::QUIRE_TIER {

// `Args` is LinearArgs or QuantLinearArgs.

// The panels that a kernel works through. Gated weights alternate: the gates of 16 outputs, then their ups.
template <class Args>
static inline int64_t num_work_panels(const Args& args) {
  const int64_t panels = ceil_div(args.output_size, kPanelSize);
  return args.is_gated ? 2 * panels : panels;
}

// The panels of a packed weight.
template <class Args>
static inline int64_t packed_panels(const Args& args) {
  return ceil_div(args.is_gated ? 2 * args.output_size : args.output_size, kPanelSize);
}

// Where in the packed weight a panel of work lies.
static inline int64_t packed_panel(const LinearArgs& args, int64_t panel) {
  if (!args.is_gated) return panel;
  return panel / 2 + panel % 2 * (args.output_size / kPanelSize);
}

template <class Args>
static inline F16 with_bias(const Args& args, F16 sum, int64_t first, int64_t n) {
  if (args.bias == nullptr) return sum;
  if (args.bias_dtype == DType::bf16) return sum + load_n(static_cast<const bf16*>(args.bias) + first, n);
  return sum + load_n(static_cast<const float*>(args.bias) + first, n);
}

// Results of arithmetic are never subnormal here: the pool's threads flush them.
#if defined(QUIRE_TIER_AVX512_BF16)
static inline F16 rounded(F16 x, DType dtype) { return dtype == DType::f32 ? x : as_bf16_normal(x); }
static inline void store_result(bf16* out, F16 x) { store_normal(out, x); }
#else
static inline F16 rounded(F16 x, DType dtype) { return dtype == DType::f32 ? x : as_bf16(x); }
static inline void store_result(bf16* out, F16 x) { store(out, x); }
#endif
static inline void store_result(float* out, F16 x) { store(out, x); }

// Outputs that no cache holds until they are read go to memory directly, without being read first.
static inline bool is_streamed(const LinearArgs& args) {
  constexpr int64_t kBytes = 4 << 20;
  const int64_t size = bytes_of(args.out_dtype);
  const uint64_t places = reinterpret_cast<uintptr_t>(args.out) | static_cast<uint64_t>(args.out_stride * size);
  return args.num_rows * args.output_size * size >= kBytes && places % 32 == 0;
}

template <class T>
static inline void store_outputs(T* out, int64_t n, F16 values, bool streamed) {
  if (n < kPanelSize) {
    store_n(out, n, values);
  } else if (streamed) {
    stream(out, values);
  } else {
    store_result(out, values);
  }
}

template <class T, bool kIsGated>
static inline void finish_rows(const LinearArgs& args, const float* sums, int64_t panel_stride, int64_t row_stride,
                               int64_t panel, int64_t num_panels, int64_t first_row, int64_t num_rows) {
  constexpr int64_t kStep = kIsGated ? 2 : 1;
  const bool streamed = is_streamed(args), is_plain = args.bias == nullptr;
  for (int64_t row = 0; row < num_rows; ++row, sums += row_stride) {
    T* out = static_cast<T*>(args.out) + (first_row + row) * args.out_stride;
    for (int64_t p = 0; p < num_panels; p += kStep) {
      const int64_t first = (panel + p) / kStep * kPanelSize;
      const int64_t n = min_i64(kPanelSize, args.output_size - first);
      F16 values = load(sums + p * panel_stride);
      if (!is_plain) values = with_bias(args, values, first, n);
      if constexpr (kIsGated) {
        F16 up = load(sums + (p + 1) * panel_stride);
        if (!is_plain) up = with_bias(args, up, args.output_size + first, n);
        values = rounded(silu(rounded(values, args.dtype)), args.dtype) * rounded(up, args.dtype);
      }
      store_outputs(out + first, n, values, streamed);
    }
  }
  if (streamed) store_fence();
}

// sums[panel][row][16] of panels of work `panel` .. `panel + num_panels - 1`; strides in floats.
static inline void finish(const LinearArgs& args, const float* sums, int64_t panel_stride, int64_t row_stride,
                          int64_t panel, int64_t num_panels, int64_t first_row, int64_t num_rows) {
  const auto rows = args.out_dtype == DType::bf16
                        ? (args.is_gated ? finish_rows<bf16, true> : finish_rows<bf16, false>)
                        : (args.is_gated ? finish_rows<float, true> : finish_rows<float, false>);
  rows(args, sums, panel_stride, row_stride, panel, num_panels, first_row, num_rows);
}

// How a product is divided into tasks: row blocks of one group of panels follow each other, so that the weights of the
// group are read from memory once.
struct Division {
  int64_t rows_per_task, num_row_blocks;
  int64_t panels_per_task, num_groups;

  int64_t num_tasks() const { return num_row_blocks * num_groups; }
};

// Tasks as large as leaves several for every thread. `max_panels` is a power of two; groups of gated panels stay even.
static inline Division divide(const LinearArgs& args, int num_threads, int64_t max_rows, int64_t max_panels) {
  constexpr int64_t kTasksPerThread = 8;
  const int64_t num_panels = num_work_panels(args);
  const int64_t min_panels = args.is_gated || args.num_rows > 16 ? 2 : 1;
  Division d;
  auto set_rows = [&](int64_t limit) {
    d.num_row_blocks = ceil_div(args.num_rows, limit);
    d.rows_per_task = round_up(ceil_div(args.num_rows, d.num_row_blocks), kPanelSize);
    d.num_row_blocks = ceil_div(args.num_rows, d.rows_per_task);
  };
  auto set_panels = [&](int64_t panels) {
    d.panels_per_task = panels;
    d.num_groups = ceil_div(num_panels, panels);
  };
  set_rows(max_rows);
  set_panels(max_panels);
  while (d.num_tasks() < kTasksPerThread * num_threads && d.panels_per_task > 4) set_panels(d.panels_per_task / 2);
  while (d.num_tasks() < 3 * num_threads && d.rows_per_task > 64) set_rows(d.rows_per_task / 2);
  while (d.num_tasks() < 2 * num_threads && d.panels_per_task > min_panels) set_panels(d.panels_per_task / 2);
  return d;
}

}  // namespace quire::QUIRE_TIER
