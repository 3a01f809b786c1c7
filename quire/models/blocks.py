"""The decoder that the Llama-like families share; a family is this with its own attention block.

Module names are those of the checkpoints (`model.layers.0.self_attn.o_proj`), except that q, k, v and gate, up are
fused. Imported by the family files.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn

from quire.attention.backend import AttentionParams, HeadNorms, Rotation
from quire.attention.context import ForwardContext
from quire.core.kv_spec import FullAttentionSpec, KVCacheSpec, SlidingWindowSpec
from quire.layers.attention import Attention
from quire.layers.embedding import TokenTable
from quire.layers.linear import Linear, MergedLinear
from quire.layers.norm import RMSNorm
from quire.layers.rope import RotaryEmbedding
from quire.layers.weight_target import TensorTarget, WeightTarget
from quire.models.interfaces import BuildContext


class DecoderAttention(nn.Module):
    """Grouped-query self-attention with rotary positions.

    Attributes:
        head_norms: norms on the heads before they are rotated, in families that have them.
    """

    head_norms: HeadNorms | None = None

    def __init__(self, build: BuildContext, layer_idx: int, name: str) -> None:
        super().__init__()
        arch, options = build.arch, build.options
        query_size, kv_size = build.num_heads * arch.head_size, build.num_kv_heads * arch.head_size
        shard_sizes = {"q_proj": query_size, "k_proj": kv_size, "v_proj": kv_size}
        self.qkv_proj = MergedLinear(arch.hidden_size, shard_sizes, bias=arch.attention_bias, options=options)
        self.o_proj = Linear(query_size, arch.hidden_size, bias=arch.output_bias, options=options)
        params = AttentionParams(
            num_heads=build.num_heads,
            num_kv_heads=build.num_kv_heads,
            head_size=arch.head_size,
            scale=arch.head_size**-0.5,
            sliding_window=arch.sliding_window[layer_idx],
        )
        self.attn = Attention(params, build.backend, layer_idx, f"{name}.attn")

    def forward(self, x: torch.Tensor, rotation: Rotation, context: ForwardContext) -> torch.Tensor:
        """[num_tokens, hidden_size] -> [num_tokens, hidden_size]."""
        output: torch.Tensor = self.o_proj(self.attn(self.qkv_proj(x), rotation, context, self.head_norms))
        return output


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, build: BuildContext) -> None:
        super().__init__()
        arch, options = build.arch, build.options
        shard_sizes = dict.fromkeys(("gate_proj", "up_proj"), arch.intermediate_size)
        self.gate_up_proj = MergedLinear(arch.hidden_size, shard_sizes, bias=arch.mlp_bias, options=options)
        self.down_proj = Linear(arch.intermediate_size, arch.hidden_size, bias=arch.mlp_bias, options=options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[num_tokens, hidden_size] -> [num_tokens, hidden_size]."""
        output: torch.Tensor = self.down_proj(self.gate_up_proj.forward_gated(x))
        return output


class DecoderLayer(nn.Module):
    """Attention and MLP, each on a normalised input and added to the residual stream."""

    def __init__(self, build: BuildContext, attention: DecoderAttention) -> None:
        super().__init__()
        size, eps, options = build.arch.hidden_size, build.arch.rms_norm_eps, build.options
        self.self_attn = attention
        self.mlp = GatedMLP(build)
        self.input_layernorm = RMSNorm(size, eps, options=options)
        self.post_attention_layernorm = RMSNorm(size, eps, options=options)

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, rotation: Rotation, context: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add the layer before (`x`) to the residual stream; return this layer's output and the stream.

        The first layer has no stream yet (None): it begins with the embedding.
        """
        if residual is None:
            x, residual = self.input_layernorm(x), x
        else:
            x, residual = self.input_layernorm.add_and_norm(x, residual)
        x = self.self_attn(x, rotation, context)
        x, residual = self.post_attention_layernorm.add_and_norm(x, residual)
        return self.mlp(x), residual


class DecoderModel(nn.Module):
    """Embedding, layers, final norm."""

    layers: nn.ModuleList

    def __init__(self, build: BuildContext, attention_class: type[DecoderAttention]) -> None:
        super().__init__()
        arch, options = build.arch, build.options
        self.embed_tokens = TokenTable(arch.vocab_size, arch.hidden_size, options=options)
        self.layers = nn.ModuleList(
            DecoderLayer(build, attention_class(build, layer_idx, f"model.layers.{layer_idx}.self_attn"))
            for layer_idx in range(arch.num_layers)
        )
        self.norm = RMSNorm(arch.hidden_size, arch.rms_norm_eps, options=options)
        self.rotary = RotaryEmbedding(arch.rope, build.max_model_len, options.device)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """[num_tokens] -> [num_tokens, hidden_size]."""
        x, residual = self.embed_tokens.lookup(input_ids), None
        rotation = self.rotary(positions)
        for layer in self.layers:
            x, residual = layer(x, residual, rotation, context)
        return self.norm(x) if residual is None else self.norm.add_and_norm(x, residual)[0]


class DecoderForCausalLM(nn.Module):
    """A decoder with its output projection: implements `interfaces.CausalLM`."""

    attention_class: ClassVar[type[DecoderAttention]] = DecoderAttention

    def __init__(self, build: BuildContext) -> None:
        super().__init__()
        arch = build.arch
        self.model = DecoderModel(build, self.attention_class)
        self.lm_head = (
            self.model.embed_tokens
            if arch.tie_word_embeddings
            else TokenTable(arch.vocab_size, arch.hidden_size, options=build.options)
        )
        self.dtype = build.options.dtype

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """Hidden states [num_tokens, hidden_size] of the step's tokens; writes their keys and values."""
        hidden: torch.Tensor = self.model(input_ids, positions, context)
        return hidden

    def compute_logits(self, hidden_rows: torch.Tensor) -> torch.Tensor:
        """[num_logits, hidden_size] -> [num_logits, vocab_size] float32."""
        return self.lm_head.logits(hidden_rows)

    def kv_cache_specs(self, block_size: int) -> dict[str, KVCacheSpec]:
        """Layer name -> what it needs from the KV cache, in layer order."""
        specs: dict[str, KVCacheSpec] = {}
        for module in self.modules():
            if isinstance(module, Attention):
                params, window = module.params, module.params.sliding_window
                shape = {
                    "block_size": block_size, "num_kv_heads": params.num_kv_heads, "head_size": params.head_size,
                    "dtype_bytes": self.dtype.itemsize,
                }  # fmt: skip
                specs[module.layer_name] = (
                    FullAttentionSpec(**shape) if window is None else SlidingWindowSpec(**shape, sliding_window=window)
                )
        return specs

    def checkpoint_targets(self) -> dict[str, WeightTarget]:
        """The checkpoint's name of each tensor -> where it goes (rows of a fused projection, for some)."""
        targets: dict[str, WeightTarget] = {}
        for name, module in self.named_modules():
            if isinstance(module, Linear):
                targets.update(module.targets(name))
            else:
                own = module.named_parameters(prefix=name, recurse=False)
                targets.update({parameter_name: TensorTarget(parameter.data) for parameter_name, parameter in own})
        return targets

    def stored_tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor that holds weights, as stored, under this program's own names."""
        weights = dict(self.named_parameters())
        packed = {name: tensor for name, tensor in self.named_buffers() if not name.startswith("model.rotary.")}
        return {name: tensor.detach() for name, tensor in {**weights, **packed}.items()}
