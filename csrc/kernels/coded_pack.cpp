// Rows of codes into packed weights, once a load, and the numbers of some rows back.
#include "kernels/coded_parts.h"
#include "kernels/coded_tiles.h"

namespace quire::QUIRE_TIER {
namespace {

constexpr int64_t kRowsPerGather = 4;

// Where a pair of inputs begins within a tile.
inline int64_t place_of_pair(Code code, int64_t pair) {
  return (bits_of(code) == 8 ? pair : pair % kHalfPairs) * kPairLanes;
}

// The code of input `i` of a tile, for the output whose numbers begin at `tile`.
inline uint8_t code_at(Code code, const uint8_t* tile, int64_t i) {
  const uint8_t byte = tile[place_of_pair(code, i / 2) + i % 2];
  if (bits_of(code) == 8) return byte;
  return i / 2 < kHalfPairs ? byte & 15 : byte >> 4;
}

inline bool is_finite(float x) { return __builtin_fabsf(x) <= __FLT_MAX__; }

// Columns of 32 inputs of one row; missing ones are zero.
bool pack_row(const CodedPackArgs& args, int64_t row, int64_t output) {
  const int64_t row_bytes = ceil_div(args.input_size * bits_of(args.code), 8), tile_bytes = coded_tile_bytes(args.code);
  const int64_t num_tiles = ceil_div(args.input_size, kTileDepth), depth = kTileDepth * bits_of(args.code) / 8;
  const uint8_t* codes = args.codes + row * args.row_stride;
  uint8_t* tile = args.packed + output / kPanelSize * num_tiles * tile_bytes + output % kPanelSize * 2;
  bool all_finite = true;
  for (int64_t first = 0; first < num_tiles * depth; first += depth, tile += tile_bytes) {
    uint8_t bytes[kTileDepth] = {};
    __builtin_memcpy(bytes, codes + first, static_cast<uint64_t>(min_i64(depth, row_bytes - first)));
    if (bits_of(args.code) == 8) {
      for (int64_t i = 0; i < kTileDepth; ++i) {
        tile[i / 2 * kPairLanes + i % 2] = bytes[i];
        all_finite &= args.code != Code::e4m3 || (bytes[i] & 0x7f) != 0x7f;
      }
      continue;
    }
    for (int64_t pair = 0; pair < kHalfPairs; ++pair) {
      const uint8_t low = bytes[pair], high = bytes[pair + kHalfPairs];
      tile[pair * kPairLanes] = static_cast<uint8_t>((low & 15) | (high & 15) << 4);
      tile[pair * kPairLanes + 1] = static_cast<uint8_t>((low >> 4) | (high & 0xf0));
    }
  }
  const int64_t place = output / kPanelSize * args.num_groups * kPanelSize + output % kPanelSize;
  for (int64_t group = 0; group < args.num_groups; ++group) {
    const float scale = args.scales[row * args.num_groups + group];
    all_finite &= is_finite(scale);
    args.packed_scales[place + group * kPanelSize] = scale;
    if (args.zeros != nullptr) args.packed_zeros[place + group * kPanelSize] = args.zeros[row * args.num_groups + group];
  }
  return all_finite;
}

template <class Codes, class T>
void gather_row(const CodedGatherArgs& args, int64_t i) {
  const int64_t output = args.ids[i], num_tiles = ceil_div(args.input_size, kTileDepth);
  const int64_t group_size = args.group_size == 0 ? args.input_size : args.group_size;
  const int64_t num_groups = ceil_div(args.input_size, group_size);
  constexpr int64_t kTileBytes = coded_tile_bytes(Codes::kCode);
  const uint8_t* tile = args.packed + output / kPanelSize * num_tiles * kTileBytes + output % kPanelSize * 2;
  const int64_t place = output / kPanelSize * num_groups * kPanelSize + output % kPanelSize;
  T* out = static_cast<T*>(args.out) + i * args.input_size;
  for (int64_t first = 0; first < args.input_size; first += kTileDepth, tile += kTileBytes, out += kTileDepth) {
    const int64_t at = place + first / group_size * kPanelSize, n = min_i64(kTileDepth, args.input_size - first);
    const uint8_t zero = args.zeros == nullptr ? 0 : args.zeros[at];
    bf16 values[kTileDepth] = {};
    for (int64_t k = 0; k < n; ++k) values[k].bits = Codes::value(code_at(Codes::kCode, tile, k), zero);
    const F16 scale = set1(args.scales[at]);
    store_n(out, min_i64(16, n), load(values) * scale);
    if (n > 16) store_n(out + 16, n - 16, load(values + 16) * scale);
  }
}

template <class Codes>
void gather(Pool& pool, const CodedGatherArgs& args) {
  parallel_for(pool, ceil_div(args.num_rows, kRowsPerGather), [&](int64_t task, int) {
    const int64_t end = min_i64(args.num_rows, (task + 1) * kRowsPerGather);
    for (int64_t i = task * kRowsPerGather; i < end; ++i) {
      args.dtype == DType::bf16 ? gather_row<Codes, bf16>(args, i) : gather_row<Codes, float>(args, i);
    }
  });
}

}  // namespace

// Tasks are panels, so that no two threads write one cache line.
bool pack_codes(Pool& pool, const CodedPackArgs& args) {
  if (args.num_rows == 0) return true;
  const int64_t first_panel = args.first_row / kPanelSize, end_row = args.first_row + args.num_rows;
  bool all_finite = true;
  parallel_for(pool, ceil_div(end_row, kPanelSize) - first_panel, [&](int64_t task, int) {
    const int64_t begin = (first_panel + task) * kPanelSize, end = min_i64(end_row, begin + kPanelSize);
    for (int64_t output = max_i64(begin, args.first_row); output < end; ++output) {
      if (!pack_row(args, output - args.first_row, output)) __atomic_store_n(&all_finite, false, __ATOMIC_RELAXED);
    }
  });
  return all_finite;
}

void gather_codes(Pool& pool, const CodedGatherArgs& args) {
  switch (args.code) {
    case Code::e4m3: return gather<E4m3Codes>(pool, args);
    case Code::int8: return gather<Int8Codes>(pool, args);
    case Code::int4: return gather<Int4Codes>(pool, args);
    case Code::nf4: return gather<Nf4Codes>(pool, args);
  }
}

}  // namespace quire::QUIRE_TIER
