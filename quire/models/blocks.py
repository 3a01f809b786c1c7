"""The decoder that the Llama-like families share; a family is this with its own attention block.

Module names are those of the checkpoints (`model.layers.0.self_attn.o_proj`), except that q, k, v and gate, up are
fused. Imported by the family files.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import nn

from quire.attention.backend import AttentionParams
from quire.attention.context import ForwardContext
from quire.core.kv_spec import AttentionSpec
from quire.layers.activation import SiluAndMul
from quire.layers.attention import Attention
from quire.layers.embedding import TokenEmbedding
from quire.layers.linear import Linear, MergedLinear
from quire.layers.logits import LogitsHead
from quire.layers.norm import RMSNorm
from quire.layers.rope import RotaryEmbedding
from quire.models.interfaces import BuildContext

# Cosines and sines of the step's tokens.
Rotation = tuple[torch.Tensor, torch.Tensor]


class DecoderAttention(nn.Module):
    """Grouped-query self-attention with rotary positions."""

    def __init__(self, build: BuildContext, layer_idx: int, name: str) -> None:
        super().__init__()
        arch, options = build.arch, build.options
        self.num_heads, self.num_kv_heads, self.head_size = build.num_heads, build.num_kv_heads, arch.head_size
        self.qkv_sizes = [heads * arch.head_size for heads in (self.num_heads, self.num_kv_heads, self.num_kv_heads)]
        shard_sizes = dict(zip(("q_proj", "k_proj", "v_proj"), self.qkv_sizes, strict=True))
        self.qkv_proj = MergedLinear(arch.hidden_size, shard_sizes, bias=arch.attention_bias, options=options)
        self.o_proj = Linear(self.qkv_sizes[0], arch.hidden_size, bias=arch.output_bias, options=options)
        params = AttentionParams(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=arch.head_size,
            scale=arch.head_size**-0.5,
            sliding_window=arch.sliding_window[layer_idx],
        )
        self.attn = Attention(params, build.backend, layer_idx, f"{name}.attn")

    def prepare_heads(self, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What a family does to the heads before they are rotated; nothing here."""
        return query, key

    def forward(self, x: torch.Tensor, rotation: Rotation, context: ForwardContext) -> torch.Tensor:
        """[num_tokens, hidden_size] -> [num_tokens, hidden_size]."""
        q, k, v = torch.split(self.qkv_proj(x), self.qkv_sizes, dim=-1)
        query, key = self.prepare_heads(self._split_heads(q, self.num_heads), self._split_heads(k, self.num_kv_heads))
        query, key = RotaryEmbedding.rotate(query, *rotation), RotaryEmbedding.rotate(key, *rotation)
        value = self._split_heads(v, self.num_kv_heads)
        output: torch.Tensor = self.o_proj(self.attn(query, key, value, context))
        return output

    def _split_heads(self, x: torch.Tensor, num_heads: int) -> torch.Tensor:
        return x.view(-1, num_heads, self.head_size)


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, build: BuildContext) -> None:
        super().__init__()
        arch, options = build.arch, build.options
        shard_sizes = dict.fromkeys(("gate_proj", "up_proj"), arch.intermediate_size)
        self.gate_up_proj = MergedLinear(arch.hidden_size, shard_sizes, bias=arch.mlp_bias, options=options)
        self.down_proj = Linear(arch.intermediate_size, arch.hidden_size, bias=arch.mlp_bias, options=options)
        self.activation = SiluAndMul()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[num_tokens, hidden_size] -> [num_tokens, hidden_size]."""
        output: torch.Tensor = self.down_proj(self.activation(self.gate_up_proj(x)))
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
        self, x: torch.Tensor, residual: torch.Tensor, rotation: Rotation, context: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add the layer before (`x`) to the residual stream; return this layer's output and the stream."""
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
        self.embed_tokens = TokenEmbedding(arch.vocab_size, arch.hidden_size, options=options)
        self.layers = nn.ModuleList(
            DecoderLayer(build, attention_class(build, layer_idx, f"model.layers.{layer_idx}.self_attn"))
            for layer_idx in range(arch.num_layers)
        )
        self.norm = RMSNorm(arch.hidden_size, arch.rms_norm_eps, options=options)
        self.rotary = RotaryEmbedding(arch.rope, build.max_model_len, options.device)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """[num_tokens] -> [num_tokens, hidden_size]."""
        x = self.embed_tokens(input_ids)
        residual = torch.zeros_like(x)
        rotation = self.rotary(positions)
        for layer in self.layers:
            x, residual = layer(x, residual, rotation, context)
        return self.norm.add_and_norm(x, residual)[0]


class DecoderForCausalLM(nn.Module):
    """A decoder with its output projection: implements `interfaces.CausalLM`."""

    attention_class: ClassVar[type[DecoderAttention]] = DecoderAttention

    def __init__(self, build: BuildContext) -> None:
        super().__init__()
        arch = build.arch
        self.model = DecoderModel(build, self.attention_class)
        tied_weight = self.model.embed_tokens.weight if arch.tie_word_embeddings else None
        self.lm_head = LogitsHead(arch.vocab_size, arch.hidden_size, options=build.options, tied_weight=tied_weight)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """Hidden states [num_tokens, hidden_size] of the step's tokens; writes their keys and values."""
        hidden: torch.Tensor = self.model(input_ids, positions, context)
        return hidden

    def compute_logits(self, hidden_rows: torch.Tensor) -> torch.Tensor:
        """[num_logits, hidden_size] -> [num_logits, vocab_size] float32."""
        logits: torch.Tensor = self.lm_head(hidden_rows)
        return logits

    def kv_cache_specs(self, block_size: int) -> dict[str, AttentionSpec]:
        """Layer name -> what it needs from the KV cache, in layer order."""
        dtype_bytes = self.model.embed_tokens.weight.element_size()
        specs = {}
        for module in self.modules():
            if isinstance(module, Attention):
                specs[module.layer_name] = AttentionSpec(
                    block_size=block_size,
                    num_kv_heads=module.params.num_kv_heads,
                    head_size=module.params.head_size,
                    dtype_bytes=dtype_bytes,
                    sliding_window=module.params.sliding_window,
                )
        return specs

    def checkpoint_tensors(self) -> dict[str, torch.Tensor]:
        """The checkpoint's name of each tensor -> the memory it is copied to (a view, for fused projections)."""
        tensors: dict[str, torch.Tensor] = {}
        for module_name, module in self.named_modules():
            for name, parameter in module.named_parameters(prefix=module_name, recurse=False):
                if isinstance(module, MergedLinear):
                    parent, leaf = module_name.rpartition(".")[0], name.rpartition(".")[2]
                    tensors.update({f"{parent}.{shard}.{leaf}": rows for shard, rows in module.shards(parameter.data)})
                elif module is not self.lm_head or parameter is not self.model.embed_tokens.weight:
                    tensors[name] = parameter.data
        return tensors
