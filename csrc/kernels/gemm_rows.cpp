// Rows into packed weights, and back: once a load, and for every looked-up embedding.
#include "kernels/gemm_parts.h"

#include "simd/simd.h"

namespace quire::QUIRE_TIER {
namespace {

struct f16 {
  uint16_t bits;
};

inline float float_from_bits(uint32_t bits) {
  float x;
  __builtin_memcpy(&x, &bits, 4);
  return x;
}

inline float value_of(float x) { return x; }
inline float value_of(bf16 x) { return float_from_bits(static_cast<uint32_t>(x.bits) << 16); }
// By integers: subnormal halves are ordinary floats, and must not be flushed on the way.
inline float value_of(f16 x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16, magnitude = x.bits & 0x7fffu;
  if (magnitude >= 0x7c00u) return float_from_bits(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
  if (magnitude >= 0x400u) return float_from_bits(sign | ((magnitude << 13) + (112u << 23)));
  const float tiny = static_cast<float>(magnitude) * 0x1p-24f;
  return sign ? -tiny : tiny;
}

// Element of input i and output n within a tile.
template <class T>
constexpr int64_t place(int64_t i, int64_t n);
template <>
constexpr int64_t place<bf16>(int64_t i, int64_t n) {
  return i / 2 * 32 + n * 2 + i % 2;
}
template <>
constexpr int64_t place<float>(int64_t i, int64_t n) {
  return i / 2 * 32 + i % 2 * 16 + n;
}

inline bool is_finite(bf16 x) { return (x.bits & 0x7f80u) != 0x7f80u; }
inline bool is_finite(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, 4);
  return (bits & 0x7f800000u) != 0x7f800000u;
}

inline void convert(const bf16* rows, int64_t n, bf16* tile) {
  __builtin_memcpy(tile, rows, n * sizeof(bf16));
}
template <class From, class To>
inline void convert(const From* rows, int64_t n, To* values) {
  float wide[kTileDepth] = {};
  for (int64_t i = 0; i < n; ++i) wide[i] = value_of(rows[i]);
  store(values, load(wide));
  store(values + 16, load(wide + 16));
}

template <class From, class To>
bool pack_panel(const PackArgs& args, int64_t panel) {
  const int64_t num_tiles = ceil_div(args.input_size, kTileDepth);
  const int64_t first = max_i64(args.first_row, panel * kPanelSize);
  const int64_t last = min_i64(args.first_row + args.num_rows, (panel + 1) * kPanelSize);
  To* packed = static_cast<To*>(args.packed) + panel * num_tiles * kTileSize;
  bool all_finite = true;
  for (int64_t tile = 0; tile < num_tiles; ++tile, packed += kTileSize) {
    const int64_t n = min_i64(kTileDepth, args.input_size - tile * kTileDepth);
    for (int64_t row = first; row < last; ++row) {
      const From* from = static_cast<const From*>(args.rows) + (row - args.first_row) * args.row_stride;
      To values[kTileDepth] = {};
      convert(from + tile * kTileDepth, n, values);
      To* to = packed + place<To>(0, row % kPanelSize);
      for (int64_t i = 0; i < kTileDepth; ++i) {
        all_finite &= is_finite(values[i]);
        to[place<To>(i, 0)] = values[i];
      }
    }
  }
  return all_finite;
}

using PackPanel = bool (*)(const PackArgs&, int64_t);

template <class To>
PackPanel pack_panel_of(RowType type) {
  if (type == RowType::bf16) return pack_panel<bf16, To>;
  return type == RowType::f16 ? pack_panel<f16, To> : pack_panel<float, To>;
}

template <class T>
void read_row(const ReadRowsArgs& args, int64_t i) {
  const int64_t row = args.ids ? args.ids[i] : args.first_row + i;
  const int64_t num_tiles = ceil_div(args.input_size, kTileDepth);
  const T* tile = static_cast<const T*>(args.packed) + row / kPanelSize * num_tiles * kTileSize;
  T* out = static_cast<T*>(args.out) + i * args.input_size;
  tile += place<T>(0, row % kPanelSize);
  for (int64_t first = 0; first < args.input_size; first += kTileDepth, tile += kTileSize, out += kTileDepth) {
    const int64_t n = min_i64(kTileDepth, args.input_size - first);
    for (int64_t k = 0; k < n; ++k) out[k] = tile[place<T>(k, 0)];
  }
}

}  // namespace

bool pack_rows(Pool& pool, const PackArgs& args) {
  if (args.num_rows == 0) return true;
  const PackPanel pack =
      args.packed_dtype == DType::bf16 ? pack_panel_of<bf16>(args.row_type) : pack_panel_of<float>(args.row_type);
  const int64_t first = args.first_row / kPanelSize;
  const int64_t num_panels = ceil_div(args.first_row + args.num_rows, kPanelSize) - first;
  int32_t bad_panels = 0;
  parallel_for(pool, num_panels, [&](int64_t task, int) {
    if (!pack(args, first + task)) __atomic_fetch_add(&bad_panels, 1, __ATOMIC_RELAXED);
  });
  return bad_panels == 0;
}

void read_rows(Pool& pool, const ReadRowsArgs& args) {
  constexpr int64_t kRowsPerTask = 4;
  parallel_for(pool, ceil_div(args.num_rows, kRowsPerTask), [&](int64_t task, int) {
    const int64_t end = min_i64(args.num_rows, (task + 1) * kRowsPerTask);
    for (int64_t row = task * kRowsPerTask; row < end; ++row) {
      args.dtype == DType::bf16 ? read_row<bf16>(args, row) : read_row<float>(args, row);
    }
  });
}

}  // namespace quire::QUIRE_TIER
