#include "quire/edge_table.h"

#include <random>

namespace quire {
namespace {

// Nobody outside the process can choose tokens whose edges meet in one bucket.
uint64_t process_seed() {
  static const uint64_t seed = [] {
    std::random_device device;
    return static_cast<uint64_t>(device()) << 32 | device();
  }();
  return seed;
}

inline uint64_t hash_of(uint64_t seed, int32_t state, int32_t token) {
  uint64_t x = (static_cast<uint64_t>(static_cast<uint32_t>(state)) << 32 | static_cast<uint32_t>(token)) ^ seed;
  x = (x ^ x >> 32) * 0xd6e8feb86659fd93u;
  x = (x ^ x >> 29) * 0x9e3779b97f4a7c15u;
  return x ^ x >> 32;
}

const uint64_t kSeed = process_seed();

}  // namespace

EdgeTable::EdgeTable() { directory_.push_back(add_bucket(0)); }

int32_t EdgeTable::add_bucket(int32_t depth) {
  const int32_t bucket = buckets_.append(Bucket{});
  buckets_[bucket].depth = depth;
  for (Edge& slot : buckets_[bucket].slots) slot.state = kNone;
  return bucket;
}

Edge* EdgeTable::find(int32_t state, int32_t token) {
  const uint64_t hash = hash_of(kSeed, state, token);
  Bucket& bucket = buckets_[bucket_of(hash)];
  for (int i = hash & (kSlots - 1);; i = (i + 1) & (kSlots - 1)) {
    Edge& slot = bucket.slots[i];
    if (slot.state == kNone) return nullptr;  // there always is a free one
    if (slot.state == state && slot.token == token) return &slot;
  }
}

void EdgeTable::insert(const Edge& edge) {
  const uint64_t hash = hash_of(kSeed, edge.state, edge.token);
  while (buckets_[bucket_of(hash)].num_used == kMostUsed) split(hash);
  Bucket& bucket = buckets_[bucket_of(hash)];
  int i = hash & (kSlots - 1);
  while (bucket.slots[i].state != kNone) i = (i + 1) & (kSlots - 1);
  bucket.slots[i] = edge;
  ++bucket.num_used;
}

// Of the edges in the bucket of `hash`, those whose next bit is 1 move to a bucket of their own.
void EdgeTable::split(uint64_t hash) {
  const int32_t old = bucket_of(hash);
  const int32_t depth = buckets_[old].depth + 1;
  if (depth > depth_) {
    std::vector<int32_t> doubled(directory_.size() * 2);
    for (size_t i = 0; i < doubled.size(); ++i) doubled[i] = directory_[i / 2];
    directory_.swap(doubled);
    ++depth_;
  }
  const Bucket full = buckets_[old];
  const int32_t ones = add_bucket(depth);
  buckets_[old].depth = depth;
  buckets_[old].num_used = 0;
  for (Edge& slot : buckets_[old].slots) slot.state = kNone;
  const size_t span = directory_.size() >> (depth - 1);  // entries that led to the full bucket
  const size_t first = (hash >> (64 - depth_)) / span * span;
  for (size_t i = first + span / 2; i < first + span; ++i) directory_[i] = ones;
  for (const Edge& edge : full.slots) {
    if (edge.state != kNone) insert(edge);
  }
}

}  // namespace quire
