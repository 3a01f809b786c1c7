// A checksum at the speed of memory, for files of our own: it finds damage, not forgery.
#pragma once

#include <cstdint>

#include "quire/pool.h"

namespace quire {

// 64 bits over `bytes` bytes; the same whatever the number of threads. Any change within one 8-byte word changes it.
uint64_t checksum(Pool& pool, const void* data, int64_t bytes);
// The same, by the caller's thread alone.
uint64_t checksum_alone(const void* data, int64_t bytes);

}  // namespace quire
