#pragma once

#include "quire/pool.h"
#include "quire/types.h"

namespace quire {

struct GemmKernels {
  int reserved;
};

}  // namespace quire
