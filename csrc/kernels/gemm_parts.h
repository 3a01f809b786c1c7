// What gemm.cpp's table takes from the other sources of this family.
#pragma once

#include "quire/gemm.h"

namespace quire::QUIRE_TIER {

bool pack_rows(Pool& pool, const PackArgs& args);
void read_rows(Pool& pool, const ReadRowsArgs& args);
double run_ceiling(Pool& pool, Ceiling ceiling, const void* data, int64_t bytes, int64_t steps);

}  // namespace quire::QUIRE_TIER
