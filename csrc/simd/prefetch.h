// Lines of memory wanted soon. Own assembly: GCC 12 takes a function of one prefetch for one without effect, and drops
// calls to it that it has not inlined yet.
#pragma once

namespace quire::QUIRE_TIER {

[[gnu::always_inline]] static inline void prefetch_l1(const void* p) {
#if defined(__x86_64__)
  asm volatile("prefetcht0 %0" ::"m"(*static_cast<const char*>(p)));
#else
  __builtin_prefetch(p, 0, 3);
#endif
}
[[gnu::always_inline]] static inline void prefetch_l2(const void* p) {
#if defined(__x86_64__)
  asm volatile("prefetcht1 %0" ::"m"(*static_cast<const char*>(p)));
#else
  __builtin_prefetch(p, 0, 2);
#endif
}

}  // namespace quire::QUIRE_TIER
