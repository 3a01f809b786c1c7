#include "bindings/bindings.h"

namespace quire {

void bind_sampling(nb::module_&) {}

}  // namespace quire
