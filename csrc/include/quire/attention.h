#pragma once

#include "quire/pool.h"
#include "quire/types.h"

namespace quire {

struct AttentionKernels {
  int reserved;
};

}  // namespace quire
