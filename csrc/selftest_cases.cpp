#include "selftest_cases.h"

#include <cstring>
#include <limits>

namespace quire {
namespace {

// Numbers that are the same in every process: a linear congruential generator.
class Numbers {
 public:
  uint32_t bits() {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return static_cast<uint32_t>(state_ >> 33);
  }
  float uniform() { return static_cast<float>(bits()) * 0x1p-30f - 1.0f; }  // -1 to 1
  void fill(float* out, int64_t n) {
    for (int64_t i = 0; i < n; ++i) out[i] = uniform();
  }
  void fill(bf16* out, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
      const float x = uniform();
      uint32_t bits;
      std::memcpy(&bits, &x, 4);
      out[i].bits = static_cast<uint16_t>(bits >> 16);
    }
  }
  void fill(int8_t* out, int64_t n) {
    for (int64_t i = 0; i < n; ++i) out[i] = static_cast<int8_t>(bits());
  }

 private:
  uint64_t state_ = 1;
};

// Cases. Each makes its inputs, runs kernels of `tier` on `pool` and leaves the result in `out`, which holds zeros and
// has the bytes named in the table. They run after a fork: no allocation but the pool's, no locks but the pool's.
// Together they call every kernel of a tier: one that does nothing fails a case, which a test sees to.

void products(const Tier& tier, Pool& pool, void* out) {
  alignas(64) bf16 a[16 * kSelfTestDepth], b[16 * kSelfTestDepth];
  alignas(64) int8_t a8[16 * kSelfTestDepth], b8[16 * kSelfTestDepth];
  Numbers numbers;
  numbers.fill(a, 16 * kSelfTestDepth);
  numbers.fill(b, 16 * kSelfTestDepth);
  numbers.fill(a8, 16 * kSelfTestDepth);
  numbers.fill(b8, 16 * kSelfTestDepth);
  struct Context {
    const SelfTestKernels* kernels;
    const bf16 *a, *b;
    const int8_t *a8, *b8;
    void* out;
  } context{tier.self_test, a, b, a8, b8, out};
  // By the pool, which sets the treatment of subnormal numbers.
  const TaskFn task = [](void* pointer, int64_t, int) {
    const Context& c = *static_cast<Context*>(pointer);
    c.kernels->product_bf16(c.a, c.b, static_cast<float*>(c.out));
    c.kernels->product_int8(c.a8, c.b8, static_cast<int32_t*>(c.out) + 256);
  };
  pool.run(1, task, &context);
}

template <class T, DType kDType>
void rms_norm(const Tier& tier, Pool& pool, void* out) {
  constexpr int64_t kRows = 3, kSize = 83;
  T x[kRows * kSize], weight[kSize];
  Numbers numbers;
  numbers.fill(x, kRows * kSize);
  numbers.fill(weight, kSize);
  T* residual = static_cast<T*>(out) + kRows * kSize;
  numbers.fill(residual, kRows * kSize);
  tier.elementwise->rms_norm(pool, {x, kSize, residual, weight, out, kRows, kSize, 1e-6f, kDType});
}

template <class T, DType kDType>
void layer_norm(const Tier& tier, Pool& pool, void* out) {
  constexpr int64_t kRows = 3, kSize = 83;
  T x[kRows * kSize], weight[kSize], bias[kSize];
  Numbers numbers;
  numbers.fill(x, kRows * kSize);
  numbers.fill(weight, kSize);
  numbers.fill(bias, kSize);
  T* residual = static_cast<T*>(out) + kRows * kSize;
  numbers.fill(residual, kRows * kSize);
  tier.elementwise->layer_norm(pool, {x, kSize, residual, weight, bias, out, kRows, kSize, 1e-5f, kDType});
}

template <class T, DType kDType>
void activations(const Tier& tier, Pool& pool, void* out) {
  constexpr int64_t kRows = 2, kSize = 45;
  T x[kRows * 2 * kSize];
  Numbers numbers;
  numbers.fill(x, kRows * 2 * kSize);
  T* result = static_cast<T*>(out);
  for (const Activation activation :
       {Activation::silu, Activation::gelu, Activation::gelu_tanh, Activation::clamped_silu, Activation::relu,
        Activation::relu2}) {
    tier.elementwise->gated_activation(pool,
                                       {x, 2 * kSize, result, kRows, kSize, activation, kDType, 0.7f, 1.7f, 1.0f});
    result += kRows * kSize;
    tier.elementwise->transform(pool, {x, 2 * kSize, x + kSize, 2 * kSize, result, kRows, kSize, 0.7f, activation,
                                       kDType});
    result += kRows * kSize;
  }
  const uint32_t mask = kDType == DType::bf16 ? 0x7f80 : 0x7f800000;
  std::memset(x + kSize, 0xff, sizeof(T));  // NaN
  for (const int64_t n : {kSize, kSize + 1}) {
    const bool is_finite = tier.elementwise->is_finite(pool, {x, n, static_cast<int64_t>(sizeof(T)), mask});
    std::memset(result++, is_finite ? 1 : 2, sizeof(T));
  }
}

template <class T, DType kDType>
void gates(const Tier& tier, Pool& pool, void* out) {
  constexpr int64_t kRows = 2, kGroups = 3, kSize = 15, kRow = kGroups * kSize;
  T x[kRows * 2 * kRow], weight[kRow];
  Numbers numbers;
  numbers.fill(x, kRows * 2 * kRow);
  numbers.fill(weight, kRow);
  T* result = static_cast<T*>(out);
  for (const GateActivation gate : {GateActivation::none, GateActivation::silu, GateActivation::sigmoid}) {
    tier.elementwise->multiply(pool, {x, 2 * kRow, x + kRow, 2 * kRow, result, kRows, kRow, gate, kDType});
    result += kRows * kRow;
  }
  for (const bool gate_first : {false, true}) {
    tier.elementwise->gated_rms_norm(pool, {x, 2 * kRow, x + kRow, 2 * kRow, weight, gate_first ? kSize : 0, result,
                                            kRows, kGroups, kSize, 1e-6f, gate_first, kDType});
    result += kRows * kRow;
  }
}

// Products for one row, for some and for more than the rows of a tile; with a bias, gated, and as float32.
constexpr int64_t kInputs = 70, kOutputs = 43, kPackedOutputs = 48, kGated = 16;
constexpr int64_t kNumRows[] = {1, 5, 37};
constexpr int64_t kAllRows = 1 + 5 + 37;

// Rows for three matrices of a panel each, of which the second gets none.
constexpr int32_t kRouted[] = {3, 0, 36, 0, 5}, kRoutedStarts[] = {0, 1, 1, 5};
constexpr int64_t kRoutedRows = 5;

template <class T, DType kDType>
void linear(const Tier& tier, Pool& pool, void* out) {
  constexpr int64_t kTiles = ceil_div(kInputs, kTileDepth);
  alignas(64) T packed[kPackedOutputs / kPanelSize * kTiles * kTileSize] = {};
  float weight[kOutputs * kInputs], bias[kOutputs];
  T x[37 * kInputs];
  Numbers numbers;
  numbers.fill(weight, kOutputs * kInputs);
  numbers.fill(bias, kOutputs);
  numbers.fill(x, 37 * kInputs);
  const GemmKernels& gemm = *tier.gemm;
  gemm.pack_rows(pool, {weight, kInputs, RowType::f32, packed, kDType, kOutputs, kInputs, 0});
  T* result = static_cast<T*>(out);
  for (const int64_t rows : kNumRows) {
    gemm.linear(pool, {x, kInputs, packed, bias, result, kOutputs, rows, kInputs, kOutputs, kDType, DType::f32, kDType,
                       false, nullptr});
    result += rows * kOutputs;
    gemm.linear(pool, {x, kInputs, packed, nullptr, result, kGated, rows, kInputs, kGated, kDType, kDType, kDType,
                       true, nullptr});
    result += rows * kGated;
  }
  gemm.grouped_linear(pool, {{x, kInputs, packed, nullptr, result, kPanelSize, kRoutedRows, kInputs, kPanelSize, kDType,
                              kDType, kDType, false, kRouted},
                             kRoutedStarts, 3, 37});
  result += kRoutedRows * kPanelSize;
  const int64_t ids[] = {42, 0, 17};
  gemm.read_rows(pool, {packed, kDType, ids, 0, 3, kInputs, result});
}
template <class T>
constexpr int64_t kLinearBytes =
    (kAllRows * (kOutputs + kGated) + kRoutedRows * kPanelSize + 3 * kInputs) * sizeof(T);

template <class T, DType kDType>
void quantised(const Tier& tier, Pool& pool, void* out) {
  constexpr int64_t kGroup = 32;
  constexpr int64_t kPanels = kPackedOutputs / kPanelSize;
  alignas(64) uint8_t packed8[kPanels * int8_panel_bytes(kInputs)] = {};
  alignas(64) uint8_t packed4[kPanels * int4_panel_bytes(kInputs)] = {};
  alignas(64) float scales8[kPackedOutputs] = {};
  alignas(64) bf16 scales4[kPackedOutputs * ceil_div(kInputs, kGroup)] = {};
  T weight[kOutputs * kInputs], x[37 * kInputs];
  float bias[kOutputs];
  Numbers numbers;
  numbers.fill(weight, kOutputs * kInputs);
  numbers.fill(bias, kOutputs);
  numbers.fill(x, 37 * kInputs);
  const QuantKernels& quant = *tier.quant;
  quant.pack_int8(pool, {weight, kInputs, packed8, scales8, 0, kOutputs, kInputs, 0, kDType});
  quant.pack_int4(pool, {weight, kInputs, packed4, scales4, 0, kOutputs, kInputs, kGroup, kDType});
  T* result = static_cast<T*>(out);
  for (const int64_t rows : kNumRows) {
    quant.linear_int8(pool, {x, kInputs, packed8, scales8, bias, result, kOutputs, rows, kOutputs, kInputs, 0, kDType, DType::f32,
                             kDType, false, nullptr});
    result += rows * kOutputs;
    quant.linear_int4(pool, {x, kInputs, packed4, scales4, nullptr, result, kOutputs, rows, kOutputs, kInputs, kGroup, kDType,
                             kDType, kDType, false, nullptr});
    result += rows * kOutputs;
  }
  quant.grouped_int8(pool, {{x, kInputs, packed8, scales8, nullptr, result, kPanelSize, kRoutedRows, kPanelSize, kInputs, 0, kDType,
                             kDType, kDType, false, kRouted},
                            kRoutedStarts, 3, 37});
  result += kRoutedRows * kPanelSize;
  quant.grouped_int4(pool, {{x, kInputs, packed4, scales4, nullptr, result, kPanelSize, kRoutedRows, kPanelSize, kInputs, kGroup,
                             kDType, kDType, kDType, false, kRouted},
                            kRoutedStarts, 3, 37});
  result += kRoutedRows * kPanelSize;
  const int64_t ids[] = {42, 0, 17};
  quant.gather_int8(pool, {ids, packed8, scales8, result, 3, kInputs, 0, kDType});
  quant.gather_int4(pool, {ids, packed4, scales4, result + 3 * kInputs, 3, kInputs, kGroup, kDType});
}
template <class T>
constexpr int64_t kQuantisedBytes =
    (kAllRows * 2 * kOutputs + 2 * kRoutedRows * kPanelSize + 2 * 3 * kInputs) * sizeof(T);

// The choice of experts in every way, and what becomes of rows.
constexpr int64_t kMoeTokens = 3, kExperts = 20, kChosen = 2, kMoeRows = kMoeTokens * kChosen, kMoeSize = 37;
struct Routed {
  int32_t expert_ids[kMoeRows], rows[kMoeRows], places[kMoeRows], starts[kExperts + 1];
  float weights[kMoeRows];
};
template <class T>
struct Mixed {
  Routed routed[5];
  T spread[kMoeRows * kMoeSize], combined[kMoeTokens * kMoeSize];
};

template <class T, DType kDType>
void mixture(const Tier& tier, Pool& pool, void* out) {
  Mixed<T>& result = *static_cast<Mixed<T>*>(out);
  float logits[kMoeTokens * kExperts], correction[kExperts];
  T x[kMoeTokens * kMoeSize];
  Numbers numbers;
  numbers.fill(logits, kMoeTokens * kExperts);
  numbers.fill(correction, kExperts);
  numbers.fill(x, kMoeTokens * kMoeSize);
  const auto route = [&](Routed& to, Scoring scoring, const float* added, int64_t num_groups) {
    tier.moe->route(pool, {logits, added, to.expert_ids, to.weights, to.starts, to.rows, to.places, kMoeTokens,
                           kExperts, kChosen, num_groups, (num_groups + 1) / 2, scoring, num_groups > 1,
                           scoring == Scoring::sigmoid, 1.5f, 0.1f});
  };
  for (int i = 0; i < 4; ++i) route(result.routed[i], static_cast<Scoring>(i), nullptr, 1);
  route(result.routed[4], Scoring::sigmoid, correction, 4);
  const Routed& routed = result.routed[4];
  tier.moe->spread(pool, {x, kMoeSize, routed.places, routed.weights, result.spread, kMoeTokens, kChosen, kMoeSize,
                          kDType});
  tier.moe->combine(pool, {result.spread, routed.places, routed.weights, x, correction, result.combined, kMoeTokens,
                           kChosen, kMoeSize, kDType});
}

// A prompt of 40 tokens, and a decode step over 300: more than a split of the softmax. Keys and values come through
// both kernels that write them, and through a copied page.
constexpr int64_t kHeads = 4, kKvHeads = 2, kHeadSize = 32, kBlockSize = 32, kBlocks = 13;
constexpr int64_t kPrompt = 40, kContext = 300, kTokens = kPrompt + kContext, kQueries = kPrompt + 1;
constexpr int64_t kQkvSize = (kHeads + 2 * kKvHeads) * kHeadSize, kQuerySize = kHeads * kHeadSize;
constexpr int64_t kRotated = 12;  // half of the elements that are

template <class T, DType kDType>
void attention(const Tier& tier, Pool& pool, void* out) {
  alignas(64) T pages[kBlocks * kKvHeads * 2 * kBlockSize * kHeadSize] = {};
  T qkv[kTokens * kQkvSize], norm[kHeadSize];
  float cos[kContext * kRotated], sin[kContext * kRotated], sinks[kHeads], slopes[kHeads];
  int64_t positions[kTokens], slots[kTokens];
  Numbers numbers;
  numbers.fill(qkv, kTokens * kQkvSize);
  numbers.fill(norm, kHeadSize);
  numbers.fill(cos, kContext * kRotated);
  numbers.fill(sin, kContext * kRotated);
  numbers.fill(sinks, kHeads);
  numbers.fill(slopes, kHeads);
  // The prompt lies in pages 1 and 2, the context in pages 3 .. 12; the prompt's tokens come first.
  for (int64_t i = 0; i < kTokens; ++i) {
    positions[i] = i < kPrompt ? i : i - kPrompt;
    slots[i] = (i < kPrompt ? kBlockSize : 3 * kBlockSize) + positions[i];
  }
  const KvCache cache{pages, kBlocks, kKvHeads, kBlockSize, kHeadSize, kDType};
  const AttentionKernels& kernels = *tier.attention;
  kernels.rope_and_cache(pool, {qkv, kQkvSize, kTokens, kHeads, cos, sin, kContext, kRotated, positions, true, slots,
                                norm, norm, 1e-6f, cache});
  T* result = static_cast<T*>(out);
  for (int64_t i = 0; i < 3; ++i) std::memcpy(result + i * kQuerySize, qkv + i * 37 * kQkvSize, kQuerySize * sizeof(T));
  result += 3 * kQuerySize;
  // A token written anew, without rotation; the prompt's first page moved to page 0.
  const int64_t slot = 3 * kBlockSize + 5, source = 1, target = 0;
  kernels.write_kv(pool, {qkv, qkv + kKvHeads * kHeadSize, kQkvSize, kQkvSize, 1, &slot, cache});
  kernels.copy_pages(pool, {cache, &source, &target, 1});
  const int32_t table[2 * 10] = {0, 2, -1, -1, -1, -1, -1, -1, -1, -1, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12};
  const int32_t starts[] = {0, kPrompt, kQueries}, seq_lens[] = {kPrompt, kContext};
  PagedAttentionArgs args{qkv, kQkvSize, result, cache, table, 10, starts, seq_lens, 2, kQueries, kHeads, 0.2f, 0, 0.0f,
                          nullptr, nullptr};
  kernels.paged_attention(pool, args);
  args.out = result + kQueries * kQuerySize;
  args.window = 270;
  args.soft_cap = 3.0f;
  args.sinks = sinks;
  args.slopes = slopes;
  kernels.paged_attention(pool, args);
}
template <class T>
constexpr int64_t kAttentionBytes = (3 + 2 * kQueries) * kQuerySize * sizeof(T);

// The same for latents: a prompt of 20 tokens and a decode step over 300, whose queries come through the products of
// heads, of few rows and of many.
constexpr int64_t kLatent = 34, kRope = 14, kLatentWidth = kLatent + kRope, kHeadInput = 20, kPromptTokens = 20;
constexpr int64_t kLatentTokens = kPromptTokens + kContext, kLatentQueries = kPromptTokens + 1;
constexpr int64_t kHeadWeights = 3 * kTileSize;  // of a product with 34 outputs of 20 inputs

template <class T, DType kDType>
void latent_attention(const Tier& tier, Pool& pool, void* out) {
  alignas(64) T pages[kBlocks * kBlockSize * kLatentWidth] = {}, weights[kHeads * kHeadWeights];
  T latents[kLatentTokens * kLatentWidth], norm[kLatent], inputs[kLatentTokens * kHeads * (kHeadInput + kRope)];
  T queries[kLatentTokens * kHeads * kLatentWidth] = {};
  float cos[kContext * kRope / 2], sin[kContext * kRope / 2];
  int64_t positions[kLatentTokens], slots[kLatentTokens];
  Numbers numbers;
  numbers.fill(weights, kHeads * kHeadWeights);
  numbers.fill(latents, kLatentTokens * kLatentWidth);
  numbers.fill(norm, kLatent);
  numbers.fill(inputs, kLatentTokens * kHeads * (kHeadInput + kRope));
  numbers.fill(cos, kContext * kRope / 2);
  numbers.fill(sin, kContext * kRope / 2);
  // The prompt lies in page 0, the context in pages 1 .. 10.
  for (int64_t i = 0; i < kLatentTokens; ++i) {
    positions[i] = i < kPromptTokens ? i : i - kPromptTokens;
    slots[i] = (i < kPromptTokens ? 0 : kBlockSize) + positions[i];
  }
  const LatentKernels& kernels = *tier.latent;
  constexpr int64_t kInputRow = kHeads * (kHeadInput + kRope), kQueryRow = kHeads * kLatentWidth;
  for (const int64_t num_rows : {int64_t{2}, kLatentQueries}) {
    kernels.head_linear(pool, {inputs, kInputRow, kHeadInput + kRope, weights, queries, kQueryRow, kLatentWidth,
                               num_rows, kHeads, kHeadInput, kLatent, kDType});
  }
  const LatentCache cache{pages, kBlocks, kBlockSize, kLatent, kRope, kDType};
  kernels.write_latent_tokens(pool, {inputs, kInputRow, kHeadInput + kRope, queries, latents, kLatentWidth, norm, 1e-6f,
                              kLatentTokens, kHeads, cos, sin, kContext, positions, true, slots, cache});
  const int32_t table[2 * 10] = {0, -1, -1, -1, -1, -1, -1, -1, -1, -1, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10};
  const int32_t starts[] = {0, kPromptTokens, kLatentQueries}, seq_lens[] = {kPromptTokens, kContext};
  kernels.latent_attention(pool, {queries, out, cache, table, 10, starts, seq_lens, 2, kLatentQueries, kHeads, 0.2f});
}
template <class T>
constexpr int64_t kLatentBytes = kLatentQueries * kHeads * kLatent * sizeof(T);

// The likeliest token, plain draws and each filter, then what requests ask of the scores.
struct Sampled {
  static constexpr int64_t kLines = 6, kWidth = 8;
  int32_t token_ids[kLines];
  float thresholds[kLines];
  double uniforms[kLines];
  int32_t top_ids[kLines * kWidth];
  float top_scores[kLines * kWidth];
  int32_t ranks[kLines];
  float changed[2 * 40];
};

void sampling(const Tier& tier, Pool& pool, void* out) {
  constexpr int64_t kVocabulary = 700, kLines = Sampled::kLines;
  Sampled& result = *static_cast<Sampled*>(out);
  float logits[kLines * kVocabulary];
  uint64_t seeds[kLines], places[kLines];
  Numbers numbers;
  numbers.fill(logits, kLines * kVocabulary);
  for (float& logit : logits) logit *= 4.0f;
  for (int64_t i = 0; i < kLines; ++i) seeds[i] = places[i] = numbers.bits();
  constexpr float kOff = -std::numeric_limits<float>::infinity();
  const float temperature[kLines] = {0.0f, 1.0f, 0.7f, 1.5f, 2.0f, 1.0f};
  const float log_min_p[kLines] = {kOff, kOff, kOff, kOff, -3.0f, -4.0f};
  const int32_t top_k[kLines] = {0, 0, 20, 0, 0, 300};
  const double top_p[kLines] = {1.0, 1.0, 1.0, 0.8, 1.0, 0.9};
  const SamplingKernels& kernels = *tier.sampling;
  kernels.uniforms({seeds, places, kLines, 3, result.uniforms});
  const LogitLines lines{logits, kVocabulary, kLines, kVocabulary};
  kernels.sample(pool, {lines, temperature, top_k, top_p, log_min_p, result.uniforms, result.token_ids,
                        result.thresholds});
  const int32_t given[kLines] = {0, 99, 699, 5, 5, 350}, num_top[kLines] = {7, 0, 1, 2, 3, 4};
  for (const bool is_logits : {true, false}) {
    kernels.logprobs(pool, {lines, given, num_top, Sampled::kWidth, is_logits, result.top_ids, result.top_scores,
                            result.ranks});
  }
  std::memcpy(result.changed, logits, sizeof(result.changed));
  const LogitLines changed{result.changed, 40, 2, 40};
  const int32_t at[] = {1, 0}, masks[] = {0x1234567, 0x5a, -1, 0x33};
  const int64_t starts[] = {0, 2, 5}, ids[] = {3, 30, 0, 1, 39};
  const float counts[] = {1, 2, 3, 0, 1}, strengths[] = {1.3f, 0.5f, 0.2f, 0.7f, -1.1f, 0.1f};
  kernels.apply_penalties(pool, {changed, at, 2, starts, ids, counts, strengths});
  kernels.apply_bitmask(pool, {changed, at, 2, masks});
}

// A prompt of two rows and one row after five tokens, over four blocks of states.
constexpr int64_t kConvChannels = 37, kConvSize = 4, kConvRows = 3, kConvBlocks = 4;

template <class T, DType kDType>
void causal_conv(const Tier& tier, Pool& pool, void* out) {
  constexpr int64_t kStates = kConvBlocks * (kConvSize - 1) * kConvChannels;
  T x[kConvRows * kConvChannels], weight[kConvSize * kConvChannels], bias[kConvChannels];
  Numbers numbers;
  numbers.fill(x, kConvRows * kConvChannels);
  numbers.fill(weight, kConvSize * kConvChannels);
  numbers.fill(bias, kConvChannels);
  T* states = static_cast<T*>(out) + kConvRows * kConvChannels;
  numbers.fill(states, kStates);
  const int32_t starts[] = {0, 2, 3}, read[] = {-1, 2}, written[] = {1, 3};
  tier.causal_conv->causal_conv(pool, {x, kConvChannels, weight, bias, out,
                                       {states, kConvBlocks, kStates / kConvBlocks},
                                       {starts, read, written, 2, kConvRows}, kConvChannels, kConvSize,
                                       true, kDType});
}
template <class T>
constexpr int64_t kConvBytes = (kConvRows + kConvBlocks * (kConvSize - 1)) * kConvChannels * sizeof(T);
// A prompt of two chunks beside a decode step, with states that move from block to block.
constexpr int64_t kChannels = 35, kStateSize = 5, kScanTokens = 7, kStateBlocks = 4;
constexpr int64_t kScanHeads = 3, kScanHeadSize = 37, kScanInner = kScanHeads * kScanHeadSize;
constexpr int64_t kMambaStates = kStateBlocks * round_up(kChannels, 16) * kStateSize;
constexpr int64_t kMamba2States = kStateBlocks * kScanInner * kStateSize;

template <class T, DType kDType>
void scans(const Tier& tier, Pool& pool, void* out) {
  T x[kScanTokens * kScanInner], time_step[kScanTokens * kScanInner], gate[kScanTokens * kScanInner];
  T b[kScanTokens * kStateSize], c[kScanTokens * kStateSize];
  float a[round_up(kChannels, 16) * kStateSize], skip[kScanInner], bias[kScanHeads];
  Numbers numbers;
  for (T* rows : {x, time_step, gate}) numbers.fill(rows, kScanTokens * kScanInner);
  for (T* rows : {b, c}) numbers.fill(rows, kScanTokens * kStateSize);
  numbers.fill(a, round_up(kChannels, 16) * kStateSize);
  numbers.fill(skip, kScanInner);
  numbers.fill(bias, kScanHeads);
  float* mamba_states = static_cast<float*>(out);
  float* mamba2_states = mamba_states + kMambaStates;
  numbers.fill(mamba_states, kMambaStates + kMamba2States);
  T* result = reinterpret_cast<T*>(mamba2_states + kMamba2States);
  const int32_t starts[] = {0, 4, 5, kScanTokens}, read[] = {-1, 3, 2}, written[] = {0, 3, 1};
  const RecurrentBatch batch{starts, read, written, 3, kScanTokens};
  tier.state_space->mamba_scan(pool, {x, kScanInner, time_step, kScanInner, b, kStateSize, c, kStateSize, gate,
                                      kScanInner, a, skip, result, kChannels, kStateSize,
                                      {mamba_states, kStateBlocks, kMambaStates / kStateBlocks}, batch, kDType});
  result += kScanTokens * kChannels;
  tier.state_space->mamba2_scan(pool, {x, kScanInner, time_step, kScanInner, b, kStateSize, c, kStateSize, nullptr, 0, a,
                                       skip, bias, 0.25f, 0.75f, result, kScanHeads, kScanHeadSize, 1, kStateSize,
                                       {mamba2_states, kStateBlocks, kMamba2States / kStateBlocks}, batch, kDType});
}
template <class T>
constexpr int64_t kScanBytes = (kMambaStates + kMamba2States) * 4 + kScanTokens * (kChannels + kScanInner) * sizeof(T);

// The requests of `causal_conv`, through heads with all columns of a task and with fewer.
template <class T>
struct DeltaNet {
  static constexpr int64_t kKeyHeads = 1, kValueHeads = 2, kKeySize = 21, kValueSize = 80;
  static constexpr int64_t kRow = 2 * kKeyHeads * kKeySize + kValueHeads * kValueSize;
  float gates[2][kConvRows * kValueHeads];
  float states[kConvBlocks][kValueHeads * kKeySize * kValueSize];
  T values[kConvRows * kValueHeads * kValueSize];
};

template <class T, DType kDType>
void delta_net(const Tier& tier, Pool& pool, void* out) {
  using Shape = DeltaNet<T>;
  constexpr int64_t kHeads = Shape::kValueHeads, kStates = sizeof(Shape::states[0]) / sizeof(float);
  DeltaNet<T>& result = *static_cast<DeltaNet<T>*>(out);
  T qkv[kConvRows * Shape::kRow], b[kConvRows * kHeads], a[kConvRows * kHeads];
  float a_log[kHeads], bias[kHeads];
  Numbers numbers;
  numbers.fill(qkv, kConvRows * Shape::kRow);
  numbers.fill(b, kConvRows * kHeads);
  numbers.fill(a, kConvRows * kHeads);
  numbers.fill(a_log, kHeads);
  numbers.fill(bias, kHeads);
  numbers.fill(result.states[0], kConvBlocks * kStates);
  const DeltaNetKernels& kernels = *tier.delta_net;
  kernels.delta_gates(pool, {b, a, kHeads, a_log, bias, result.gates[0], result.gates[1], kConvRows, kHeads, kDType});
  const int32_t starts[] = {0, 2, 3}, read[] = {-1, 2}, written[] = {1, 3};
  kernels.gated_delta_rule(pool, {qkv, Shape::kRow, result.gates[0], result.gates[1], result.values,
                                  {result.states, kConvBlocks, kStates},
                                  {starts, read, written, 2, kConvRows}, Shape::kKeyHeads, kHeads,
                                  Shape::kKeySize, Shape::kValueSize, 0.2f, kDType});
}

}  // namespace

