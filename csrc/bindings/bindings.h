// What the binding files share. Only csrc/bindings knows Python; tensors cross as addresses and sizes, which the typed
// wrappers in quire/kernels/native have checked.
#pragma once

#include <nanobind/nanobind.h>

#include "quire/tiers.h"

namespace nb = nanobind;

namespace quire {

template <class T>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

inline const Tier& tier_at(int index) { return tiers[index]; }

void bind_runtime(nb::module_& m);
void bind_elementwise(nb::module_& m);
void bind_gemm(nb::module_& m);
void bind_quant(nb::module_& m);
void bind_block_quant(nb::module_& m);
void bind_coded(nb::module_& m);
void bind_moe(nb::module_& m);
void bind_attention(nb::module_& m);
void bind_latent(nb::module_& m);
void bind_sampling(nb::module_& m);
void bind_recurrent(nb::module_& m);
void bind_state_space(nb::module_& m);
void bind_step_graph(nb::module_& m);
void bind_communicator(nb::module_& m);
void bind_histories(nb::module_& m);

}  // namespace quire
