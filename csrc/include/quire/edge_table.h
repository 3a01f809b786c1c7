// The edges of an automaton's branching states: (state, token) -> state, by extendible hashing (Fagin et al. 1979). It
// grows a bucket at a time, so that no insertion has to move the whole table.
#pragma once

#include <cstdint>
#include <vector>

#include "quire/paged.h"

namespace quire {

constexpr int32_t kNone = -1;

struct Edge {
  int32_t state;  // where it begins; kNone = a free slot
  int32_t token;
  int32_t child;
  int32_t next;  // token of the state's next edge; kNone = it is the last one
};

class EdgeTable {
 public:
  EdgeTable();

  // Null where there is none; valid until the next insertion.
  Edge* find(int32_t state, int32_t token);

  // There must be no such edge yet.
  void insert(const Edge& edge);

  int64_t num_bytes() const {
    return buckets_.num_bytes() + static_cast<int64_t>(directory_.capacity() * sizeof(directory_[0]));
  }

 private:
  static constexpr int kSlots = 64, kMostUsed = 48;
  struct Bucket {
    int32_t depth;  // how many leading bits of their hashes its edges share
    int32_t num_used;
    Edge slots[kSlots];
  };

  int32_t bucket_of(uint64_t hash) const { return directory_[depth_ ? hash >> (64 - depth_) : 0]; }
  int32_t add_bucket(int32_t depth);
  void split(uint64_t hash);

  std::vector<int32_t> directory_;  // [1 << depth_] bucket of the hashes that begin with these bits
  int depth_ = 0;
  Paged<Bucket, 0> buckets_;
};

}  // namespace quire
