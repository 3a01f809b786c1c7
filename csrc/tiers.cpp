#include "quire/tiers.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__) && defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace quire {

#define QUIRE_DECLARE(tier)                            \
  namespace tier {                                     \
  extern const ElementwiseKernels elementwise_kernels; \
  extern const GemmKernels gemm_kernels;               \
  extern const QuantKernels quant_kernels;             \
  extern const BlockKernels block_kernels;             \
  extern const CodedKernels coded_kernels;             \
  extern const MoeKernels moe_kernels;                 \
  extern const AttentionKernels attention_kernels;     \
  extern const LatentKernels latent_kernels;           \
  extern const SamplingKernels sampling_kernels;       \
  extern const CausalConvKernels causal_conv_kernels;  \
  extern const StateSpaceKernels state_space_kernels;  \
  extern const DeltaNetKernels delta_net_kernels;      \
  extern const SelfTestKernels self_test_kernels;      \
  }
#define QUIRE_TIER_ENTRY(tier, is_supported)                                            \
  {                                                                                     \
#tier, is_supported, &tier::elementwise_kernels, &tier::gemm_kernels,                   \
        &tier::quant_kernels, &tier::block_kernels, &tier::coded_kernels, &tier::moe_kernels, \
        &tier::attention_kernels, &tier::latent_kernels,                                \
        &tier::sampling_kernels, &tier::causal_conv_kernels, &tier::state_space_kernels, \
        &tier::delta_net_kernels, &tier::self_test_kernels                              \
  }

QUIRE_DECLARE(portable)
#if QUIRE_HAS_AVX2
QUIRE_DECLARE(avx2)
QUIRE_DECLARE(avx512)
QUIRE_DECLARE(avx512_bf16)
QUIRE_DECLARE(amx)
QUIRE_DECLARE(amx_emulated)
#endif

namespace {

bool always() { return true; }

#if QUIRE_HAS_AVX2

struct CpuId {
  uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
};

CpuId cpuid(uint32_t leaf, uint32_t subleaf) {
  CpuId r;
  __get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx);
  return r;
}

bool has_bits(uint64_t value, uint64_t mask) { return (value & mask) == mask; }

// The registers that the operating system saves (XCR0); 0 when it saves none.
uint64_t saved_registers() {
  if (!has_bits(cpuid(1, 0).ecx, 1u << 27)) return 0;
  uint32_t low, high;
  asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return static_cast<uint64_t>(high) << 32 | low;
}

bool has_avx2() {
  constexpr uint32_t kFma = 1u << 12, kF16c = 1u << 29, kAvx = 1u << 28;  // leaf 1, ecx
  constexpr uint32_t kAvx2 = 1u << 5, kBmi2 = 1u << 8;                    // leaf 7, ebx
  return has_bits(saved_registers(), 0x6) && has_bits(cpuid(1, 0).ecx, kFma | kF16c | kAvx) &&
         has_bits(cpuid(7, 0).ebx, kAvx2 | kBmi2);
}

bool has_avx512() {
  constexpr uint32_t kF = 1u << 16, kDq = 1u << 17, kBw = 1u << 30, kVl = 1u << 31;  // leaf 7, ebx
  constexpr uint32_t kVnni = 1u << 11;                                               // leaf 7, ecx
  const CpuId features = cpuid(7, 0);
  return has_avx2() && has_bits(saved_registers(), 0xe6) && has_bits(features.ebx, kF | kDq | kBw | kVl) &&
         has_bits(features.ecx, kVnni);
}

bool has_avx512_bf16() {
  constexpr uint32_t kBf16 = 1u << 5;  // leaf 7, subleaf 1, eax
  return has_avx512() && cpuid(7, 0).eax >= 1 && has_bits(cpuid(7, 1).eax, kBf16);
}

// The kernel lets a process use tile data only after it asked; the answer covers its threads and forked children.
bool may_use_tiles() {
#if defined(__linux__) && defined(SYS_arch_prctl)
  constexpr long kGetPermission = 0x1022, kRequestPermission = 0x1023, kTileData = 18;
  if (syscall(SYS_arch_prctl, kRequestPermission, kTileData) != 0) return false;
  uint64_t permitted = 0;
  return syscall(SYS_arch_prctl, kGetPermission, &permitted) == 0 && has_bits(permitted, uint64_t{1} << kTileData);
#else
  return false;
#endif
}

bool has_amx() {
  constexpr uint32_t kBf16 = 1u << 22, kTile = 1u << 24, kInt8 = 1u << 25;  // leaf 7, edx
  return has_avx512() && has_bits(saved_registers(), uint64_t{3} << 17) &&
         has_bits(cpuid(7, 0).edx, kBf16 | kTile | kInt8) && may_use_tiles();
}

#endif

}  // namespace

const Tier tiers[] = {
#if QUIRE_HAS_AVX2
    QUIRE_TIER_ENTRY(amx, has_amx),
    QUIRE_TIER_ENTRY(avx512_bf16, has_avx512_bf16),
    QUIRE_TIER_ENTRY(avx512, has_avx512),
    QUIRE_TIER_ENTRY(avx2, has_avx2),
#endif
    QUIRE_TIER_ENTRY(portable, always),
#if QUIRE_HAS_AVX2
    QUIRE_TIER_ENTRY(amx_emulated, always),
#endif
};
const int num_tiers = static_cast<int>(sizeof(tiers) / sizeof(tiers[0]));

}  // namespace quire
