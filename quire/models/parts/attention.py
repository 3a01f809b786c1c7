"""The attention block: fused projection, paged attention, output projection."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from quire.attention.backend import AttentionParams, HeadNorms
from quire.attention.context import ForwardContext
from quire.config.model_arch import AttentionArch
from quire.core.kv_spec import ChunkedLocalAttentionSpec, FullAttentionSpec, KVCacheSpec, SlidingWindowSpec
from quire.layers.attention import Attention
from quire.layers.linear import Linear
from quire.layers.norm import Norm
from quire.layers.options import LayerOptions
from quire.layers.weight_target import ReorderedTarget, TensorTarget, WeightTarget
from quire.models.interfaces import BuildContext
from quire.models.parts.head_shards import own_heads
from quire.models.parts.part import Part
from quire.models.tensor_layouts import BY_HEAD, layout_of, linear_targets, qkv_targets, rotated_rows


class AttentionPart(Part):
    """Grouped-query self-attention.

    Attributes:
        qkv_proj: the output gates of all heads where they have some, then queries, keys, values.
        heads: those of this rank; None = every rank has all.
    """

    def __init__(self, build: BuildContext, arch: AttentionArch, layer_idx: int, name: str) -> None:
        super().__init__()
        options, hidden_size, head_size = build.options, build.arch.hidden_size, arch.head_size
        self.arch = arch
        self.layouts = build.family.layouts
        num_kv = 0 if arch.shares_cache_of is not None else 2 * arch.num_kv_heads
        gate_width = arch.num_heads * head_size if arch.has_output_gate else 0
        width = gate_width + (arch.num_heads + num_kv) * head_size
        self.kernels = options.kernels
        self.heads = own_heads(build, arch)
        self.own_arch = arch if self.heads is None else self.heads.arch
        self.gate_width = self.own_arch.num_heads * head_size if arch.has_output_gate else 0
        input_size = arch.input_size or hidden_size
        method = None if self.heads is None else options.kernels.own_rows(self.heads.rows, width, input_size)
        self.qkv_proj = Linear(input_size, width, bias=arch.qkv_bias, options=options, method=method)
        self.o_proj = Linear(arch.num_heads * head_size, hidden_size, bias=arch.output_bias, options=options)
        self.head_norms = self._head_norms(options)
        depends_on_position = arch.rope is not None or arch.temperature is not None
        self.rotary = build.rotary(arch.rope, arch.temperature) if depends_on_position else None
        self.sinks: nn.Parameter | None = None
        if arch.has_sinks:
            self.sinks = nn.Parameter(torch.empty(arch.num_heads, device=options.device), requires_grad=False)
        if arch.shares_cache_of is None:
            place = build.cache_layers.add(f"{name}.attn", self)
        else:
            own, other = f".{layer_idx}.", f".{arch.shares_cache_of}."
            place = build.cache_layers.index(f"{name}.attn".replace(own, other, 1))
        self.attn = Attention(attention_params(self.own_arch), build.backend, place)

    def _head_norms(self, options: LayerOptions) -> HeadNorms | None:
        """The norms of heads, and their gains as parameters."""
        arch = self.arch
        if arch.head_norm is None:
            return None
        has_own_gains = arch.has_row_norm or arch.head_norm.is_centered
        num_queries, num_keys = (arch.num_heads, arch.num_kv_heads) if has_own_gains else (1, 1)
        self.q_norm = Norm(num_queries * arch.head_size, arch.head_norm, options=options)
        ones = torch.ones(arch.head_size, dtype=options.dtype, device=options.device)
        key = ones.repeat(num_keys)
        if arch.shares_cache_of is None:
            self.k_norm = Norm(num_keys * arch.head_size, arch.head_norm, options=options)
            key = self.k_norm.weight
        value = ones if arch.has_value_norm else None
        return HeadNorms(
            self.q_norm.weight, key, arch.head_norm.eps, value, after_rotation=arch.norm_after_rope,
            is_centered=arch.head_norm.is_centered,
        )  # fmt: skip

    def forward(self, x: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """As `Part`."""
        rotation = None if self.rotary is None else self.rotary(positions)
        projected = self.qkv_proj(x)
        qkv = projected[:, self.gate_width :] if self.gate_width else projected
        sinks = self.sinks if self.sinks is None or self.heads is None else self.sinks[slice(*self.heads.queries)]
        attended = self.attn(qkv, rotation, context, self.head_norms, sinks)
        if self.gate_width:
            attended = self.kernels.multiply(attended, projected[:, : self.gate_width], "sigmoid")
        if self.heads is not None:
            attended = self.heads.all_gather(attended)
        output: torch.Tensor = self.o_proj(attended)
        return output if self.arch.output_scale == 1.0 else self.kernels.scale(output, self.arch.output_scale)

    def targets(self, name: str) -> Iterator[tuple[str, WeightTarget]]:
        """As `Part`."""
        yield from qkv_targets(self.qkv_proj, name, self.arch, self.layouts)
        _, is_transposed = layout_of(self.layouts, "self_attn.o_proj")
        yield from linear_targets(self.o_proj, f"{name}.o_proj", is_transposed=is_transposed)
        if self.head_norms is not None:
            yield from self._norm_targets(self.q_norm, f"{name}.q_norm", self.arch.num_heads)
            if self.arch.shares_cache_of is None:
                yield from self._norm_targets(self.k_norm, f"{name}.k_norm", self.arch.num_kv_heads)
        if self.sinks is not None:
            yield f"{name}.sinks", TensorTarget(self.sinks.data)

    def _norm_targets(self, norm: Norm, name: str, num_heads: int) -> Iterator[tuple[str, WeightTarget]]:
        """The gains; those of each head, in the order of the projection's rows, may be a tensor for each head."""
        if not norm.is_centered:
            yield from norm.targets(name)
            return
        gains, order = norm.weight.data.view(num_heads, -1), rotated_rows(self.arch)
        if layout_of(self.layouts, "self_attn.head_norms")[0] == BY_HEAD:
            for head, own in enumerate(gains):
                yield f"{name}.norms.{head}.weight", ReorderedTarget(TensorTarget(own, neutral=1.0), order)
        else:
            yield f"{name}.weight", ReorderedTarget(TensorTarget(gains.t(), neutral=1.0), order, is_transposed=True)

    def kv_cache_spec(self, block_size: int, dtype_bytes: int) -> KVCacheSpec:
        """Keys and values of every token, of a window or of a chunk."""
        shape = {
            "block_size": block_size, "num_kv_heads": self.own_arch.num_kv_heads, "head_size": self.arch.head_size,
            "dtype_bytes": dtype_bytes,
        }  # fmt: skip
        if self.arch.chunk is not None:
            return ChunkedLocalAttentionSpec(**shape, attention_chunk_size=self.arch.chunk)
        if self.arch.window is not None:
            return SlidingWindowSpec(**shape, sliding_window=self.arch.window)
        return FullAttentionSpec(**shape)


def attention_params(arch: AttentionArch) -> AttentionParams:
    """What the attention backend needs of a layer."""
    return AttentionParams(
        num_heads=arch.num_heads, num_kv_heads=arch.num_kv_heads, head_size=arch.head_size, scale=arch.scale,
        sliding_window=arch.window, chunk=arch.chunk, soft_cap=arch.soft_cap, alibi_slopes=arch.alibi_slopes,
        shares_kv=arch.shares_cache_of is not None, limit=arch.clip,
    )  # fmt: skip
