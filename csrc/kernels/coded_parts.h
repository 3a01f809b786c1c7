// What coded.cpp's table takes from the other source of this family.
#pragma once

#include "quire/coded.h"

namespace quire::QUIRE_TIER {

bool pack_codes(Pool& pool, const CodedPackArgs& args);
void gather_codes(Pool& pool, const CodedGatherArgs& args);

}  // namespace quire::QUIRE_TIER
