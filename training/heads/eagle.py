"""The EAGLE-1 head: one decoder layer that continues the target's final hidden states.

Input i is the target's hidden state at token i beside the embedding of token i + 1; the output estimates the hidden
state at token i + 1, whose product with the target's output matrix are the logits of token i + 2. Drafting feeds
estimates back; so does the training here, for `depth` passes, with the attention that drafting has (true states in
the past, own estimates since). Parameter names are those of published EAGLE checkpoints: no input norm, no final norm,
embedding and output matrix are the target's. Called by heads/train.py and heads/acceptance.py.
Source: Li et al. 2024 (EAGLE), section 3.2; several passes as in Zhang et al. 2024 (HASS), section 3.2.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.model import MLP, LeafConfig, RMSNorm, apply_rotary, rotary_tables


class _Attention(nn.Module):
    """Projections of grouped-query attention; `EagleHead.passes` does the rest."""

    def __init__(self, c: LeafConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dim = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        self.q_proj = nn.Linear(c.hidden_size, self.heads * self.dim, bias=False)
        self.k_proj = nn.Linear(c.hidden_size, self.kv_heads * self.dim, bias=False)
        self.v_proj = nn.Linear(c.hidden_size, self.kv_heads * self.dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.dim, c.hidden_size, bias=False)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of `x` [batch, time, hidden], each [batch, heads, time, head_dim]."""
        b, t, _ = x.shape
        q = self.q_proj(x).view(b, t, self.heads, self.dim).transpose(1, 2)
        k = self.k_proj(x).view(b, t, self.kv_heads, self.dim).transpose(1, 2)
        v = self.v_proj(x).view(b, t, self.kv_heads, self.dim).transpose(1, 2)
        groups = self.heads // self.kv_heads
        q, k = apply_rotary(q, cos, sin), apply_rotary(k, cos, sin)
        return q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)


class _Layer(nn.Module):
    """The weights of the one layer."""

    def __init__(self, c: LeafConfig) -> None:
        super().__init__()
        self.self_attn = _Attention(c)
        self.mlp = MLP(c)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)


def _later(x: Tensor, steps: int) -> Tensor:
    """Moves `x` [batch, heads, time, ...] to later times; the first `steps` become zero."""
    return F.pad(x, (0, 0, steps, 0))[:, :, : x.shape[2]] if steps else x


class EagleHead(nn.Module):
    """The head's own weights.

    Args:
        config: Sizes of the target; the layer has the same.
        seed: Of the initial weights.
    """

    def __init__(self, config: LeafConfig, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        h = config.hidden_size
        self.fc = nn.Linear(2 * h, h, bias=False)
        self.layers = nn.ModuleList([_Layer(config)])
        cos, sin = rotary_tables(config)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, p in self.named_parameters():
                if p.ndim == 2:
                    p.normal_(0.0, p.shape[1] ** -0.5, generator=generator)
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    p.mul_(0.5)
            self.fc.weight[:, h:] = torch.eye(h)  # to begin with, the next state is the present one
            self.fc.weight[:, :h].mul_(0.5)

    def passes(self, embeddings: Tensor, hidden: Tensor, depth: int) -> list[Tensor]:
        """Estimated hidden states of `depth` passes.

        Args:
            embeddings: Of token i + 1, [batch, time, hidden].
            hidden: Of the target at token i, [batch, time, hidden].
            depth: Number of passes: the longest draft.

        Returns:
            For pass p (from 1) [batch, time, hidden]: row i is the state at token i + 1 as estimated from true
            states up to token i + 1 - p. Rows i < p - 1 mean nothing.
        """
        layer = self.layers[0]
        t = embeddings.shape[1]
        cos, sin = self.cos[:t].to(embeddings.dtype), self.sin[:t].to(embeddings.dtype)
        age = torch.arange(t)[:, None] - torch.arange(t)[None, :]
        keys: list[Tensor] = []
        values: list[Tensor] = []
        outputs: list[Tensor] = []
        for p in range(depth):
            x = self.fc(torch.cat((embeddings, hidden), -1))
            q, k, v = layer.self_attn.project(x, cos, sin)
            keys.append(k)
            values.append(v)
            x = x + self._attend(q, keys, values, age >= p)
            x = x + layer.mlp.train_forward(layer.post_attention_layernorm(x))
            outputs.append(x)
            hidden = F.pad(x, (0, 0, 1, 0))[:, :t]
        return outputs

    def _attend(self, q: Tensor, keys: list[Tensor], values: list[Tensor], seen: Tensor) -> Tensor:
        """Attention of the newest pass: `seen` of the first pass, and one state of each later pass."""
        p, scale = len(keys) - 1, q.shape[-1] ** -0.5
        scores = (q @ keys[0].mT).float() * scale
        scores = scores.masked_fill(~seen, float("-inf"))
        late = [(q.float() * _later(keys[s], p - s)).sum(-1, keepdim=True) * scale for s in range(1, p + 1)]
        weights = torch.cat([scores, *late], -1).softmax(-1).to(q.dtype)
        t = q.shape[2]
        out = weights[..., :t] @ values[0]
        for s in range(1, p + 1):
            out = out + weights[..., t + s - 1 : t + s] * _later(values[s], p - s)
        b = out.shape[0]
        return self.layers[0].self_attn.o_proj(out.transpose(1, 2).reshape(b, t, -1))
