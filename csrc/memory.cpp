#include "quire/memory.h"

#include <sys/mman.h>

namespace quire {

namespace {
constexpr int64_t kHugePage = int64_t{1} << 21;
}

void* map_huge(int64_t bytes) {
  // Mapped with a page to spare, and trimmed to start on a huge page.
  const int64_t wanted = (bytes + kHugePage - 1) / kHugePage * kHugePage;
  void* raw = mmap(nullptr, wanted + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (raw == MAP_FAILED) return nullptr;
  const uintptr_t start = reinterpret_cast<uintptr_t>(raw);
  const uintptr_t aligned = (start + kHugePage - 1) / kHugePage * kHugePage;
  if (aligned > start) munmap(raw, aligned - start);
  const uintptr_t rest = start + wanted + kHugePage - (aligned + wanted);
  if (rest > 0) munmap(reinterpret_cast<void*>(aligned + wanted), rest);
#ifdef MADV_HUGEPAGE
  madvise(reinterpret_cast<void*>(aligned), wanted, MADV_HUGEPAGE);  // refused where there are none: still correct
#endif
  return reinterpret_cast<void*>(aligned);
}

void unmap_huge(void* address, int64_t bytes) {
  if (address != nullptr) munmap(address, (bytes + kHugePage - 1) / kHugePage * kHugePage);
}

}  // namespace quire
