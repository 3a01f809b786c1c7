// F16: sixteen floats, whatever the registers of the tier. The same operations with the same rounding in every tier,
// so that a kernel written once gives the same bits everywhere. Fused multiply-add is offered for exact products only.
#pragma once

#ifndef QUIRE_TIER
#error "kernel sources are compiled per tier: see CMakeLists.txt"
#endif

#include "quire/types.h"

#if defined(QUIRE_TIER_AVX512) || defined(QUIRE_TIER_AVX512_BF16) || defined(QUIRE_TIER_AMX)
#include "simd/avx512.h"
#elif defined(QUIRE_TIER_AVX2)
#include "simd/avx2.h"
#else
#include "simd/portable.h"
#endif

#include "simd/math.h"
#include "simd/prefetch.h"

namespace quire::QUIRE_TIER {

// Runs `body(task, thread)` for every task. `body` is a callable of this tier: nothing of it is shared between tiers.
template <class Pool, class Body>
static inline void parallel_for(Pool& pool, int64_t num_tasks, const Body& body) {
  pool.run(num_tasks, [](void* context, int64_t task, int thread) { (*static_cast<const Body*>(context))(task, thread); },
           const_cast<Body*>(&body));
}

// Holds `pool`: its shared scratch is one kernel call's at a time.
template <class Pool>
class PoolLock {
 public:
  explicit PoolLock(Pool& pool) : pool_(pool) { pool_.lock(); }
  ~PoolLock() { pool_.unlock(); }
  PoolLock(const PoolLock&) = delete;
  PoolLock& operator=(const PoolLock&) = delete;

 private:
  Pool& pool_;
};

}  // namespace quire::QUIRE_TIER
