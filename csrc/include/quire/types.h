// Plain values that cross between the bindings and the kernels. No torch, no Python, no standard library templates:
// kernel sources are compiled once per instruction set, and a shared template would be linked from any of them.
#pragma once

#include <cstdint>

namespace quire {

enum class DType : int32_t { bf16 = 0, f32 = 1, i8 = 2, i32 = 3, f8e4m3 = 4, f8e5m2 = 5 };

// Of an element.
constexpr int64_t bytes_of(DType dtype) {
  return dtype == DType::f32 || dtype == DType::i32 ? 4 : dtype == DType::bf16 ? 2 : 1;
}

// A bfloat16 number as it lies in memory.
struct bf16 {
  uint16_t bits;
};

constexpr int64_t kPanelSize = 16;  // outputs that a packed weight keeps side by side

constexpr int64_t kCacheLine = 64;  // bytes

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }
constexpr int64_t min_i64(int64_t a, int64_t b) { return a < b ? a : b; }
constexpr int64_t max_i64(int64_t a, int64_t b) { return a > b ? a : b; }

}  // namespace quire
