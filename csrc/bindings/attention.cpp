#include "bindings/bindings.h"

namespace quire {

void bind_attention(nb::module_&) {}

}  // namespace quire
