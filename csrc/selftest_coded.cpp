#include <cstring>

#include "selftest_cases.h"

namespace quire {
namespace {

constexpr int64_t kInputs = 192, kOutputs = 43, kPackedOutputs = 48, kGroup = 96, kGroups = kInputs / kGroup;
constexpr int64_t kNumRows[] = {1, 4, 19};
constexpr int64_t kMaxRows = 19, kAllRows = 24;
// Three groups of one panel each, the second without rows.
constexpr int32_t kRouted[] = {3, 0, 18, 0, 5}, kRoutedStarts[] = {0, 1, 1, 5};
constexpr int64_t kRoutedRows = 5, kGathered = 3;
constexpr int64_t kOfCode = kAllRows * kOutputs + kRoutedRows * kPanelSize + kGathered * kInputs;
constexpr Code kCodes[] = {Code::e4m3, Code::int8, Code::int4, Code::nf4};

// The same in every process: a linear congruential generator.
class Bytes {
 public:
  uint8_t next() {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<uint8_t>(state_ >> 56);
  }

 private:
  uint64_t state_ = 1;
};

void run_code(const CodedKernels& kernels, Pool& pool, Code code, const bf16* x, float* result) {
  alignas(64) static uint8_t packed[kPackedOutputs * kInputs], rows[kOutputs * kInputs];
  alignas(64) static float scales[kOutputs * kGroups], packed_scales[kPackedOutputs * kGroups];
  static uint8_t zeros[kOutputs * kGroups], packed_zeros[kPackedOutputs * kGroups];
  Bytes bytes;
  for (uint8_t& byte : rows) byte = bytes.next() & 0xbf;  // no NaN of e4m3
  for (float& scale : scales) scale = static_cast<float>(1 + bytes.next()) * 0x1p-12f;
  for (uint8_t& zero : zeros) zero = bytes.next() & 15;
  std::memset(packed, 0, sizeof(packed));
  std::memset(packed_scales, 0, sizeof(packed_scales));
  std::memset(packed_zeros, 0, sizeof(packed_zeros));
  const bool has_zeros = code == Code::int4;
  kernels.coded_pack(pool, {rows, kInputs * bits_of(code) / 8, scales, has_zeros ? zeros : nullptr, packed, packed_scales,
                            has_zeros ? packed_zeros : nullptr, 0, kOutputs, kInputs, kGroups, code});
  int32_t reversed[3 * kInputs];
  for (int64_t i = 0; i < 3 * kInputs; ++i) reversed[i] = static_cast<int32_t>(kInputs - 1 - i % kInputs);
  const auto args = [&](int64_t num_rows, int64_t num_outputs, const int32_t* x_rows) {
    CodedLinearArgs of{};
    of.x = x;
    of.x_stride = kInputs;
    of.weight = packed;
    of.out = result;
    of.out_stride = of.output_size = num_outputs;
    of.num_rows = num_rows;
    of.input_size = kInputs;
    of.dtype = of.bias_dtype = DType::bf16;
    of.out_dtype = DType::f32;
    of.x_rows = x_rows;
    of.scales = packed_scales;
    of.zeros = has_zeros ? packed_zeros : nullptr;
    of.group_size = kGroup;
    of.code = code;
    of.order = num_rows == kMaxRows ? reversed : nullptr;
    return of;
  };
  for (const int64_t num_rows : kNumRows) {
    kernels.coded_linear(pool, args(num_rows, kOutputs, nullptr));
    result += num_rows * kOutputs;
  }
  kernels.coded_grouped(pool, {args(kRoutedRows, kPanelSize, kRouted), kRoutedStarts, 3, kMaxRows});
  result += kRoutedRows * kPanelSize;
  const int64_t ids[kGathered] = {42, 0, 17};
  kernels.coded_gather(pool, {ids, packed, packed_scales, has_zeros ? packed_zeros : nullptr, result, kGathered, kInputs,
                              kGroup, DType::f32, code});
}

}  // namespace

const int64_t kCodedProductsBytes = 4 * kOfCode * 4;

void coded_products(const Tier& tier, Pool& pool, void* out) {
  bf16 x[kMaxRows * kInputs];
  Bytes bytes;
  for (bf16& value : x) value.bits = static_cast<uint16_t>(0x3f00 | (bytes.next() & 0xff) | (bytes.next() & 1) << 15);
  for (const Code code : kCodes) {
    run_code(*tier.coded, pool, code, x, static_cast<float*>(out) + static_cast<int64_t>(code) * kOfCode);
  }
}

}  // namespace quire
