#include "bindings/bindings.h"

namespace quire {

void bind_quant(nb::module_&) {}

}  // namespace quire
