// Products of groups of rows, each with a matrix of its own: those of the experts of a layer, in one call.
#pragma once

#include "quire/types.h"

namespace quire {

// Rows starts[g] .. starts[g + 1] - 1 of `out` are products with matrix g. Matrices follow each other, each of whole
// panels, and so do their scales and their biases. A row has the bits of the product with its matrix alone.
template <class Linear>
struct Grouped {
  Linear linear;  // num_rows: of all groups; weight, scales, bias: of matrix 0
  const int32_t* starts;
  int64_t num_groups;
  int64_t num_x_rows;  // that linear.x_rows may name
};

}  // namespace quire
