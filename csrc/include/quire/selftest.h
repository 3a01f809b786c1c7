// Whether a tier's kernels run here and are right, asked in a child process, so that a crash is an answer.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "quire/types.h"

namespace quire {

// Products of 16 rows by 16 columns over `kSelfTestDepth`, in the order of the tile unit.
constexpr int kSelfTestDepth = 96;

struct SelfTestKernels {
  // c [16][16] = a [16][96] * b [96][16], where b lies as pairs: b[k / 2][column][k % 2].
  void (*product_bf16)(const bf16* a, const bf16* b, float* c);
  // The same over int8, where b lies as fours: b[k / 4][column][k % 4].
  void (*product_int8)(const int8_t* a, const int8_t* b, int32_t* c);
};

// What the child does before it tests: nothing, or one of the ways in which a tier fails. For tests.
enum class Fault : int32_t {
  none = 0,
  illegal_instruction = 1,
  bad_access = 2,
  hang = 3,
  wrong_result = 4,
  idle_kernel = 5,  // one of `idle_kernel_names` does nothing
};

// Runs every case of `selftest.cpp` with `tier` in a forked child and compares its bits with the portable tier's.
// Returns "" when all agree, otherwise the reason in words. `idle_kernel`: the number of that kernel.
std::string self_test(int tier, int64_t timeout_ms, Fault fault, int idle_kernel);
std::vector<std::string> idle_kernel_names();

}  // namespace quire
