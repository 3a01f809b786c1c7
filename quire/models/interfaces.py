"""What the worker may ask of a model, and what a model is built from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from quire.attention.backend import AttentionBackend
from quire.attention.context import ForwardContext
from quire.config.hf_config import ModelArch
from quire.core.kv_spec import KVCacheSpec
from quire.distributed.parallel_context import ParallelContext
from quire.layers.options import LayerOptions
from quire.layers.weight_target import WeightTarget


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildContext:
    """Everything a model's constructor is given.

    Attributes:
        options: type and place of the parameters, and the kernels.
        backend: serves every attention layer of the model.
        max_model_len: positions the rotary tables cover, in tokens.
    """

    arch: ModelArch
    options: LayerOptions
    parallel: ParallelContext
    backend: AttentionBackend
    max_model_len: int

    @property
    def num_heads(self) -> int:
        """Query heads on this rank."""
        return self.arch.total_num_heads // self.parallel.tensor_parallel_size

    @property
    def num_kv_heads(self) -> int:
        """Key/value heads on this rank."""
        return self.arch.total_num_kv_heads // self.parallel.tensor_parallel_size


class CausalLM(Protocol):
    """A decoder that predicts the next token of each sequence. Inputs are flat: no batch dimension."""

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """Hidden states of the step's tokens; writes their keys and values to the cache.

        Args:
            input_ids, positions: [num_tokens] int32 or int64.

        Returns:
            [num_tokens, hidden_size], normalised.
        """
        ...

    def compute_logits(self, hidden_rows: torch.Tensor) -> torch.Tensor:
        """[num_logits, hidden_size] -> [num_logits, vocab_size] float32."""
        ...

    def kv_cache_specs(self, block_size: int) -> dict[str, KVCacheSpec]:
        """Layer name -> what it needs from the KV cache; in the order of `ForwardContext.kv_caches`."""
        ...

    def checkpoint_targets(self) -> dict[str, WeightTarget]:
        """The checkpoint's name of each tensor -> where it goes."""
        ...

    def stored_tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor that holds weights, as stored, under this program's own names."""
        ...
