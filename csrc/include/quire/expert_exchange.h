// Experts that several replicas share: tokens go to the ranks that have their experts, and the results come back.
//
// The group has all ranks of all replicas, replica by replica; the ranks of one have the same tokens. All ranks make the
// same calls in the same order; numbers of tokens differ, and are read when a call runs, so that steps can be replayed.
// "Global rows" are the choices of all tokens sorted by slot, then by replica, then by token: the same on every rank.
#pragma once

#include <cstdint>

#include "quire/communicator.h"
#include "quire/pool.h"

namespace quire {

// Where the slots of other replicas' tokens are looked for: a group's place in the order of slots.
struct ExchangeGroup {
  Communicator* communicator;
  int64_t ranks_per_replica;
  int64_t num_slots;
  int32_t firsts[kMaxRanks + 1];  // first slot of each rank; the last is num_slots

  int64_t num_replicas() const { return communicator->size() / ranks_per_replica; }
  int64_t replica() const { return communicator->rank() / ranks_per_replica; }
};

// Bytes that the slots of so many choices take beside the first vectors.
int64_t exchange_head_bytes(int64_t num_choices);

// rows = the vectors for the experts of this rank, by slot; those of one slot in the order of global rows.
struct DispatchArgs {
  ExchangeGroup group;
  const char* x;              // own vectors
  int64_t x_stride;           // bytes
  int64_t row_bytes;
  const int32_t* expert_ids;  // [num_tokens][num_chosen]
  const int32_t* slots;       // [num_slots]: of each expert; null = its own number
  const int32_t* x_rows;      // [num_tokens][num_chosen]: row of x of each choice; null = that of its token
  int64_t num_tokens;
  int64_t num_chosen;
  int64_t num_x_rows;
  char* rows;       // [num_rows][row_bytes]
  int64_t num_rows; // room
  int32_t* starts;  // [slots of this rank + 1]: first of its rows for each slot
  int32_t* extent;  // [3]: first and end of these among the global rows, and how many there are
  int32_t* global;  // [num_tokens][num_chosen]: global row of each own choice
};
const char* find_fault(const DispatchArgs& args);
void dispatch(Pool& pool, const DispatchArgs& args);

// out[places[i]] = the result for own choice i, wherever it was computed.
struct CollectArgs {
  ExchangeGroup group;
  const char* rows;       // [num_rows][row_bytes]: what this rank has computed
  int64_t num_rows;
  int64_t row_bytes;
  const int32_t* extent;  // as of `dispatch`
  const int32_t* global;  // [num_choices], likewise
  const int32_t* places;  // [num_choices]: row of `out` of each
  int64_t num_choices;
  char* out;              // [num_choices][row_bytes]
};
const char* find_fault(const CollectArgs& args);
void collect(Pool& pool, const CollectArgs& args);

}  // namespace quire