const SelfTestCase self_test_cases[] = {
    {"products", 2 * 256 * 4, products},
    {"rms_norm bf16", 2 * 3 * 83 * 2, rms_norm<bf16, DType::bf16>},
    {"rms_norm f32", 2 * 3 * 83 * 4, rms_norm<float, DType::f32>},
    {"layer_norm bf16", 2 * 3 * 83 * 2, layer_norm<bf16, DType::bf16>},
    {"layer_norm f32", 2 * 3 * 83 * 4, layer_norm<float, DType::f32>},
    {"activations bf16", (12 * 90 + 2) * 2, activations<bf16, DType::bf16>},
    {"activations f32", (12 * 90 + 2) * 4, activations<float, DType::f32>},
    {"gates bf16", 5 * 90 * 2, gates<bf16, DType::bf16>},
    {"gates f32", 5 * 90 * 4, gates<float, DType::f32>},
    {"linear bf16", kLinearBytes<bf16>, linear<bf16, DType::bf16>},
    {"linear f32", kLinearBytes<float>, linear<float, DType::f32>},
    {"quantised bf16", kQuantisedBytes<bf16>, quantised<bf16, DType::bf16>},
    {"quantised f32", kQuantisedBytes<float>, quantised<float, DType::f32>},
    {"blocks", kBlockProductsBytes, block_products},
    {"codes", kCodedProductsBytes, coded_products},
    {"mixture bf16", sizeof(Mixed<bf16>), mixture<bf16, DType::bf16>},
    {"mixture f32", sizeof(Mixed<float>), mixture<float, DType::f32>},
    {"attention bf16", kAttentionBytes<bf16>, attention<bf16, DType::bf16>},
    {"attention f32", kAttentionBytes<float>, attention<float, DType::f32>},
    {"latent attention bf16", kLatentBytes<bf16>, latent_attention<bf16, DType::bf16>},
    {"latent attention f32", kLatentBytes<float>, latent_attention<float, DType::f32>},
    {"sampling", sizeof(Sampled), sampling},
    {"causal_conv bf16", kConvBytes<bf16>, causal_conv<bf16, DType::bf16>},
    {"causal_conv f32", kConvBytes<float>, causal_conv<float, DType::f32>},
    {"scans bf16", kScanBytes<bf16>, scans<bf16, DType::bf16>},
    {"scans f32", kScanBytes<float>, scans<float, DType::f32>},
    {"delta_net bf16", sizeof(DeltaNet<bf16>), delta_net<bf16, DType::bf16>},
    {"delta_net f32", sizeof(DeltaNet<float>), delta_net<float, DType::f32>},
};
const int num_self_test_cases = static_cast<int>(sizeof(self_test_cases) / sizeof(self_test_cases[0]));

