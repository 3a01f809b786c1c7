// The tiers: the same kernels compiled for different instruction sets, with the same bits from each.
#pragma once

#include "quire/attention.h"
#include "quire/block_quant.h"
#include "quire/causal_conv.h"
#include "quire/coded.h"
#include "quire/delta_net.h"
#include "quire/elementwise.h"
#include "quire/gemm.h"
#include "quire/latent.h"
#include "quire/moe.h"
#include "quire/quant.h"
#include "quire/sampling.h"
#include "quire/selftest.h"
#include "quire/state_space.h"

namespace quire {

struct Tier {
  const char* name;
  bool (*is_supported)();  // by this CPU and this operating system
  const ElementwiseKernels* elementwise;
  const GemmKernels* gemm;
  const QuantKernels* quant;
  const BlockKernels* block;
  const CodedKernels* coded;
  const MoeKernels* moe;
  const AttentionKernels* attention;
  const LatentKernels* latent;
  const SamplingKernels* sampling;
  const CausalConvKernels* causal_conv;
  const StateSpaceKernels* state_space;
  const DeltaNetKernels* delta_net;
  const SelfTestKernels* self_test;
};

// Every tier of this build, best first; the emulated one last.
extern const Tier tiers[];
extern const int num_tiers;

}  // namespace quire
