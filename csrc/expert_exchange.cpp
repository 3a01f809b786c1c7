#include "quire/expert_exchange.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

namespace quire {
namespace {

constexpr int64_t kLargeBytes = 256 << 10;  // from here on several threads copy
constexpr int64_t kMaxReplicas = kMaxRanks;

int64_t to_line(int64_t bytes) { return (bytes + kCacheLine - 1) / kCacheLine * kCacheLine; }

// Begins each replica's part of the first round: its slots follow, then vectors. Later rounds have vectors alone.
struct alignas(kCacheLine) Head {
  int64_t num_choices;
  int64_t num_vectors;
};

// What one replica sends, and how far that is.
struct Sender {
  const Head* head;
  int64_t num_vectors;
  int64_t num_first;  // vectors of the first round
  int64_t num_choices;
};

// A row for an expert of this rank: vector `from` of its replica goes to `to`.
struct Move {
  int32_t from, to;
};

int64_t part_bytes(const ExchangeGroup& group) {
  return group.communicator->capacity() / group.num_replicas() / kCacheLine * kCacheLine;
}

int64_t num_in_first(const ExchangeGroup& group, int64_t num_choices, int64_t row_bytes) {
  const int64_t left = part_bytes(group) - exchange_head_bytes(num_choices);
  if (left < 0) throw std::runtime_error("a step has more choices of experts than the exchange has room for");
  return left / row_bytes;
}

template <class Body>
void for_each(Pool& pool, int64_t num, int64_t bytes, const Body& body) {
  const int64_t num_parts = num * bytes < kLargeBytes ? 1 : min_i64(num, 4 * pool.num_threads());
  const auto part_of = [&](int64_t part) {
    for (int64_t i = num * part / num_parts; i < num * (part + 1) / num_parts; ++i) body(i);
  };
  if (num_parts == 1) return part_of(0);
  const auto task = [](void* context, int64_t part, int) {
    (*static_cast<const decltype(part_of)*>(context))(part);
  };
  pool.run(num_parts, task, const_cast<void*>(static_cast<const void*>(&part_of)));
}

int32_t slot_of(const DispatchArgs& args, int64_t choice) {
  const int32_t expert = args.expert_ids[choice];
  return args.slots == nullptr ? expert : args.slots[expert];
}

// Own vectors begin .. begin + num - 1, in the order of choices where each has its own.
void write_vectors(Pool& pool, const DispatchArgs& args, int64_t begin, int64_t num, char* to) {
  for_each(pool, num, args.row_bytes, [&](int64_t i) {
    const int64_t row = args.x_rows == nullptr ? begin + i : args.x_rows[begin + i];
    std::memcpy(to + i * args.row_bytes, args.x + row * args.x_stride, args.row_bytes);
  });
}

// The global rows, from what all replicas have sent: starts, extent and own rows of `args`; for each replica the moves.
void sort_choices(const DispatchArgs& args, const std::vector<Sender>& senders, std::vector<int32_t>& next,
                  std::vector<std::vector<Move>>& moves) {
  const ExchangeGroup& group = args.group;
  const int rank = group.communicator->rank();
  next.assign(static_cast<std::size_t>(group.num_slots) + 1, 0);
  for (const Sender& sender : senders) {
    const auto* slots = reinterpret_cast<const int32_t*>(sender.head + 1);
    for (int64_t i = 0; i < sender.num_choices; ++i) {
      if (slots[i] < 0 || slots[i] >= group.num_slots) throw std::runtime_error("a replica named a slot that is not there");
      ++next[slots[i] + 1];
    }
  }
  for (int64_t slot = 0; slot < group.num_slots; ++slot) next[slot + 1] += next[slot];
  const int32_t first_slot = group.firsts[rank], end_slot = group.firsts[rank + 1];
  const int32_t first = next[first_slot], end = next[end_slot];
  if (end - first > args.num_rows) throw std::runtime_error("more rows came for this rank than the step has room for");
  for (int32_t slot = first_slot; slot <= end_slot; ++slot) args.starts[slot - first_slot] = next[slot] - first;
  args.extent[0] = first, args.extent[1] = end, args.extent[2] = next[group.num_slots];
  for (std::size_t replica = 0; replica < senders.size(); ++replica) {
    const Sender& sender = senders[replica];
    const auto* slots = reinterpret_cast<const int32_t*>(sender.head + 1);
    const int64_t choices_of_vector = sender.num_choices == sender.num_vectors ? 1 : args.num_chosen;
    const bool is_own = static_cast<int64_t>(replica) == group.replica();
    moves[replica].clear();
    for (int64_t i = 0; i < sender.num_choices; ++i) {
      const int32_t row = next[slots[i]]++;
      if (is_own) args.global[i] = row;
      if (row >= first && row < end) moves[replica].push_back({static_cast<int32_t>(i / choices_of_vector), row - first});
    }
  }
}

}  // namespace

int64_t exchange_head_bytes(int64_t num_choices) {
  return static_cast<int64_t>(sizeof(Head)) + to_line(num_choices * static_cast<int64_t>(sizeof(int32_t)));
}

const char* find_fault(const DispatchArgs& args) {
  for (int64_t i = 0; i < args.num_tokens * args.num_chosen; ++i) {
    if (args.expert_ids[i] < 0 || args.expert_ids[i] >= args.group.num_slots) return "expert_ids names one that is not there";
    if (args.x_rows != nullptr && (args.x_rows[i] < 0 || args.x_rows[i] >= args.num_x_rows)) {
      return "x_rows names one that x lacks";
    }
  }
  for (int64_t expert = 0; args.slots != nullptr && expert < args.group.num_slots; ++expert) {
    if (args.slots[expert] < 0 || args.slots[expert] >= args.group.num_slots) return "slots names one that is not there";
  }
  return nullptr;
}

void dispatch(Pool& pool, const DispatchArgs& args) {
  const ExchangeGroup& group = args.group;
  Communicator& communicator = *group.communicator;
  const BusyTime busy(&communicator);
  const int64_t part = part_bytes(group), num_later = part / args.row_bytes, num_replicas = group.num_replicas();
  const bool is_sender = communicator.rank() % group.ranks_per_replica == 0;
  const int64_t num_choices = args.num_tokens * args.num_chosen;
  const int64_t num_vectors = args.x_rows == nullptr ? args.num_tokens : num_choices;
  char* buffer = communicator.begin("a dispatch of tokens to experts");
  if (is_sender) {
    communicator.wait_for_readers();
    char* own = buffer + group.replica() * part;
    const int64_t num = min_i64(num_vectors, num_in_first(group, num_choices, args.row_bytes));
    *reinterpret_cast<Head*>(own) = {num_choices, num_vectors};
    auto* slots = reinterpret_cast<int32_t*>(own + sizeof(Head));
    for (int64_t i = 0; i < num_choices; ++i) slots[i] = slot_of(args, i);
    const int64_t head_bytes = exchange_head_bytes(num_choices);
    write_vectors(pool, args, 0, num, own + head_bytes);
    const int64_t bytes = head_bytes + num * args.row_bytes;
    communicator.wrote(group.replica() * part, bytes, 1, bytes);
  }
  communicator.arrive();
  communicator.wait_for_all();

  thread_local std::vector<Sender> senders;
  thread_local std::vector<int32_t> next;
  thread_local std::vector<std::vector<Move>> moves;
  thread_local std::vector<std::size_t> done;
  senders.clear();
  moves.resize(static_cast<std::size_t>(num_replicas));
  int64_t num_rounds = 1;
  for (int64_t replica = 0; replica < num_replicas; ++replica) {
    const Head* head = reinterpret_cast<const Head*>(buffer + replica * part);
    const int64_t num_first = num_in_first(group, head->num_choices, args.row_bytes);
    senders.push_back({head, head->num_vectors, num_first, head->num_choices});
    num_rounds = max_i64(num_rounds, 1 + (max_i64(0, head->num_vectors - num_first) + num_later - 1) / num_later);
  }
  sort_choices(args, senders, next, moves);

  done.assign(static_cast<std::size_t>(num_replicas), 0);
  for (int64_t round = 0; round < num_rounds; ++round) {
    // Vectors begin .. begin + num - 1 of a sender are in this round.
    const auto range_of = [&](const Sender& sender) {
      const int64_t begin = round == 0 ? 0 : sender.num_first + (round - 1) * num_later;
      const int64_t most = round == 0 ? sender.num_first : num_later;
      return std::pair<int64_t, int64_t>{begin, max_i64(0, min_i64(most, sender.num_vectors - begin))};
    };
    if (round > 0) {
      buffer = communicator.begin("a dispatch of tokens to experts");
      if (is_sender) {
        communicator.wait_for_readers();
        const auto [begin, num] = range_of(senders[static_cast<std::size_t>(group.replica())]);
        write_vectors(pool, args, begin, num, buffer + group.replica() * part);
        communicator.wrote(group.replica() * part, num * args.row_bytes, 1, num * args.row_bytes);
      }
      communicator.arrive();
      communicator.wait_for_all();
    }
    for (int64_t replica = 0; replica < num_replicas; ++replica) {
      const auto number = static_cast<std::size_t>(replica);
      const auto [begin, num] = range_of(senders[number]);
      const int64_t skipped = round == 0 ? exchange_head_bytes(senders[number].num_choices) : 0;
      const char* vectors = buffer + replica * part + skipped - begin * args.row_bytes;
      const Move* first = moves[number].data() + done[number];
      const Move* last = moves[number].data() + moves[number].size();
      const int64_t end = begin + num;
      const Move* stop = std::partition_point(first, last, [end](const Move& move) { return move.from < end; });
      for_each(pool, stop - first, args.row_bytes, [&](int64_t i) {
        std::memcpy(args.rows + first[i].to * args.row_bytes, vectors + first[i].from * args.row_bytes, args.row_bytes);
      });
      done[number] += static_cast<std::size_t>(stop - first);
    }
  }
}

const char* find_fault(const CollectArgs& args) {
  const int32_t first = args.extent[0], end = args.extent[1], total = args.extent[2];
  if (first < 0 || end < first || total < end || end - first > args.num_rows) return "extent is not that of these rows";
  for (int64_t i = 0; i < args.num_choices; ++i) {
    if (args.global[i] < 0 || args.global[i] >= total) return "global names a row that is not there";
    if (args.places[i] < 0 || args.places[i] >= args.num_choices) return "places names a row past the last";
  }
  return nullptr;
}

void collect(Pool& pool, const CollectArgs& args) {
  Communicator& communicator = *args.group.communicator;
  const BusyTime busy(&communicator);
  const int64_t bytes = args.row_bytes, most = communicator.capacity() / bytes;
  const int64_t first = args.extent[0], end = args.extent[1], total = args.extent[2];
  for (int64_t begin = 0; begin < total; begin += most) {
    const int64_t stop = min_i64(begin + most, total);
    const int64_t own_begin = min_i64(max_i64(first, begin), stop), own_end = max_i64(min_i64(end, stop), own_begin);
    char* buffer = communicator.begin("a gather of experts' results");
    communicator.wait_for_readers();
    for_each(pool, own_end - own_begin, bytes, [&](int64_t i) {
      std::memcpy(buffer + (own_begin - begin + i) * bytes, args.rows + (own_begin - first + i) * bytes, bytes);
    });
    communicator.wrote((own_begin - begin) * bytes, bytes, own_end - own_begin, bytes);
    communicator.arrive();
    communicator.wait_for_all();
    for_each(pool, args.num_choices, bytes, [&](int64_t i) {
      const int64_t row = args.global[i];
      if (row >= begin && row < stop) std::memcpy(args.out + args.places[i] * bytes, buffer + (row - begin) * bytes, bytes);
    });
  }
}

}  // namespace quire
