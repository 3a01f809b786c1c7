// Large buffers on huge pages.
#pragma once

#include <cstdint>

namespace quire {

// Zeroed memory, mapped for this process, 2 MiB aligned and advised to huge pages; null when there is none.
void* map_huge(int64_t bytes);
void unmap_huge(void* address, int64_t bytes);

}  // namespace quire
