"""What the worker may ask of a model, and what a model is built from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch

from quire.attention.backend import AttentionBackend
from quire.attention.context import ForwardContext
from quire.config.hf_rope import RopeConfig
from quire.config.model_arch import AttentionTemperature, ModelArch
from quire.config.model_family import ModelFamily
from quire.core.kv_spec import KVCacheSpec
from quire.distributed.parallel_context import ParallelContext
from quire.layers.options import LayerOptions
from quire.layers.rope import RotaryEmbedding, query_scales
from quire.layers.weight_target import WeightTarget


class CachedPart(Protocol):
    """A part of a layer that keeps something in the KV cache."""

    def kv_cache_spec(self, block_size: int, dtype_bytes: int) -> KVCacheSpec:
        """What it needs; `dtype_bytes` of an activation."""
        ...


class CacheLayers:
    """The parts that keep something in the KV cache, in the order of `ForwardContext.kv_caches`. Of one model."""

    def __init__(self) -> None:
        self.parts: dict[str, CachedPart] = {}

    def add(self, name: str, part: CachedPart) -> int:
        """The place of a new part."""
        assert name not in self.parts, f"two parts are named {name}"
        self.parts[name] = part
        return len(self.parts) - 1

    def index(self, name: str) -> int:
        """The place of a part that was added."""
        return list(self.parts).index(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildContext:
    """Everything a model's constructor is given.

    Attributes:
        family: how checkpoints name and store tensors.
        options: type and place of the parameters, and the kernels.
        backend: serves every attention layer of the model.
        max_model_len: positions the rotary tables cover, in tokens.
        cache_layers: filled while the model is built.
    """

    arch: ModelArch
    family: type[ModelFamily]
    options: LayerOptions
    parallel: ParallelContext
    backend: AttentionBackend
    max_model_len: int
    cache_layers: CacheLayers = field(default_factory=CacheLayers)
    rotaries: dict[object, RotaryEmbedding] = field(default_factory=dict)

    def rotary(self, rope: RopeConfig | None, temperature: AttentionTemperature | None = None) -> RotaryEmbedding:
        """The tables of what depends on positions, which all layers of the same kind share."""
        key = rope, temperature
        if key not in self.rotaries:
            scales = None
            if temperature is not None:
                scales = query_scales(
                    self.max_model_len, temperature.coefficient, temperature.period, temperature.offset
                )
            self.rotaries[key] = RotaryEmbedding(rope, self.max_model_len, self.options.device, scales)
        return self.rotaries[key]


class CausalLM(Protocol):
    """A decoder that predicts the next token of each sequence. Inputs are flat: no batch dimension."""

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """Hidden states of the step's tokens; writes their keys and values to the cache.

        Args:
            input_ids, positions: [num_tokens] int32 or int64.

        Returns:
            [num_tokens, hidden_size], normalised; of tokens that are not `context.wanted` anything finite.
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

    def ignored_tensors(self) -> tuple[str, ...]:
        """Patterns of names that checkpoints may have and the model does not need."""
        ...

    def stored_tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor that holds weights, as stored, under this program's own names."""
        ...
