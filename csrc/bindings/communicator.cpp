#include "quire/communicator.h"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "bindings/step_graph.h"
#include "quire/expert_exchange.h"

namespace quire {

namespace {

constexpr int64_t kMaxCapacity = int64_t{1} << 34;

Communicator* checked(Communicator& group, int64_t row_bytes) {
  if (row_bytes > group.capacity()) throw nb::value_error("a row is larger than the buffer");
  return &group;
}

int checked_rank(const Communicator& group, int rank, int lowest = 0) {
  if (rank < lowest || rank >= group.size()) throw nb::value_error("no such rank");
  return rank;
}

// The group of an exchange of experts' rows; `firsts` are the first slot of each rank, and how many there are.
ExchangeGroup exchange_group(Communicator& communicator, int64_t ranks_per_replica, const std::vector<int32_t>& firsts) {
  if (ranks_per_replica < 1 || communicator.size() % ranks_per_replica) throw nb::value_error("ranks_per_replica");
  if (static_cast<int>(firsts.size()) != communicator.size() + 1) throw nb::value_error("one part for each rank");
  if (firsts.front() != 0 || !std::is_sorted(firsts.begin(), firsts.end())) throw nb::value_error("firsts");
  ExchangeGroup group{&communicator, ranks_per_replica, firsts.back(), {}};
  std::copy(firsts.begin(), firsts.end(), group.firsts);
  return group;
}

}  // namespace

void bind_communicator(nb::module_& m) {
  m.attr("MAX_RANKS") = kMaxRanks;
  m.attr("MAIL_SLOTS") = kMailSlots;
  m.attr("MAIL_BYTES") = kMaxMailBytes;
  m.def("region_bytes", &Communicator::region_bytes);
  nb::class_<Communicator>(m, "Communicator")
      .def("__init__",
           [](Communicator* self, int fd, int rank, int size, int64_t capacity, int64_t spin_us, int64_t timeout_us,
              int first_rank) {
             if (size < 1 || size > kMaxRanks || rank < 0 || rank >= size) throw nb::value_error("rank");
             const int64_t least = kCacheLine * size * size;
             if (capacity < least || capacity > kMaxCapacity || capacity % kCacheLine) throw nb::value_error("capacity");
             if (spin_us < 0 || timeout_us < 1) throw nb::value_error("times");
             new (self) Communicator(fd, rank, size, capacity, spin_us, timeout_us, first_rank);
           })
      .def("connect",
           [](Communicator& self, const std::vector<int>& hosts, const std::vector<int>& leads,
              const std::vector<std::pair<int, int>>& sources, int64_t timeout_us) {
             if (static_cast<int>(hosts.size()) != self.size()) throw nb::value_error("one machine for each rank");
             const auto has = [&](int host) { return std::find(hosts.begin(), hosts.end(), host) != hosts.end(); };
             for (const int host : hosts) {
               if (host < 0 || host >= static_cast<int>(leads.size())) throw nb::value_error("no such machine");
             }
             for (int host = 0; host < static_cast<int>(leads.size()); ++host) {
               if (!has(host) || (leads[host] < 0) != (host == hosts[self.rank()])) throw nb::value_error("leads");
             }
             for (const auto& [rank, fd] : sources) {
               if (hosts[checked_rank(self, rank)] == hosts[self.rank()] || fd < 0) throw nb::value_error("sources");
             }
             if (self.links() != nullptr || timeout_us < 1) throw nb::value_error("connected once");
             self.connect(std::make_unique<HostLinks>(self, hosts, leads, sources, timeout_us));
           })
      .def("silence_ms",
           [](const Communicator& self, int rank) {
             return self.links() == nullptr ? 0 : self.links()->silence_ms(checked_rank(self, rank));
           })
      .def_prop_ro("aborted", &Communicator::aborted)
      .def_prop_ro("busy_ns", &Communicator::busy_ns)
      .def("abort", &Communicator::abort, nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("is_awaited", &Communicator::is_awaited)
      .def("announce", &Communicator::announce, nb::call_guard<nb::gil_scoped_release>())
      .def("announced",
           [](Communicator& self) {
             nb::gil_scoped_release release;
             return self.announced();
           })
      .def("dispatch",
           [](Communicator& self, Pool& pool, int64_t ranks_per_replica, const std::vector<int32_t>& firsts, uintptr_t x,
              int64_t x_stride, int64_t row_bytes, uintptr_t expert_ids, uintptr_t slots, uintptr_t x_rows,
              int64_t num_tokens, int64_t num_chosen, int64_t num_x_rows, uintptr_t rows, int64_t num_rows,
              uintptr_t starts, uintptr_t extent, uintptr_t global) {
             const ExchangeGroup group = exchange_group(self, ranks_per_replica, firsts);
             if (exchange_head_bytes(0) + row_bytes > self.capacity() / group.num_replicas() - kCacheLine) {
               throw nb::value_error("a row is larger than the buffer");
             }
             const DispatchArgs args{
                 group,       at<char>(x),         x_stride,   row_bytes,  at<int32_t>(expert_ids), at<int32_t>(slots),
                 at<int32_t>(x_rows), num_tokens,  num_chosen, num_x_rows, at<char>(rows),          num_rows,
                 at<int32_t>(starts), at<int32_t>(extent), at<int32_t>(global)};
             return run_noted(dispatch, pool, args);
           })
      .def("collect",
           [](Communicator& self, Pool& pool, int64_t ranks_per_replica, const std::vector<int32_t>& firsts,
              uintptr_t rows, int64_t num_rows, int64_t row_bytes, uintptr_t extent, uintptr_t global, uintptr_t places,
              int64_t num_choices, uintptr_t out) {
             checked(self, row_bytes);
             const CollectArgs args{exchange_group(self, ranks_per_replica, firsts), at<char>(rows), num_rows, row_bytes,
                                    at<int32_t>(extent), at<int32_t>(global), at<int32_t>(places), num_choices,
                                    at<char>(out)};
             return run_noted(collect, pool, args);
           })
      .def("barrier",
           [](Communicator& self, Pool& pool) {
             nb::gil_scoped_release release;
             barrier(pool, &self);
           })
      .def("gather",
           [](Communicator& self, Pool& pool, uintptr_t own, int64_t own_stride, uintptr_t out, int64_t out_stride,
              int64_t num_rows, const std::vector<int64_t>& starts, int root) {
             GatherArgs args{};
             args.communicator = checked(self, starts.back());
             args.own = at<char>(own), args.own_stride = own_stride;
             args.out = at<char>(out), args.out_stride = out_stride;
             args.num_rows = num_rows;
             args.root = checked_rank(self, root, -1);
             if (static_cast<int>(starts.size()) != self.size() + 1) throw nb::value_error("one part for each rank");
             std::copy(starts.begin(), starts.end(), args.starts);
             run_noted(gather, pool, args);
           })
      .def("gather_rows",
           [](Communicator& self, Pool& pool, uintptr_t ids, int64_t first, int64_t count, uintptr_t own, uintptr_t out,
              int64_t num_rows, int64_t row_bytes) {
             const GatherRowsArgs args{checked(self, row_bytes), at<int64_t>(ids), first,    count,
                                       at<char>(own),            at<char>(out),    num_rows, row_bytes};
             run_noted(gather_rows, pool, args);
           })
      .def("gather_groups",
           [](Communicator& self, Pool& pool, uintptr_t rows, uintptr_t starts, const std::vector<int32_t>& firsts,
              int64_t num_rows, int64_t row_bytes) {
             if (static_cast<int>(firsts.size()) != self.size() + 1) throw nb::value_error("one part for each rank");
             if (firsts.front() != 0 || !std::is_sorted(firsts.begin(), firsts.end())) throw nb::value_error("firsts");
             GatherGroupsArgs args{};
             args.communicator = checked(self, row_bytes);
             args.rows = at<char>(rows), args.starts = at<int32_t>(starts);
             args.num_groups = firsts.back(), args.num_rows = num_rows, args.row_bytes = row_bytes;
             std::copy(firsts.begin(), firsts.end(), args.firsts);
             return run_noted(gather_groups, pool, args);
           })
      .def("reduce",
           [](Communicator& self, Pool& pool, uintptr_t data, int64_t num_elements, int dtype, bool is_scattered) {
             const ReduceArgs args{&self, at<void>(data), num_elements, static_cast<DType>(dtype), is_scattered};
             run_noted(reduce, pool, args);
           })
      .def("broadcast",
           [](Communicator& self, Pool& pool, uintptr_t data, int64_t bytes, int root, bool is_patient) {
             run_noted(broadcast, pool, BroadcastArgs{&self, at<char>(data), bytes, checked_rank(self, root), is_patient});
           })
      .def("all_to_all",
           [](Communicator& self, Pool& pool, uintptr_t data, uintptr_t out, int64_t part_bytes) {
             run_noted(all_to_all, pool, AllToAllArgs{&self, at<char>(data), at<char>(out), part_bytes});
           })
      .def("send",
           [](Communicator& self, Pool& pool, uintptr_t data, int64_t bytes, int to) {
             run_noted(send, pool, SendArgs{&self, at<char>(data), bytes, checked_rank(self, to)});
           })
      .def("receive", [](Communicator& self, Pool& pool, uintptr_t data, int64_t bytes, int from, bool is_patient) {
        run_noted(receive, pool, ReceiveArgs{&self, at<char>(data), bytes, checked_rank(self, from), is_patient});
      });
  m.def("local_ids", [](Pool& pool, uintptr_t ids, uintptr_t out, int64_t num_ids, int64_t first, int64_t count) {
    run_noted(local_ids, pool, LocalIdsArgs{at<int64_t>(ids), at<int64_t>(out), num_ids, first, count});
  });
}

}  // namespace quire
