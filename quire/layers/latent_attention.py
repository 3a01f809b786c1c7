"""Where a model meets latent attention: the up-projections absorbed into queries and outputs, and the backend.

Called by the models. Every head's key is W_K latent and its value W_V latent, so a score is (W_K^T query) . latent, and
the average of values is W_V (average of latents): neither keys nor values are ever made. Decodes and prompts are
computed alike, so that a token has the same bits in both.

Source: DeepSeek-AI 2024 (DeepSeek-V2), section 2.1.2.
"""

from __future__ import annotations

import torch
from torch import nn

from quire.attention.backend import AttentionBackend, Rotation
from quire.attention.context import ForwardContext
from quire.attention.latent import LatentParams, latent_backend_of
from quire.layers.head_linear import HeadLinear
from quire.layers.options import LayerOptions
from quire.layers.weight_target import WeightTarget


class LatentUp(nn.Module):
    """The up-projections of keys and values, of which checkpoints have one matrix (kv_b_proj). In the model's type.

    Attributes:
        key: takes a head's query to the space of latents.
        value: takes a head's average of latents to its value.
    """

    def __init__(
        self, num_heads: int, latent_size: int, nope_size: int, value_size: int, *, options: LayerOptions
    ) -> None:
        super().__init__()
        method, place = options.kernels.head_linear_method(), (options.dtype, options.device)
        self.key = HeadLinear(num_heads, nope_size, latent_size, method, *place)
        self.value = HeadLinear(num_heads, latent_size, value_size, method, *place)

    def target(self) -> WeightTarget:
        """Where the checkpoint's matrix goes."""
        return _UpTarget(self.key, self.value)


class _UpTarget(WeightTarget):
    """[num_heads * (nope_size + value_size), latent_size]: each head's rows of keys, then of values."""

    def __init__(self, key: HeadLinear, value: HeadLinear) -> None:
        self._key, self._value = key, value
        self._sizes = [key.input_size, value.output_size]
        self.shape = (key.num_heads * sum(self._sizes), key.output_size)

    def load(self, tensor: torch.Tensor) -> bool:
        """Split; a head's rows of keys multiply queries, so they become columns."""
        heads = tensor.view(self._key.num_heads, -1, self._key.output_size)
        keys, values = torch.split(heads, self._sizes, dim=1)
        is_finite = self._key.method.load(self._key, keys.transpose(1, 2).contiguous())
        return self._value.method.load(self._value, values) and is_finite

    def stored(self) -> torch.Tensor:
        """Both, put together."""
        keys, values = (part.method.stored(part) for part in (self._key, self._value))
        return torch.cat((keys.transpose(1, 2), values), dim=1).flatten(0, 1)


class LatentAttention(nn.Module):
    """One layer's latent attention, from the projections to the heads' outputs.

    Args:
        layer_idx: its place in `ForwardContext.kv_caches` and `metadata`.
        nope_size: elements of a query head that are not rotated.

    Raises:
        UnsupportedError: the attention backend does not have it.
    """

    def __init__(
        self,
        params: LatentParams,
        nope_size: int,
        value_size: int,
        backend: AttentionBackend,
        layer_idx: int,
        *,
        options: LayerOptions,
    ) -> None:
        super().__init__()
        self.params = params
        self.nope_size = nope_size
        self.backend = latent_backend_of(backend)
        self.layer_idx = layer_idx
        self.up = LatentUp(params.num_heads, params.latent_size, nope_size, value_size, options=options)

    def forward(
        self,
        query: torch.Tensor,
        latent: torch.Tensor,
        gain: torch.Tensor,
        rotation: Rotation,
        context: ForwardContext,
    ) -> torch.Tensor:
        """Cache the new tokens, then attend.

        Args:
            query: [num_tokens, num_heads * (nope_size + rope_size)]; rows may be strided.
            latent: [num_tokens, latent_size + rope_size], before norm and rotation; rows may be strided.
            gain: [latent_size]; of the norm of latents.

        Returns:
            [num_tokens, num_heads * value_size].
        """
        heads = query.view(len(query), self.params.num_heads, -1)
        absorbed = self.up.key(heads[..., : self.nope_size], room=self.params.rope_size)
        cache, metadata = context.attention(self.layer_idx)
        attended = self.backend.forward(self.params, heads, absorbed, latent, gain, rotation, cache, metadata)
        output: torch.Tensor = self.up.value(attended)
        return output.flatten(1)
