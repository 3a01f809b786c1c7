#include "selftest_cases.h"

#include <cstring>

namespace quire {
namespace {

constexpr int64_t kInputs = 256, kOutputs = 43, kPackedOutputs = 48, kMaxRows = 19;
constexpr int64_t kNumRows[] = {1, kMaxRows};
// Three groups of one panel each, the second without rows.
constexpr int32_t kRouted[] = {3, 0, 18, 0, 5}, kRoutedStarts[] = {0, 1, 1, 5};
constexpr int64_t kRoutedRows = 5;
constexpr int64_t kGathered = 3;
constexpr int64_t kOfFormat = (1 + kMaxRows) * kOutputs + kRoutedRows * kPanelSize + kGathered * kInputs;

// Where the blocks of each format have half-precision numbers; -1 = none.
constexpr int kHalves[kNumBlockFormats][2] = {{0, -1},  {0, -1}, {0, 2}, {0, -1},   {0, 2},  {80, 82}, {108, -1},
                                              {0, 2},   {0, 2},  {208, -1}, {0, -1}, {0, -1}, {-1, -1}};

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

// Random blocks whose scales are between 2 ** -8 and 2 ** -4.
void fill_blocks(int format, const BlockLayout& layout, Bytes& bytes, uint8_t* rows, int64_t num_blocks) {
  for (int64_t i = 0; i < num_blocks * layout.block_bytes; ++i) rows[i] = bytes.next();
  for (int64_t i = 0; i < num_blocks; ++i, rows += layout.block_bytes) {
    for (const int at : kHalves[format]) {
      if (at >= 0) rows[at + 1] = static_cast<uint8_t>(0x1c + (rows[at + 1] & 15));
    }
    if (format == static_cast<int>(BlockFormat::mxfp4)) rows[0] = static_cast<uint8_t>(119 + (rows[0] & 3));
  }
}

void run_format(int format, const BlockFormatKernels& kernels, Pool& pool, const float* x, float* result) {
  alignas(64) static uint8_t packed[kPackedOutputs * 2 * kInputs], rows[kOutputs * 2 * kInputs];
  const BlockLayout& layout = kernels.layout;
  const int64_t num_blocks = kInputs / layout.block_inputs, row_bytes = num_blocks * layout.block_bytes;
  Bytes bytes;
  fill_blocks(format, layout, bytes, rows, kOutputs * num_blocks);
  std::memset(packed, 0, sizeof(packed));
  kernels.block_pack(pool, {rows, row_bytes, packed, 0, kOutputs, kInputs});
  const auto args = [&](int64_t num_rows, int64_t num_outputs, const int32_t* x_rows) {
    return QuantLinearArgs{x, kInputs, packed, nullptr, nullptr, result, num_outputs, num_rows, num_outputs, kInputs, 0,
                           DType::f32, DType::f32, DType::f32, false, x_rows};
  };
  for (const int64_t num_rows : kNumRows) {
    kernels.block_linear(pool, args(num_rows, kOutputs, nullptr));
    result += num_rows * kOutputs;
  }
  kernels.block_grouped(pool, {args(kRoutedRows, kPanelSize, kRouted), kRoutedStarts, 3, kMaxRows});
  result += kRoutedRows * kPanelSize;
  const int64_t ids[kGathered] = {42, 0, 17};
  kernels.block_gather(pool, {ids, packed, result, kGathered, kInputs, DType::f32});
}

}  // namespace

const int64_t kBlockProductsBytes = kNumBlockFormats * kOfFormat * 4;

void block_products(const Tier& tier, Pool& pool, void* out) {
  float x[kMaxRows * kInputs];
  Bytes bytes;
  for (float& value : x) value = static_cast<float>(bytes.next()) * 0x1p-7f - 1.0f;
  for (int format = 0; format < kNumBlockFormats; ++format) {
    run_format(format, tier.block->of[format], pool, x, static_cast<float*>(out) + format * kOfFormat);
  }
}

}  // namespace quire
