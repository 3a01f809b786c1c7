"""The network of `leaf` in plain PyTorch: a small Qwen3-shaped decoder.

Called by the trainer (train.py), the evaluation (generate.py) and the export
(export.py). Parameter names are those of a Hugging Face Qwen3 checkpoint, so
exporting is a plain save. The module holds the weights and two fixed rotary
tables, and no other state.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training import fused


@dataclass(frozen=True)
class LeafConfig:
    """Sizes of the network (units: elements unless said otherwise)."""

    vocab_size: int = 3072
    hidden_size: int = 256
    intermediate_size: int = 704
    num_hidden_layers: int = 7
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 2048

    def to_dict(self) -> dict:
        """Returns the sizes as a plain dictionary."""
        return asdict(self)


class RMSNorm(nn.Module):
    """Root-mean-square normalisation over the last axis, with a learned gain."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalises `x` [..., size] and keeps its dtype."""
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.eps)


def rotary_tables(config: LeafConfig) -> tuple[Tensor, Tensor]:
    """Builds the cosine and sine tables, both [max_position, head_dim] float32."""
    half = torch.arange(0, config.head_dim, 2, dtype=torch.float32)
    freqs = config.rope_theta ** (-half / config.head_dim)
    angles = torch.outer(torch.arange(config.max_position_embeddings).float(), freqs)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates `x` [batch, heads, time, head_dim]; halves form the pairs."""
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


def side_by_side(x: Tensor) -> Tensor:
    """Orders the middle axis of `x` [heads, head_dim, width] so that the halves of each rotary pair are neighbours."""
    return x.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)


class Attention(nn.Module):
    """Grouped-query causal attention with normalised queries and keys."""

    def __init__(self, c: LeafConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dim = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        self.q_proj = nn.Linear(c.hidden_size, self.heads * self.dim, bias=False)
        self.k_proj = nn.Linear(c.hidden_size, self.kv_heads * self.dim, bias=False)
        self.v_proj = nn.Linear(c.hidden_size, self.kv_heads * self.dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.dim, c.hidden_size, bias=False)
        self.q_norm = RMSNorm(self.dim, c.rms_norm_eps)
        self.k_norm = RMSNorm(self.dim, c.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: KVCache | None, layer: int) -> Tensor:
        """Attends over `x` [batch, time, hidden] (and the cache, if given)."""
        b, t, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(b, t, self.heads, self.dim)).transpose(1, 2)
        k = self.k_norm(self.k_proj(x).view(b, t, self.kv_heads, self.dim)).transpose(1, 2)
        v = self.v_proj(x).view(b, t, self.kv_heads, self.dim).transpose(1, 2)
        q, k = apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)
        mask = None
        if cache is not None:
            k, v, mask = cache.update(layer, k, v)
        groups = self.heads // self.kv_heads
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None and t > 1)
        return self.o_proj(out.transpose(1, 2).reshape(b, t, -1))

    def train_forward(self, x: Tensor, turns: Tensor) -> Tensor:
        """What `forward` computes of `x` alone; `turns` [time, head_dim / 2]: cosine and sine as complex numbers."""
        b, t, width = x.shape
        parts = [p.weight.to(x.dtype).view(self.kv_heads, -1, width) for p in (self.q_proj, self.k_proj, self.v_proj)]
        parts[:2] = [side_by_side(p.view(-1, self.dim, width)).reshape(p.shape) for p in parts[:2]]
        y = F.linear(x, torch.cat(parts, 1).flatten(0, 1)).view(b, t, self.kv_heads, -1, self.dim)
        gains = [side_by_side(norm.weight[None, :, None]).flatten() for norm in (self.q_norm, self.k_norm)]
        return self.o_proj(fused.attention(y, *gains, turns, self.q_norm.eps))


class MLP(nn.Module):
    """SwiGLU feed-forward block."""

    def __init__(self, c: LeafConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Maps [..., hidden] to [..., hidden]."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))

    def train_forward(self, x: Tensor) -> Tensor:
        """What `forward` computes, in two products."""
        both = torch.cat((self.gate_proj.weight.to(x.dtype), self.up_proj.weight.to(x.dtype)))
        return self.down_proj(fused.swiglu(F.linear(x, both)))


class Layer(nn.Module):
    """One pre-norm decoder layer."""

    def __init__(self, c: LeafConfig) -> None:
        super().__init__()
        self.self_attn = Attention(c)
        self.mlp = MLP(c)
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: KVCache | None, layer: int) -> Tensor:
        """Maps hidden states [batch, time, hidden] to the next layer's."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, cache, layer)
        return x + self.mlp(self.post_attention_layernorm(x))

    def train_forward(self, x: Tensor, turns: Tensor, dtype: torch.dtype) -> Tensor:
        """What `forward` computes of `x` alone; products in `dtype`, sums in that of `x`."""
        norms = self.input_layernorm, self.post_attention_layernorm
        before, after = ((n.weight, n.eps, dtype) for n in norms)
        x = x + self.self_attn.train_forward(fused.rms_norm(x, *before), turns)
        return x + self.mlp.train_forward(fused.rms_norm(x, *after))


