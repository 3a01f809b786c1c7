"""Tiny random heads in the layouts of published checkpoints, and slow references of what they draft, in plain torch.

The references are written from the papers: every draft is computed from nothing, with whole matrices of attention.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedModel

from tests.models.checkpoints import COMMON

EPS = 1e-6
Weights = dict[str, Tensor]
HEAD_CONFIG: dict[str, Any] = {
    **COMMON, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1,
    "rms_norm_eps": EPS, "rope_theta": 10000.0, "hidden_act": "silu", "torch_dtype": "float32",
}  # fmt: skip


def write_head(directory: Path, config: dict[str, Any], weights: Weights) -> Path:
    """A directory with config.json and model.safetensors."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, directory / "model.safetensors")
    return directory


def layer_weights(name: str, generator: torch.Generator, *, inputs: int = 1, std: float = 0.15) -> Weights:
    """The projections and the second norm of a Llama's layer; its attention takes `inputs` hidden states."""
    hidden, size = COMMON["hidden_size"], COMMON["intermediate_size"]
    head_size = hidden // COMMON["num_attention_heads"]
    keys = COMMON["num_key_value_heads"] * head_size
    shapes = {
        "self_attn.q_proj": (hidden, inputs * hidden), "self_attn.k_proj": (keys, inputs * hidden),
        "self_attn.v_proj": (keys, inputs * hidden), "self_attn.o_proj": (hidden, hidden),
        "mlp.gate_proj": (size, hidden), "mlp.up_proj": (size, hidden), "mlp.down_proj": (hidden, size),
    }  # fmt: skip
    weights = {
        f"{name}.{part}.weight": torch.empty(shape).normal_(0.0, std, generator=generator)
        for part, shape in shapes.items()
    }
    weights[f"{name}.post_attention_layernorm.weight"] = gains(generator)
    return weights


def gains(generator: torch.Generator) -> Tensor:
    """Of a norm."""
    return torch.empty(COMMON["hidden_size"]).normal_(1.0, 0.1, generator=generator)


def make_medusa(
    directory: Path,
    *,
    num_heads: int = 3,
    num_blocks: int = 1,
    shares_projection: bool = False,
    vocab_size: int = COMMON["vocab_size"],
) -> Path:
    """Medusa heads."""
    generator, hidden = torch.Generator().manual_seed(11), COMMON["hidden_size"]
    weights: Weights = {}
    for head in range(num_heads):
        for block in range(num_blocks):
            name = f"medusa_head.{head}.{block}.linear"
            weights[f"{name}.weight"] = torch.empty(hidden, hidden).normal_(0.0, 0.2, generator=generator)
            weights[f"{name}.bias"] = torch.empty(hidden).normal_(0.0, 0.2, generator=generator)
        if not shares_projection:
            projection = torch.empty(vocab_size, hidden).normal_(0.0, 0.2, generator=generator)
            weights[f"medusa_head.{head}.{num_blocks}.weight"] = projection
    config = {
        "architectures": ["MedusaModel"], "model_type": "medusa", "hidden_size": hidden,
        "vocab_size": vocab_size, "medusa_num_heads": num_heads, "medusa_num_layers": num_blocks,
        "original_lm_head": shares_projection,
    }  # fmt: skip
    return write_head(directory, config, weights)


def make_eagle(directory: Path, *, vocab_size: int = COMMON["vocab_size"]) -> Path:
    """An EAGLE-1 head: no input norm, no final norm, and a copy of an embedding that is not to be read."""
    generator, hidden = torch.Generator().manual_seed(12), COMMON["hidden_size"]
    weights = layer_weights("layers.0", generator)
    weights["fc.weight"] = torch.empty(hidden, 2 * hidden).normal_(0.0, 0.15, generator=generator)
    weights["fc.bias"] = torch.empty(hidden).normal_(0.0, 0.15, generator=generator)
    weights["embed_tokens.weight"] = torch.zeros(vocab_size, hidden)
    return write_head(directory, {**HEAD_CONFIG, "vocab_size": vocab_size, "bias": True}, weights)


