#include "bindings/bindings.h"

NB_MODULE(_quire_native, m) {
  quire::bind_runtime(m);
  quire::bind_elementwise(m);
  quire::bind_gemm(m);
  quire::bind_quant(m);
  quire::bind_block_quant(m);
  quire::bind_coded(m);
  quire::bind_moe(m);
  quire::bind_attention(m);
  quire::bind_latent(m);
  quire::bind_sampling(m);
  quire::bind_recurrent(m);
  quire::bind_state_space(m);
  quire::bind_step_graph(m);
  quire::bind_communicator(m);
  quire::bind_histories(m);
}