class Decoder(nn.Module):
    """Embedding, layers and final norm (the `model.` part of a checkpoint)."""

    def __init__(self, c: LeafConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Layer(c) for _ in range(c.num_hidden_layers))
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)


class KVCache:
    """Keys and values of left-padded sequences that are being generated.

    Args:
        config: Sizes of the network.
        pad: Number of padding tokens at the left of each sequence, [batch].
        capacity: Longest total length (padding + prompt + answer), in tokens.
    """

    def __init__(self, config: LeafConfig, pad: Tensor, capacity: int) -> None:
        shape = (config.num_hidden_layers, len(pad), config.num_key_value_heads, capacity, config.head_dim)
        self.keys = torch.zeros(shape, device=pad.device)
        self.values = torch.zeros(shape, device=pad.device)
        self.pad = pad
        self.length = 0

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Stores new keys/values [batch, kv_heads, time, dim] of one layer.

        Returns:
            All keys, all values, and the boolean mask [batch, 1, time, total].
        """
        start, t = self.length, k.shape[2]
        self.keys[layer, :, :, start : start + t] = k
        self.values[layer, :, :, start : start + t] = v
        total = start + t
        rows = torch.arange(start, total, device=k.device)[:, None]
        cols = torch.arange(total, device=k.device)[None, :]
        mask = (cols <= rows)[None] & (cols[None] >= self.pad[:, None, None])
        mask = mask | (cols == rows)[None]  # padding rows see themselves: no NaN
        return self.keys[layer, :, :, :total].to(k.dtype), self.values[layer, :, :, :total].to(v.dtype), mask[:, None]


class Leaf(nn.Module):
    """The whole language model; the output matrix is the embedding matrix."""

    def __init__(self, config: LeafConfig, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.model = Decoder(config)
        cos, sin = rotary_tables(config)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        generator = torch.Generator().manual_seed(seed)
        residual = (2 * config.num_hidden_layers) ** -0.5
        for name, p in self.named_parameters():
            if p.ndim != 2:
                continue
            std = 0.02 if "embed" in name else p.shape[1] ** -0.5
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                std *= residual
            with torch.no_grad():
                p.normal_(0.0, std, generator=generator)

    def hidden(self, ids: Tensor, positions: Tensor | None = None, cache: KVCache | None = None) -> Tensor:
        """Final hidden states of `ids` [batch, time] -> [batch, time, hidden].

        Args:
            ids: Token ids.
            positions: Position of each token [batch, time]; None means 0, 1, ...
            cache: Keys and values of earlier tokens, for generation.
        """
        if positions is None:
            cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        else:
            cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]
        x = self.model.embed_tokens(ids)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.bfloat16)
            cos, sin = cos.to(torch.bfloat16), sin.to(torch.bfloat16)
        for i, layer in enumerate(self.model.layers):
            x = layer(x, cos, sin, cache, i)
        if cache is not None:
            cache.length += ids.shape[1]
        return self.model.norm(x)

    def train_hidden(self, ids: Tensor) -> Tensor:
        """What `hidden` computes of `ids` alone, for training: operations of fused.py, products as autocast says."""
        x = self.model.embed_tokens(ids)
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        half = self.config.head_dim // 2
        turns = torch.complex(self.cos[: ids.shape[1], :half], self.sin[: ids.shape[1], :half])
        for layer in self.model.layers:
            x = layer.train_forward(x, turns, dtype)
        return fused.rms_norm(x, self.model.norm.weight, self.model.norm.eps, dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores [..., vocab] of hidden states [..., hidden]."""
        return F.linear(hidden, self.model.embed_tokens.weight)