def make_eagle3(
    directory: Path, *, aux_layers: Sequence[int], draft_vocab_size: int = 100, vocab_size: int = COMMON["vocab_size"]
) -> Path:
    """An EAGLE-3 head with a vocabulary of its own: every n-th token of the target, as far as they go."""
    generator, hidden = torch.Generator().manual_seed(13), COMMON["hidden_size"]
    weights = layer_weights("midlayer", generator, inputs=2)
    weights["midlayer.input_layernorm.weight"] = gains(generator)
    weights["midlayer.hidden_norm.weight"] = gains(generator)
    weights["norm.weight"] = gains(generator)
    weights["fc.weight"] = torch.empty(hidden, 3 * hidden).normal_(0.0, 0.15, generator=generator)
    weights["lm_head.weight"] = torch.empty(draft_vocab_size, hidden).normal_(0.0, 0.2, generator=generator)
    ids = torch.arange(draft_vocab_size) * (vocab_size // draft_vocab_size)
    weights["d2t"] = ids - torch.arange(draft_vocab_size)
    weights["t2d"] = torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, ids, value=True)
    config = {
        **HEAD_CONFIG, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": draft_vocab_size,
        "vocab_size": vocab_size,
        "eagle_aux_hidden_state_layer_ids": list(aux_layers),
    }  # fmt: skip
    return write_head(directory, config, weights)


