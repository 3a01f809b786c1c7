// Kernels that choose tokens from lines of logits. A line is [vocab_size] float32; lines are `stride` elements apart.
#pragma once

#include "quire/pool.h"
#include "quire/types.h"

namespace quire {

struct LogitLines {
  float* logits;
  int64_t stride;
  int64_t num_lines;
  int64_t vocab_size;  // 1 .. 2 ** 20
};

// One number in [0, 1) per (seed, position), of 53 random bits; streams are independent.
struct UniformArgs {
  const uint64_t* seeds;
  const uint64_t* positions;
  int64_t count;
  uint32_t stream;
  double* uniforms;
};

// A token per line: the likeliest, the lowest id of equals; or a draw where the line has a temperature.
// -1 where the line holds NaN or +inf, or nothing finite.
struct SampleArgs {
  LogitLines lines;          // only read
  const float* temperature;  // per line; 0 = the likeliest. Null = the likeliest of every line, the rest is unused
  const int32_t* top_k;      // 0 = off
  const double* top_p;       // 1 = off
  const float* log_min_p;    // natural logarithm; -inf = off
  const double* uniforms;    // in [0, 1), multiples of 2 ** -53
  int32_t* token_ids;
  float* thresholds;  // the smallest logit / temperature that was kept; -inf = all. Null = not wanted
};

// logits[line, id] of each line's distinct ids: / or * repetition, then - frequency * count - presence (count > 0).
struct PenaltyArgs {
  LogitLines lines;
  const int32_t* line_ids;  // the line of each entry; distinct
  int64_t num_entries;
  const int64_t* starts;   // [num_entries + 1]: entry i has ids[starts[i] .. starts[i + 1])
  const int64_t* ids;
  const float* counts;     // beside ids
  const float* strengths;  // [num_entries, 3]: repetition, frequency, presence
};

// logits[line_ids[i], id] = -inf where bit id of mask i is 0.
struct BitmaskArgs {
  LogitLines lines;
  const int32_t* line_ids;  // the line of each mask; distinct; null = 0, 1, ...
  int64_t num_masks;
  const int32_t* masks;  // [num_masks, ceil(vocab_size / 32)]; bit j of word i is id 32 * i + j
};

// Columns: the given token, then the `num_top` likeliest by falling score and rising id; width = 1 + max(num_top).
// A score is the log-softmax of the line, or the logit itself. Columns a line did not ask for are left alone.
struct LogprobsArgs {
  LogitLines lines;  // only read
  const int32_t* token_ids;
  const int32_t* num_top;
  int64_t width;
  bool is_logits;
  int32_t* ids;    // [num_lines, width]
  float* scores;   // [num_lines, width]; NaN for lines that hold NaN or +inf, or nothing finite
  int32_t* ranks;  // [num_lines]: how many scores reach that of the given token; 0 for NaN
};

struct SamplingKernels {
  void (*uniforms)(const UniformArgs&);
  void (*sample)(Pool&, const SampleArgs&);
  void (*apply_penalties)(Pool&, const PenaltyArgs&);
  void (*apply_bitmask)(Pool&, const BitmaskArgs&);
  void (*logprobs)(Pool&, const LogprobsArgs&);
};

}  // namespace quire
