// Blocks of a file into records, once a load, and back to numbers, for every looked-up embedding.
#pragma once

#include "kernels/block_formats.h"
#include "simd/transpose.h"

namespace quire::QUIRE_TIER {

constexpr int64_t kGatheredPerTask = 4;  // rows

// The blocks of outputs first .. last of one panel at place `b` of a record, or null where their rows have ended.
template <class F>
static inline bool pack_record_block(const uint8_t* block, int64_t row_stride, int64_t first, int64_t last, int64_t b,
                                     uint8_t* record) {
  uint8_t *planes = record + b * F::kPlanes * kPlaneBytes, *scales = record + kCodeBytes<F>;
  const bool is_whole = last - first == kPanelSize;
  if (is_whole) {
    transpose_16_rows(reinterpret_cast<const char*>(block + F::kCodesAt), row_stride, F::kPlanes,
                      reinterpret_cast<char*>(planes), kPlaneBytes);
  }
  bool all_finite = true;
  for (int64_t n = first; n < last; ++n, block += row_stride) {
    all_finite &= F::put_scales(block, n, b, scales);
    for (int64_t t = 0; t < F::kPlanes && !is_whole; ++t) {
      __builtin_memcpy(planes + t * kPlaneBytes + 4 * n, block + F::kCodesAt + 4 * t, 4);
    }
  }
  for (int64_t t = 0; t < F::kPlanes && F::kChangesWords; ++t) {
    uint32_t words[kPanelSize];
    __builtin_memcpy(words, planes + t * kPlaneBytes, kPlaneBytes);
    for (int64_t n = 0; n < kPanelSize; ++n) {
      if (is_whole || (n >= first && n < last)) words[n] = F::word(words[n], t);
    }
    __builtin_memcpy(planes + t * kPlaneBytes, words, kPlaneBytes);
  }
  return all_finite;
}

// One panel's part of the rows.
template <class F>
static inline bool pack_panel(const BlockPackArgs& args, int64_t panel) {
  static constexpr uint8_t kNothing[F::kBlockBytes] = {};
  const int64_t begin = panel * kPanelSize, first = max_i64(args.first_row, begin);
  const int64_t last = min_i64(args.first_row + args.num_rows, begin + kPanelSize);
  const uint8_t* rows = args.rows + (first - args.first_row) * args.row_stride;
  const int64_t num_blocks = args.input_size / F::kBlockInputs, records = ceil_div(num_blocks, F::kBlocks);
  uint8_t* record = args.packed + panel * records * kRecordBytes<F>;
  bool all_finite = true;
  for (int64_t block = 0; block < records * F::kBlocks; ++block) {
    const int64_t b = block % F::kBlocks;
    const bool is_there = block < num_blocks;
    const uint8_t* from = is_there ? rows + block * F::kBlockBytes : kNothing;
    all_finite &= pack_record_block<F>(from, is_there ? args.row_stride : 0, first - begin, last - begin, b, record);
    if (b == F::kBlocks - 1) record += kRecordBytes<F>;
  }
  return all_finite;
}

template <class F>
static bool pack_blocks(Pool& pool, const BlockPackArgs& args) {
  if (args.num_rows == 0) return true;
  const int64_t first = args.first_row / kPanelSize;
  const int64_t num_panels = ceil_div(args.first_row + args.num_rows, kPanelSize) - first;
  bool all_finite = true;
  parallel_for(pool, num_panels, [&](int64_t task, int) {
    if (!pack_panel<F>(args, first + task)) __atomic_store_n(&all_finite, false, __ATOMIC_RELAXED);
  });
  return all_finite;
}

// value * 2 ** exponent as a float32 number, subnormal ones too, which the pool's threads flush.
static inline float scaled_by_power(float value, int32_t exponent) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, 4);
  const uint32_t sign = bits & 0x80000000u, mantissa = bits & 0x7fffffu;
  const int32_t own = static_cast<int32_t>(bits >> 23 & 255u);
  if (own == 0) return 0.0f;
  const int32_t sum = own + exponent;
  if (sum >= 255) {
    bits = sign | 0x7f800000u;
  } else if (sum > 0) {
    bits = sign | static_cast<uint32_t>(sum) << 23 | mantissa;
  } else {
    bits = sign | (sum > -24 ? (mantissa | 0x800000u) >> (1 - sum) : 0u);
  }
  __builtin_memcpy(&value, &bits, 4);
  return value;
}

// A record as it is needed for lookups.
template <class F>
struct UnpackedRecord {
  static constexpr int64_t kGroups = kRecordInputs<F> / kGroupInputs;
  const uint8_t* record;
  alignas(64) uint8_t codes[kGroups * kGroupBytes];
  alignas(64) float a[kGroups * F::kParts * kPanelSize], b[kGroups * F::kParts * kPanelSize];

  explicit UnpackedRecord(const uint8_t* from) : record(from) {
    unpack<F>(from, codes);
    F::factors(from, a, b);
  }

  // Inputs 16 * i .. 16 * i + 15 of output n.
  F16 values(int64_t i, int64_t n) const {
    int32_t numbers[kPanelSize];
    const uint8_t* at = codes + i * 4 * kPlaneBytes + 4 * n;
    for (int k = 0; k < 16; ++k) numbers[k] = static_cast<int32_t>(at[k / 4 * kPlaneBytes + k % 4]) - F::kOffset;
    if constexpr (F::kHasPowerScales) {
      float scaled[16];
      const int32_t exponent = record[kCodeBytes<F> + i / 2 * kPanelSize + n] - F::kExponentOffset;
      for (int k = 0; k < 16; ++k) scaled[k] = scaled_by_power(static_cast<float>(numbers[k]), exponent);
      return load(scaled);
    }
    const int64_t place = (F::kParts == 2 ? i : i / 2) * kPanelSize + n;
    const F16 scaled = set1(a[place]) * load_int32(numbers);
    if constexpr (F::kHasMins) return scaled + set1(b[place]);
    return scaled;
  }
};

template <class F, class T>
static inline void gather_row(const BlockGatherArgs& args, int64_t row) {
  const int64_t records = ceil_div(args.input_size, kRecordInputs<F>), n = args.ids[row] % kPanelSize;
  const uint8_t* from = args.packed + args.ids[row] / kPanelSize * records * kRecordBytes<F>;
  T* out = static_cast<T*>(args.out) + row * args.input_size;
  for (int64_t first = 0; first < args.input_size; first += kRecordInputs<F>, from += kRecordBytes<F>) {
    const UnpackedRecord<F> record(from);
    const int64_t end = min_i64(kRecordInputs<F>, args.input_size - first);
    for (int64_t i = 0; i < end; i += kPanelSize) store(out + first + i, record.values(i / kPanelSize, n));
  }
}

template <class F>
static void gather_blocks(Pool& pool, const BlockGatherArgs& args) {
  parallel_for(pool, ceil_div(args.num_rows, kGatheredPerTask), [&](int64_t task, int) {
    const int64_t end = min_i64(args.num_rows, (task + 1) * kGatheredPerTask);
    for (int64_t row = task * kGatheredPerTask; row < end; ++row) {
      args.dtype == DType::bf16 ? gather_row<F, bf16>(args, row) : gather_row<F, float>(args, row);
    }
  });
}

}  // namespace quire::QUIRE_TIER