// Each makes one kernel do nothing.
const IdleKernel idle_kernels[] = {
    {"rms_norm", [](TierCopy& c) { c.elementwise.rms_norm = [](Pool&, const RmsNormArgs&) {}; }},
    {"layer_norm", [](TierCopy& c) { c.elementwise.layer_norm = [](Pool&, const LayerNormArgs&) {}; }},
    {"gated_activation",
     [](TierCopy& c) { c.elementwise.gated_activation = [](Pool&, const GatedActivationArgs&) {}; }},
    {"multiply", [](TierCopy& c) { c.elementwise.multiply = [](Pool&, const MultiplyArgs&) {}; }},
    {"gated_rms_norm", [](TierCopy& c) { c.elementwise.gated_rms_norm = [](Pool&, const GatedRmsNormArgs&) {}; }},
    {"transform", [](TierCopy& c) { c.elementwise.transform = [](Pool&, const TransformArgs&) {}; }},
    {"is_finite", [](TierCopy& c) { c.elementwise.is_finite = [](Pool&, const IsFiniteArgs&) { return true; }; }},
    {"linear", [](TierCopy& c) { c.gemm.linear = [](Pool&, const LinearArgs&) {}; }},
    {"grouped_linear", [](TierCopy& c) { c.gemm.grouped_linear = [](Pool&, const Grouped<LinearArgs>&) {}; }},
    {"pack_rows", [](TierCopy& c) { c.gemm.pack_rows = [](Pool&, const PackArgs&) { return true; }; }},
    {"read_rows", [](TierCopy& c) { c.gemm.read_rows = [](Pool&, const ReadRowsArgs&) {}; }},
    {"linear_int8", [](TierCopy& c) { c.quant.linear_int8 = [](Pool&, const QuantLinearArgs&) {}; }},
    {"linear_int4", [](TierCopy& c) { c.quant.linear_int4 = [](Pool&, const QuantLinearArgs&) {}; }},
    {"grouped_int8", [](TierCopy& c) { c.quant.grouped_int8 = [](Pool&, const Grouped<QuantLinearArgs>&) {}; }},
    {"grouped_int4", [](TierCopy& c) { c.quant.grouped_int4 = [](Pool&, const Grouped<QuantLinearArgs>&) {}; }},
    {"pack_int8", [](TierCopy& c) { c.quant.pack_int8 = [](Pool&, const QuantPackArgs&) { return true; }; }},
    {"pack_int4", [](TierCopy& c) { c.quant.pack_int4 = [](Pool&, const QuantPackArgs&) { return true; }; }},
    {"gather_int8", [](TierCopy& c) { c.quant.gather_int8 = [](Pool&, const QuantGatherArgs&) {}; }},
    {"gather_int4", [](TierCopy& c) { c.quant.gather_int4 = [](Pool&, const QuantGatherArgs&) {}; }},
    {"block_linear",
     [](TierCopy& c) {
       for (auto& kernels : c.block.of) kernels.block_linear = [](Pool&, const QuantLinearArgs&) {};
     }},
    {"block_grouped",
     [](TierCopy& c) {
       for (auto& kernels : c.block.of) kernels.block_grouped = [](Pool&, const Grouped<QuantLinearArgs>&) {};
     }},
    {"block_pack",
     [](TierCopy& c) {
       for (auto& kernels : c.block.of) kernels.block_pack = [](Pool&, const BlockPackArgs&) { return true; };
     }},
    {"block_gather",
     [](TierCopy& c) {
       for (auto& kernels : c.block.of) kernels.block_gather = [](Pool&, const BlockGatherArgs&) {};
     }},
    {"coded_linear", [](TierCopy& c) { c.coded.coded_linear = [](Pool&, const CodedLinearArgs&) {}; }},
    {"coded_grouped", [](TierCopy& c) { c.coded.coded_grouped = [](Pool&, const Grouped<CodedLinearArgs>&) {}; }},
    {"coded_pack", [](TierCopy& c) { c.coded.coded_pack = [](Pool&, const CodedPackArgs&) { return true; }; }},
    {"coded_gather", [](TierCopy& c) { c.coded.coded_gather = [](Pool&, const CodedGatherArgs&) {}; }},
    {"route", [](TierCopy& c) { c.moe.route = [](Pool&, const RouteArgs&) {}; }},
    {"combine", [](TierCopy& c) { c.moe.combine = [](Pool&, const CombineArgs&) {}; }},
    {"spread", [](TierCopy& c) { c.moe.spread = [](Pool&, const SpreadArgs&) {}; }},
    {"paged_attention", [](TierCopy& c) { c.attention.paged_attention = [](Pool&, const PagedAttentionArgs&) {}; }},
    {"rope_and_cache", [](TierCopy& c) { c.attention.rope_and_cache = [](Pool&, const RopeAndCacheArgs&) {}; }},
    {"write_kv", [](TierCopy& c) { c.attention.write_kv = [](Pool&, const WriteKvArgs&) {}; }},
    {"copy_pages", [](TierCopy& c) { c.attention.copy_pages = [](Pool&, const CopyPagesArgs&) {}; }},
    {"latent_attention", [](TierCopy& c) { c.latent.latent_attention = [](Pool&, const LatentAttentionArgs&) {}; }},
    {"write_latent_tokens", [](TierCopy& c) { c.latent.write_latent_tokens = [](Pool&, const LatentTokensArgs&) {}; }},
    {"head_linear", [](TierCopy& c) { c.latent.head_linear = [](Pool&, const HeadLinearArgs&) {}; }},
    {"uniforms", [](TierCopy& c) { c.sampling.uniforms = [](const UniformArgs&) {}; }},
    {"sample", [](TierCopy& c) { c.sampling.sample = [](Pool&, const SampleArgs&) {}; }},
    {"apply_penalties", [](TierCopy& c) { c.sampling.apply_penalties = [](Pool&, const PenaltyArgs&) {}; }},
    {"apply_bitmask", [](TierCopy& c) { c.sampling.apply_bitmask = [](Pool&, const BitmaskArgs&) {}; }},
    {"logprobs", [](TierCopy& c) { c.sampling.logprobs = [](Pool&, const LogprobsArgs&) {}; }},
    {"causal_conv", [](TierCopy& c) { c.causal_conv.causal_conv = [](Pool&, const CausalConvArgs&) {}; }},
    {"mamba_scan", [](TierCopy& c) { c.state_space.mamba_scan = [](Pool&, const MambaScanArgs&) {}; }},
    {"mamba2_scan", [](TierCopy& c) { c.state_space.mamba2_scan = [](Pool&, const Mamba2ScanArgs&) {}; }},
    {"delta_gates", [](TierCopy& c) { c.delta_net.delta_gates = [](Pool&, const DeltaGatesArgs&) {}; }},
    {"gated_delta_rule", [](TierCopy& c) { c.delta_net.gated_delta_rule = [](Pool&, const GatedDeltaRuleArgs&) {}; }},
};
const int num_idle_kernels = static_cast<int>(sizeof(idle_kernels) / sizeof(idle_kernels[0]));

TierCopy::TierCopy(const Tier& original)
    : elementwise(*original.elementwise), gemm(*original.gemm), quant(*original.quant), block(*original.block),
      coded(*original.coded), moe(*original.moe), attention(*original.attention), latent(*original.latent), sampling(*original.sampling),
      causal_conv(*original.causal_conv), state_space(*original.state_space), delta_net(*original.delta_net),
      tier(original) {
  tier.elementwise = &elementwise;
  tier.gemm = &gemm;
  tier.quant = &quant;
  tier.block = &block;
  tier.coded = &coded;
  tier.moe = &moe;
  tier.attention = &attention;
  tier.latent = &latent;
  tier.sampling = &sampling;
  tier.causal_conv = &causal_conv;
  tier.state_space = &state_space;
  tier.delta_net = &delta_net;
}

}  // namespace quire
