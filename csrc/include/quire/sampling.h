#pragma once

#include "quire/pool.h"
#include "quire/types.h"

namespace quire {

struct SamplingKernels {
  int reserved;
};

}  // namespace quire