def norm(x: Tensor, gain: Tensor) -> Tensor:
    """RMSNorm."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS) * gain


def rotate(x: Tensor) -> Tensor:
    """Rotary embedding of heads [num_tokens, num_heads, head_size] at positions 0, 1, ..."""
    half = x.shape[-1] // 2
    angles = torch.arange(len(x))[:, None] * 10000.0 ** (-torch.arange(half) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def attend(weights: Weights, name: str, x: Tensor) -> Tensor:
    """Causal attention of a Llama's layer over the rows of `x`."""
    n, num_heads = len(x), COMMON["num_attention_heads"]
    num_kv = COMMON["num_key_value_heads"]
    q, k, v = (F.linear(x, weights[f"{name}.self_attn.{part}_proj.weight"]) for part in "qkv")
    q, k = rotate(q.view(n, num_heads, -1)), rotate(k.view(n, num_kv, -1))
    k, v = (one.view(n, num_kv, -1).repeat_interleave(num_heads // num_kv, 1) for one in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    scores = scores.masked_fill(torch.triu(torch.ones(n, n, dtype=torch.bool), 1), float("-inf"))
    heads = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(n, -1)
    return F.linear(heads, weights[f"{name}.self_attn.o_proj.weight"])


def feed_forward(weights: Weights, name: str, x: Tensor) -> Tensor:
    """The gated MLP of a Llama's layer, with its norm."""
    x = norm(x, weights[f"{name}.post_attention_layernorm.weight"])
    gate, up = (F.linear(x, weights[f"{name}.mlp.{part}_proj.weight"]) for part in ("gate", "up"))
    return F.linear(F.silu(gate) * up, weights[f"{name}.mlp.down_proj.weight"])


@dataclass
class Reference:
    """A target in float32, and the weights of a head."""

    target: PreTrainedModel
    weights: Weights

    @classmethod
    def of(cls, target: PreTrainedModel, directory: Path) -> Reference:
        """The head in a directory."""
        return cls(target, load_file(directory / "model.safetensors"))

    def hidden(self, tokens: Sequence[int]) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Final states of all tokens but the newest, and the states before each layer."""
        with torch.no_grad():
            found = self.target.model(torch.tensor([tokens[:-1]]), output_hidden_states=True)  # type: ignore[operator]
        return found.last_hidden_state[0], tuple(states[0] for states in found.hidden_states)

    def logits(self, states: Tensor) -> Tensor:
        """The target's output projection."""
        with torch.no_grad():
            return self.target.lm_head(states)  # type: ignore[operator,no-any-return]

    def embed(self, token_ids: Sequence[int]) -> Tensor:
        """The target's embedding."""
        with torch.no_grad():
            return self.target.model.embed_tokens(torch.tensor(list(token_ids)))  # type: ignore[union-attr,operator,no-any-return]

    def chain(
        self,
        tokens: Sequence[int],
        features: Tensor,
        layer: Callable[[Tensor, Tensor], Tensor],
        choose: Callable[[Tensor, int], tuple[int, float]],
        ranks: Sequence[int],
        first: int = 0,
    ) -> tuple[list[int], list[float]]:
        """Draft token by token, of each place that of a rank: the layer over all pairs from the token `first` on, the
        last output fed back as a feature.
        """
        following, drafts, scores = list(tokens[1 + first :]), list[int](), list[float]()
        features = features[first:]
        for rank in ranks:
            output = layer(self.embed(following), features)
            token, score = choose(output[-1], rank)
            drafts.append(token)
            scores.append(score)
            following.append(token)
            features = torch.cat((features, output[-1:]))
        return drafts, scores

    def eagle(self, tokens: Sequence[int], ranks: Sequence[int], first: int = 0) -> tuple[list[int], list[float]]:
        """EAGLE-1."""
        w = self.weights

        def layer(embedded: Tensor, features: Tensor) -> Tensor:
            x = F.linear(torch.cat((embedded, features), -1), w["fc.weight"], w["fc.bias"])
            x = x + attend(w, "layers.0", x)
            return x + feed_forward(w, "layers.0", x)

        features = self.hidden(tokens)[0]
        return self.chain(tokens, features, layer, lambda x, rank: best(self.logits(x), rank), ranks, first)

    def eagle3(
        self, tokens: Sequence[int], ranks: Sequence[int], aux_layers: Sequence[int], first: int = 0
    ) -> tuple[list[int], list[float]]:
        """EAGLE-3."""
        w, states = self.weights, self.hidden(tokens)[1]
        fused = F.linear(torch.cat([states[layer] for layer in aux_layers], -1), w["fc.weight"])

        def layer(embedded: Tensor, features: Tensor) -> Tensor:
            normed = norm(embedded, w["midlayer.input_layernorm.weight"])
            x = torch.cat((normed, norm(features, w["midlayer.hidden_norm.weight"])), -1)
            x = features + attend(w, "midlayer", x)
            return x + feed_forward(w, "midlayer", x)

        def choose(x: Tensor, rank: int) -> tuple[int, float]:
            token, score = best(F.linear(norm(x, w["norm.weight"]), w["lm_head.weight"]), rank)
            return token + int(w["d2t"][token]), score

        return self.chain(tokens, fused, layer, choose, ranks, first)

    def medusa(self, tokens: Sequence[int], num_drafts: int, num_blocks: int) -> tuple[list[int], list[float]]:
        """Medusa."""
        w, last, found = self.weights, self.hidden(tokens)[0][-1], []
        for head in range(num_drafts):
            x, name = last, f"medusa_head.{head}"
            for block in range(num_blocks):
                linear = f"{name}.{block}.linear"
                x = x + F.silu(F.linear(x, w[f"{linear}.weight"], w[f"{linear}.bias"]))
            own = w.get(f"{name}.{num_blocks}.weight")
            found.append(best(self.logits(x) if own is None else F.linear(x, own)))
        return [token for token, _ in found], [score for _, score in found]


def best(logits: Tensor, rank: int = 0) -> tuple[int, float]:
    """The likeliest token and its probability, or the one that so many tokens are likelier than."""
    scores, tokens = logits.softmax(-1).topk(rank + 1)
    return int(tokens[rank]), float(scores[rank])
