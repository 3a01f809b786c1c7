// Mixtures of experts, besides their products (grouped.h): the choice of experts, and the sum of their outputs.
//
// A token's experts are ordered by their score, the lower id first among equals. "Rows" are those of all experts, sorted
// by expert, then by token: what grouped products read and write.
#pragma once

#include "quire/pool.h"
#include "quire/types.h"

namespace quire {

constexpr int64_t kMaxExperts = 4096;
constexpr int64_t kMaxChosen = 64;

enum class Scoring : int32_t {
  softmax = 0,            // over all experts
  sigmoid = 1,            // of each logit
  softmax_of_chosen = 2,  // over the logits of those chosen
  sparse_mixer = 3,       // one after the other, over the logits near the largest that is left
};

struct RouteArgs {
  const float* logits;      // [num_tokens][num_experts]
  const float* correction;  // [num_experts], added to the scores for the choice alone; null = none
  int32_t* expert_ids;      // [num_tokens][num_chosen]
  float* weights;           // [num_tokens][num_chosen]
  int32_t* starts;          // [num_experts + 1]: first row of each expert
  int32_t* rows;            // [num_tokens * num_chosen]: token of each row
  int32_t* places;          // [num_tokens][num_chosen]: row of each choice
  int64_t num_tokens;
  int64_t num_experts;        // 1 .. kMaxExperts
  int64_t num_chosen;         // 1 .. num_experts, kMaxChosen
  int64_t num_groups;         // of experts, of equal size; 1 = none
  int64_t num_chosen_groups;  // which hold at least num_chosen experts
  Scoring scoring;
  bool sums_two;       // groups are scored by their two best experts, not by the best
  bool is_normalized;  // weights are divided by their sum
  float scale;         // factor on the weights
  float jitter;        // sparse_mixer: logits count that are within twice this share of the largest
  const float* expert_scales = nullptr;  // [num_experts]: factor on the weights of each expert, at last; null = none
};

// out[t] = sum of weights[t][j] * rows[places[t][j]] in the order of j, + shared[t] (* sigmoid(shared_gate[t])); in
// float32, rounded once.
struct CombineArgs {
  const void* rows;          // [num_tokens * num_chosen][size]
  const int32_t* places;     // [num_tokens][num_chosen]
  const float* weights;      // [num_tokens][num_chosen]; null = ones
  const void* shared;        // [num_tokens][size]; null = none
  const float* shared_gate;  // [num_tokens]; null = none
  void* out;                 // [num_tokens][size]
  int64_t num_tokens;
  int64_t num_chosen;
  int64_t size;
  DType dtype;  // of rows, shared and out: bf16 or f32
};

// out[places[t][j]] = x[t] * weights[t][j]: the rows where the weight belongs to the expert's input.
struct SpreadArgs {
  const void* x;
  int64_t x_stride;  // elements
  const int32_t* places;
  const float* weights;
  void* out;  // [num_tokens * num_chosen][size]
  int64_t num_tokens;
  int64_t num_chosen;
  int64_t size;
  DType dtype;  // bf16 or f32
};

// The rows of a routing sorted by other numbers of the experts, then by token.
struct ArrangeArgs {
  const int32_t* expert_ids;  // [num_tokens][num_chosen]
  const int32_t* slots;       // [num_experts]: other number of each expert, below num_experts
  int32_t* starts;            // [num_experts + 1]: first row of each slot
  int32_t* rows;              // [num_tokens * num_chosen]: token of each row
  int32_t* places;            // [num_tokens][num_chosen]: row of each choice
  int64_t num_tokens;
  int64_t num_experts;
  int64_t num_chosen;
};
void arrange(Pool& pool, const ArrangeArgs& args);

// What is wrong with the indices, or null.
const char* find_fault(const ArrangeArgs& args);
const char* find_fault(const CombineArgs& args);
const char* find_fault(const SpreadArgs& args);

struct MoeKernels {
  void (*route)(Pool&, const RouteArgs&);
  void (*combine)(Pool&, const CombineArgs&);
  void (*spread)(Pool&, const SpreadArgs&);
};

}  // namespace quire
