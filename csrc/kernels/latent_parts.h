// What latent_attention.cpp's table takes from the other sources of this family.
#pragma once

#include "quire/latent.h"

namespace quire::QUIRE_TIER {

void head_linear(Pool& pool, const HeadLinearArgs& args);

}  // namespace quire::QUIRE_TIER
