#include "quire/histories.h"

#include <stdexcept>
#include <string>

#include "bindings/bindings.h"

namespace quire {

namespace {

void check(const HistoryRows& rows, const DraftArrays& drafts) {
  if (const char* fault = find_fault(rows, drafts)) throw std::invalid_argument(fault);
}

}  // namespace

void bind_histories(nb::module_& m) {
  nb::class_<HistoryRows>(m, "HistoryRows")
      .def("__init__", [](HistoryRows* self, uintptr_t rows, uintptr_t handles, uintptr_t num_tokens,
                          uintptr_t max_tokens, uintptr_t token_ids, int64_t num_rows, int64_t max_num_seqs,
                          int64_t max_model_len) {
        new (self) HistoryRows{at<int64_t>(rows), at<int64_t>(handles), at<int32_t>(num_tokens),
                               at<int32_t>(max_tokens), at<int32_t>(token_ids), num_rows, max_num_seqs, max_model_len};
      });
  nb::class_<DraftArrays>(m, "DraftArrays")
      .def("__init__", [](DraftArrays* self, uintptr_t counts, uintptr_t match_lengths, uintptr_t token_ids,
                          uintptr_t scores, int64_t capacity) {
        new (self) DraftArrays{at<int32_t>(counts), at<int32_t>(match_lengths), at<int32_t>(token_ids),
                               at<float>(scores), capacity};
      });
  nb::class_<HistoryStats>(m, "HistoryStats")
      .def_ro("num_requests", &HistoryStats::num_requests)
      .def_ro("num_request_bytes", &HistoryStats::num_request_bytes)
      .def_ro("num_indexed_tokens", &HistoryStats::num_indexed_tokens)
      .def_ro("num_lookups", &HistoryStats::num_lookups)
      .def_ro("num_store_bytes", &HistoryStats::num_store_bytes)
      .def_ro("num_store_answers", &HistoryStats::num_store_answers)
      .def_ro("num_store_evictions", &HistoryStats::num_store_evictions)
      .def_ro("num_store_namespaces", &HistoryStats::num_store_namespaces);
  // Not to be called from several threads at once: the interpreter's lock is kept.
  nb::class_<Histories>(m, "Histories")
      .def("__init__", [](Histories* self, int32_t max_context, int64_t max_indexed_tokens, int64_t max_store_bytes,
                          int64_t max_store_answers) {
        new (self) Histories({max_context, max_indexed_tokens, max_store_bytes, max_store_answers});
      })
      .def("begin", [](Histories& self, int64_t handle, nb::bytes key) {
        self.begin(handle, std::string(key.c_str(), key.size()));
      })
      .def("propose_ngram", [](Histories& self, const HistoryRows& rows, const DraftArrays& drafts, int32_t min_length,
                               int32_t max_length) {
        check(rows, drafts);
        self.propose_ngram(rows, {min_length, max_length}, drafts);
      })
      .def("propose_suffix", [](Histories& self, const HistoryRows& rows, const DraftArrays& drafts,
                                double max_spec_factor, double min_token_prob) {
        check(rows, drafts);
        self.propose_suffix(rows, {max_spec_factor, min_token_prob}, drafts);
      })
      .def("end", [](Histories& self, int64_t handle, uintptr_t answer, int64_t num_tokens) {
        self.end(handle, at<int32_t>(answer), num_tokens);
      })
      .def("stats", &Histories::stats);
}

}  // namespace quire
