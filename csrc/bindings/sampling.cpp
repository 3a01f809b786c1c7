#include "bindings/bindings.h"
#include "bindings/step_graph.h"

namespace quire {

void bind_sampling(nb::module_& m) {
  m.def("uniforms", [](int tier, uintptr_t seeds, uintptr_t positions, int64_t count, uint32_t stream,
                       uintptr_t uniforms) {
    const UniformArgs args{at<uint64_t>(seeds), at<uint64_t>(positions), count, stream, at<double>(uniforms)};
    nb::gil_scoped_release release;
    tier_at(tier).sampling->uniforms(args);
  });
  m.def("sample", [](int tier, Pool& pool, uintptr_t logits, int64_t stride, int64_t num_lines, int64_t vocab_size,
                     uintptr_t temperature, uintptr_t top_k, uintptr_t top_p, uintptr_t log_min_p, uintptr_t uniforms,
                     uintptr_t token_ids, uintptr_t thresholds) {
    const SampleArgs args{{at<float>(logits), stride, num_lines, vocab_size},
                          at<float>(temperature),
                          at<int32_t>(top_k),
                          at<double>(top_p),
                          at<float>(log_min_p),
                          at<double>(uniforms),
                          at<int32_t>(token_ids),
                          at<float>(thresholds)};
    run_noted(tier_at(tier).sampling->sample, pool, args);
  });
  m.def("apply_penalties", [](int tier, Pool& pool, uintptr_t logits, int64_t stride, int64_t num_lines,
                              int64_t vocab_size, uintptr_t lines, int64_t num_entries, uintptr_t starts, uintptr_t ids,
                              uintptr_t counts, uintptr_t strengths) {
    const PenaltyArgs args{{at<float>(logits), stride, num_lines, vocab_size},
                           at<int32_t>(lines),
                           num_entries,
                           at<int64_t>(starts),
                           at<int64_t>(ids),
                           at<float>(counts),
                           at<float>(strengths)};
    nb::gil_scoped_release release;
    tier_at(tier).sampling->apply_penalties(pool, args);
  });
  m.def("apply_bitmask", [](int tier, Pool& pool, uintptr_t logits, int64_t stride, int64_t num_lines,
                            int64_t vocab_size, uintptr_t lines, int64_t num_masks, uintptr_t masks) {
    const BitmaskArgs args{
        {at<float>(logits), stride, num_lines, vocab_size}, at<int32_t>(lines), num_masks, at<int32_t>(masks)};
    nb::gil_scoped_release release;
    tier_at(tier).sampling->apply_bitmask(pool, args);
  });
  m.def("logprobs", [](int tier, Pool& pool, uintptr_t logits, int64_t stride, int64_t num_lines, int64_t vocab_size,
                       uintptr_t token_ids, uintptr_t num_top, int64_t width, bool is_logits, uintptr_t ids,
                       uintptr_t scores, uintptr_t ranks) {
    const LogprobsArgs args{{at<float>(logits), stride, num_lines, vocab_size},
                            at<int32_t>(token_ids),
                            at<int32_t>(num_top),
                            width,
                            is_logits,
                            at<int32_t>(ids),
                            at<float>(scores),
                            at<int32_t>(ranks)};
    run_noted(tier_at(tier).sampling->logprobs, pool, args);
  });
}

}  // namespace quire
