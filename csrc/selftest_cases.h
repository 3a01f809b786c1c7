// What a self-test runs: small calls of every kernel of a tier, whose bits must be those of the portable tier.
#pragma once

#include "quire/tiers.h"

namespace quire {

struct SelfTestCase {
  const char* name;
  int64_t out_bytes;
  void (*run)(const Tier&, Pool&, void* out);
};
extern const SelfTestCase self_test_cases[];
extern const int num_self_test_cases;

// Cases in files of their own.
void block_products(const Tier& tier, Pool& pool, void* out);
extern const int64_t kBlockProductsBytes;
void coded_products(const Tier& tier, Pool& pool, void* out);
extern const int64_t kCodedProductsBytes;

// A tier whose kernels can be exchanged one by one.
struct TierCopy {
  explicit TierCopy(const Tier& original);
  TierCopy(const TierCopy&) = delete;
  TierCopy& operator=(const TierCopy&) = delete;

  ElementwiseKernels elementwise;
  GemmKernels gemm;
  QuantKernels quant;
  BlockKernels block;
  CodedKernels coded;
  MoeKernels moe;
  AttentionKernels attention;
  LatentKernels latent;
  SamplingKernels sampling;
  CausalConvKernels causal_conv;
  StateSpaceKernels state_space;
  DeltaNetKernels delta_net;
  Tier tier;
};

// For tests of the self-test: a kernel that does nothing in place of the named one.
struct IdleKernel {
  const char* name;
  void (*put)(TierCopy&);
};
extern const IdleKernel idle_kernels[];
extern const int num_idle_kernels;

}  // namespace quire
