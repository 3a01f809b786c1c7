#pragma once

#include "quire/pool.h"
#include "quire/types.h"

namespace quire {

struct QuantKernels {
  int reserved;
};

}  // namespace quire
