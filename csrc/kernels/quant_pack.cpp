// Quantises and packs weights when a model is loaded, and looks rows up in the packed form.
#include "kernels/quant_pack.h"

#include "kernels/quant_rows.h"

namespace quire::QUIRE_TIER {
namespace {

constexpr int64_t kMaxGroupSize = 128;
constexpr int64_t kGatherRowsPerTask = 4;

// Tasks are panels, so that no two threads write one cache line. fn(row of the weight, output, thread) says whether
// the row was finite.
template <class Fn>
bool for_each_row(Pool& pool, const QuantPackArgs& args, const Fn& fn) {
  if (args.num_rows == 0) return true;
  const int64_t first_panel = args.first_row / kPanelSize;
  const int64_t end_row = args.first_row + args.num_rows;
  bool all_finite = true;
  parallel_for(pool, ceil_div(end_row, kPanelSize) - first_panel, [&](int64_t task, int thread) {
    const int64_t begin = (first_panel + task) * kPanelSize;
    const int64_t end = min_i64(end_row, begin + kPanelSize);
    for (int64_t output = max_i64(begin, args.first_row); output < end; ++output) {
      if (!fn(output - args.first_row, output, thread)) __atomic_store_n(&all_finite, false, __ATOMIC_RELAXED);
    }
  });
  return all_finite;
}

template <class T>
const T* row_of(const QuantPackArgs& args, int64_t row) {
  return static_cast<const T*>(args.rows) + row * args.row_stride;
}

template <class T>
bool pack_int8_row(const QuantPackArgs& args, const T* row, int64_t output, int8_t* q) {
  const int64_t padded_size = round_up(args.input_size, kInt8TileK);
  const RowScale scale = row_scale(row, args.input_size);
  int32_t ignored_sum;
  quantize_row(row, args.input_size, scale, q, padded_size, padded_size, 1, &ignored_sum);
  static_cast<float*>(args.scales)[output] = scale.scale;
  uint8_t* out = args.packed + output / kPanelSize * padded_size * kPanelSize + output % kPanelSize * 4;
  for (int64_t k = 0; k < padded_size; k += 4, out += 64) {
    uint32_t quad;
    __builtin_memcpy(&quad, q + k, 4);
    quad ^= 0x80808080u;  // + 128
    __builtin_memcpy(out, &quad, 4);
  }
  return scale.is_finite;
}

// The divisors of the largest magnitude that are tried as scales. Below 8 every value fits; above, the largest ones
// are cut to 7 or -8 and the others get finer steps.
constexpr float kDivisors[] = {7.0f, 7.5f, 8.0f, 8.5f, 9.0f, 9.5f, 10.0f};

static inline F16 nearest_code(F16 x) { return min(max(round_half_even(x), set1(-8.0f)), set1(7.0f)); }

// The scale of a group: of the candidates, both signs of each, the one whose codes q leave the least squared error
// with their own best scale, sum(v q) / sum(q q). The error is then sum(v v) - sum(v q) ** 2 / sum(q q).
float best_scale(const F16* v, int64_t vectors) {
  float best_gain = -1.0f, best = 0.0f;
  for (const float divisor : kDivisors) {
    for (int sign = 1; sign >= -1; sign -= 2) {
      const float inverse = static_cast<float>(sign) * divisor;
      F16 products = zero(), squares = zero();
      for (int64_t i = 0; i < vectors; ++i) {
        const F16 q = nearest_code(v[i] * set1(inverse));
        products = products + v[i] * q;
        squares = squares + q * q;
      }
      const float product = hsum(products), square = hsum(squares);
      const float scale = product / square;  // some q is not 0: the largest v is 1 or -1
      const float gain = product * scale;
      if (gain > best_gain) {
        best_gain = gain;
        best = scale;
      }
    }
  }
  return best;
}

// The codes of one group, q + 8 each, and its scale.
template <class T>
bf16 quantize_group(const T* w, int64_t size, int64_t vectors, float absmax, int8_t* codes) {
  F16 v[kMaxGroupSize / 16];
  for (int64_t i = 0; i < vectors; ++i) {
    v[i] = load_n(w + 16 * i, max_i64(0, min_i64(16, size - 16 * i))) / set1(absmax);
  }
  bf16 stored[16];
  store(stored, set1(best_scale(v, vectors) * absmax));
  const F16 scale = load(stored) / set1(absmax);
  for (int64_t i = 0; i < vectors; ++i) store_int8(codes + 16 * i, nearest_code(v[i] / scale) + set1(8.0f));
  return stored[0];
}

template <class T>
bool pack_int4_row(const QuantPackArgs& args, const T* row, int64_t output) {
  const int64_t num_groups = ceil_div(args.input_size, args.group_size), units = args.group_size / kInt4UnitK;
  uint8_t* out = args.packed + output / kPanelSize * int4_panel_bytes(args.input_size) + output % kPanelSize * 4;
  bf16* scales = static_cast<bf16*>(args.scales) + output / kPanelSize * num_groups * kPanelSize + output % kPanelSize;
  bool all_finite = true;
  for (int64_t g = 0; g < num_groups; ++g) {
    const T* w = row + g * args.group_size;
    const int64_t size = min_i64(args.group_size, args.input_size - g * args.group_size);
    const RowScale range = row_scale(w, size);
    int8_t codes[kMaxGroupSize];
    bf16 stored[16] = {};
    if (range.scale > 0.0f) {
      stored[0] = quantize_group(w, size, args.group_size / 16, range.scale * 127.0f, codes);
    } else {
      __builtin_memset(codes, 8, sizeof(codes));
      store(stored, set1(range.scale));
    }
    scales[g * kPanelSize] = stored[0];
    all_finite = all_finite && range.is_finite;
    for (int64_t u = 0; u < units; ++u, out += kInt4UnitBytes) {
      for (int64_t r = 0; r < 4; ++r) {
        uint32_t low, high;
        __builtin_memcpy(&low, codes + u * kInt4UnitK + 4 * r, 4);
        __builtin_memcpy(&high, codes + u * kInt4UnitK + 16 + 4 * r, 4);
        low |= high << 4;
        __builtin_memcpy(out + 64 * r, &low, 4);
      }
    }
  }
  return all_finite;
}

// fn(k, 16 numbers) writes 16 dequantised weights of one output.
template <class T, class Dequantize>
void gather_rows(Pool& pool, const QuantGatherArgs& args, const Dequantize& dequantize) {
  parallel_for(pool, ceil_div(args.num_rows, kGatherRowsPerTask), [&](int64_t task, int) {
    const int64_t end = min_i64(args.num_rows, (task + 1) * kGatherRowsPerTask);
    for (int64_t i = task * kGatherRowsPerTask; i < end; ++i) {
      T* out = static_cast<T*>(args.out) + i * args.input_size;
      for (int64_t k = 0; k < args.input_size; k += 16) {
        store_n(out + k, min_i64(16, args.input_size - k), dequantize(args.ids[i], k));
      }
    }
  });
}

template <class Dequantize>
void gather(Pool& pool, const QuantGatherArgs& args, const Dequantize& dequantize) {
  if (args.dtype == DType::bf16) {
    gather_rows<bf16>(pool, args, dequantize);
  } else {
    gather_rows<float>(pool, args, dequantize);
  }
}

}  // namespace

bool pack_int8(Pool& pool, const QuantPackArgs& args) {
  const int64_t padded_size = round_up(args.input_size, kInt8TileK);
  return for_each_row(pool, args, [&](int64_t row, int64_t output, int thread) {
    int8_t* q = static_cast<int8_t*>(pool.scratch(thread, padded_size));
    return args.dtype == DType::bf16 ? pack_int8_row(args, row_of<bf16>(args, row), output, q)
                                     : pack_int8_row(args, row_of<float>(args, row), output, q);
  });
}

bool pack_int4(Pool& pool, const QuantPackArgs& args) {
  return for_each_row(pool, args, [&](int64_t row, int64_t output, int) {
    return args.dtype == DType::bf16 ? pack_int4_row(args, row_of<bf16>(args, row), output)
                                     : pack_int4_row(args, row_of<float>(args, row), output);
  });
}

void gather_int8(Pool& pool, const QuantGatherArgs& args) {
  const int64_t panel_bytes = int8_panel_bytes(args.input_size);
  gather(pool, args, [&](int64_t output, int64_t k) {
    const uint8_t* w = args.packed + output / kPanelSize * panel_bytes + output % kPanelSize * 4 + k * kPanelSize;
    int32_t q[16];
    for (int i = 0; i < 16; ++i) q[i] = static_cast<int32_t>(w[i / 4 * 64 + i % 4]) - 128;
    return load_int32(q) * set1(static_cast<const float*>(args.scales)[output]);
  });
}

void gather_int4(Pool& pool, const QuantGatherArgs& args) {
  const int64_t panel_bytes = int4_panel_bytes(args.input_size);
  const int64_t num_groups = ceil_div(args.input_size, args.group_size);
  gather(pool, args, [&](int64_t output, int64_t k) {
    const uint8_t* w = args.packed + output / kPanelSize * panel_bytes + output % kPanelSize * 4;
    w += k / kInt4UnitK * kInt4UnitBytes;
    const int shift = k % kInt4UnitK == 0 ? 0 : 4;
    int32_t q[16];
    for (int i = 0; i < 16; ++i) q[i] = (w[i / 4 * 64 + i % 4] >> shift & 15) - 8;
    const bf16* scales = static_cast<const bf16*>(args.scales) + output / kPanelSize * num_groups * kPanelSize;
    bf16 scale[16] = {};
    scale[0] = scales[k / args.group_size * kPanelSize + output % kPanelSize];
    float wide[16];
    store(wide, load(scale));
    return load_int32(q) * set1(wide[0]);
  });
}

}  // namespace quire::QUIRE_TIER
