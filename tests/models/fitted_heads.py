"""Heads that are often right: linear estimates of a model's next hidden states, written as published checkpoints.

Random heads draft what never stands. These are fitted by least squares to the hidden states of given texts, so that
among such texts a good part of their drafts stands, and a good part does not.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire import LLM, SamplingParams
from quire.models.aux_states import AuxStates
from quire.models.decoder import DecoderForCausalLM
from tests.models.heads import write_head

MAX_PAIRS = 6000
RIDGE = 1e-3
DROPPED_WORDS = 16  # an EAGLE-3 head of a vocabulary of its own lacks every so manieth token of the target
NOISE = 0.02  # of what is not fitted: the head's layer works, and changes little


@dataclass
class States:
    """A model's states of some texts; line i + k is k tokens behind line i where `starts[i + k]` allows it.

    Attributes:
        token_ids, positions: [n].
        hidden: [n, hidden_size], final ones.
        aux: [n, 3 * hidden_size], before three layers.
        embedding: [vocab_size, hidden_size], which is the output projection, too.
    """

    token_ids: Tensor
    positions: Tensor
    hidden: Tensor
    aux: Tensor
    embedding: Tensor
    aux_layers: tuple[int, ...]

    def pairs(self, distance: int) -> Tensor:
        """Numbers of lines that have one of the same text `distance` behind them."""
        behind = self.positions[distance:] - self.positions[: len(self.positions) - distance]
        return torch.nonzero(behind == distance)[:MAX_PAIRS, 0]


@dataclass
class _Heard:
    """What forward passes left."""

    model: DecoderForCausalLM | None = None
    steps: list[tuple[Tensor, ...]] = field(default_factory=list)


@contextmanager
def _listening(aux_layers: tuple[int, ...]) -> Iterator[_Heard]:
    heard, original = _Heard(), DecoderForCausalLM.forward

    def forward(self: DecoderForCausalLM, input_ids: Tensor, positions: Tensor, context: Any) -> Tensor:
        heard.model, aux = self, AuxStates(aux_layers)
        self.model.aux_states = aux
        hidden = original(self, input_ids, positions, context)
        self.model.aux_states = None
        kept = (input_ids, positions, hidden.float(), torch.cat(aux.tensors, 1).float())
        heard.steps.append(tuple(one.clone() for one in kept))
        return hidden

    with mock.patch.object(DecoderForCausalLM, "forward", forward):
        yield heard


@torch.inference_mode()
def states_of(texts: Sequence[Sequence[int]], config: dict[str, Any], **model: Any) -> States:
    """The states of the model that `model` chooses, of this config.json, for texts of token ids."""
    num_layers = config["num_hidden_layers"]
    aux_layers = (1, num_layers // 2, num_layers - 1)
    with LLM(**model, enable_prefix_caching=False, max_num_seqs=8) as llm:
        with _listening(aux_layers) as heard:
            params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0)  # all states are read
            llm.generate([{"prompt_token_ids": list(text)} for text in texts], params, use_tqdm=False)
        target = heard.model
        assert target is not None and target.lm_head is target.model.embed_tokens, "its words are one table"
        embedding = target.model.embed(torch.arange(config["vocab_size"])).float().clone()
    token_ids, positions, hidden, aux = (torch.cat(parts) for parts in zip(*heard.steps, strict=True))
    return States(token_ids.long(), positions, hidden, aux, embedding, aux_layers)


def _fit(inputs: Tensor, outputs: Tensor) -> Tensor:
    """[outputs, inputs]: the linear map that estimates outputs."""
    squares = inputs.T @ inputs
    squares.diagonal().add_(RIDGE * squares.diagonal().mean())
    return torch.linalg.solve(squares, inputs.T @ outputs).T.contiguous()


class _Layer:
    """A decoder layer that changes little."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.size, self.inner = config["hidden_size"], config["intermediate_size"]
        self.head_size = config.get("head_dim") or self.size // config["num_attention_heads"]
        self.queries = config["num_attention_heads"] * self.head_size
        self.keys = config["num_key_value_heads"] * self.head_size
        self._config = config
        self._generator = torch.Generator().manual_seed(3)

    def weights(self, name: str, *, num_inputs: int = 1) -> dict[str, Tensor]:
        """The projections, and the gain behind attention."""
        taken = num_inputs * self.size
        shapes = {
            "self_attn.q_proj": (self.queries, taken), "self_attn.k_proj": (self.keys, taken),
            "self_attn.v_proj": (self.keys, taken), "self_attn.o_proj": (self.size, self.queries),
            "mlp.gate_proj": (self.inner, self.size), "mlp.up_proj": (self.inner, self.size),
            "mlp.down_proj": (self.size, self.inner),
        }  # fmt: skip
        found = {
            f"{name}.{part}.weight": torch.empty(shape).normal_(0, NOISE, generator=self._generator)
            for part, shape in shapes.items()
        }
        return {**found, f"{name}.post_attention_layernorm.weight": torch.ones(self.size)}

    def weights_as_of_target(self, name: str) -> dict[str, Tensor]:
        """A layer of the target's own kind, whole."""
        found = {**self.weights(name), f"{name}.input_layernorm.weight": torch.ones(self.size)}
        if self._config["model_type"] == "qwen3":
            found |= {f"{name}.self_attn.{part}_norm.weight": torch.ones(self.head_size) for part in "qk"}
        if self._config["model_type"] == "qwen2":
            sizes = {"q": self.queries, "k": self.keys, "v": self.keys}
            found |= {f"{name}.self_attn.{part}_proj.bias": torch.zeros(size) for part, size in sizes.items()}
        return found


def _bfloat16(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: one.to(torch.bfloat16) if one.is_floating_point() else one for name, one in weights.items()}


def _llama(config: dict[str, Any]) -> dict[str, Any]:
    """The config.json of a head of this target's sizes."""
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
             "head_dim", "max_position_embeddings")  # fmt: skip
    sizes = {name: config[name] for name in names if name in config}
    return {**sizes, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 1,
            "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu", "torch_dtype": "bfloat16"}  # fmt: skip


def _copy_all_but_weights(source: Path, directory: Path) -> None:
    directory.mkdir(parents=True)
    for file in source.iterdir():
        if file.is_file() and file.name != "model.safetensors":
            shutil.copy(file, directory)


def write_medusa(directory: Path, states: States, config: dict[str, Any], num_heads: int = 3) -> Path:
    """Medusa heads: the residual blocks do nothing, the projections estimate."""
    size, weights = config["hidden_size"], dict[str, Tensor]()
    for head in range(num_heads):
        at = states.pairs(head + 1)
        estimate = _fit(states.hidden[at], states.hidden[at + head + 1])
        weights[f"medusa_head.{head}.0.linear.weight"] = torch.zeros(size, size)
        weights[f"medusa_head.{head}.0.linear.bias"] = torch.zeros(size)
        weights[f"medusa_head.{head}.1.weight"] = states.embedding @ estimate
    more = {"hidden_size": size, "vocab_size": config["vocab_size"], "medusa_num_heads": num_heads,
            "medusa_num_layers": 1, "architectures": ["MedusaModel"], "model_type": "medusa"}  # fmt: skip
    return write_head(directory, more, _bfloat16(weights))


def write_eagle(directory: Path, states: States, config: dict[str, Any]) -> Path:
    """An EAGLE-1 head."""
    at = states.pairs(1)
    inputs = torch.cat((states.embedding[states.token_ids[at + 1]], states.hidden[at]), 1)
    weights = _Layer(config).weights("layers.0")
    weights["fc.weight"] = _fit(inputs, states.hidden[at + 1])
    return write_head(directory, _llama(config), _bfloat16(weights))


def write_eagle3(directory: Path, states: States, config: dict[str, Any]) -> Path:
    """An EAGLE-3 head with a vocabulary of its own."""
    at = states.pairs(1)
    weights, size = _Layer(config).weights("midlayer", num_inputs=2), config["hidden_size"]
    weights["fc.weight"] = _fit(states.aux[at], states.hidden[at + 1])
    for name in ("midlayer.input_layernorm", "midlayer.hidden_norm", "norm"):
        weights[f"{name}.weight"] = torch.ones(size)
    ids = torch.arange(config["vocab_size"])
    ids = ids[ids % DROPPED_WORDS != DROPPED_WORDS - 1]
    weights["lm_head.weight"] = states.embedding[ids]
    weights["d2t"] = ids - torch.arange(len(ids))
    weights["t2d"] = torch.zeros(config["vocab_size"], dtype=torch.bool).index_fill_(0, ids, value=True)
    more = {**_llama(config), "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": len(ids),
            "eagle_aux_hidden_state_layer_ids": list(states.aux_layers)}  # fmt: skip
    return write_head(directory, more, _bfloat16(weights))


def write_with_mtp(directory: Path, states: States, source: Path) -> Path:
    """The model in `source` with a head of its own in the checkpoint, in the layout of Qwen3-Next.

    Its weights may be missing (`load_format` dummy): then the checkpoint has the head alone.
    """
    config = json.loads((source / "config.json").read_text())
    at, size = states.pairs(1), config["hidden_size"]
    parts = (states.embedding[states.token_ids[at + 1]], states.hidden[at])
    inputs = torch.cat([one * torch.rsqrt(one.pow(2).mean(-1, keepdim=True) + 1e-6) for one in parts], 1)
    weights = _Layer(config).weights_as_of_target("mtp.layers.0")
    weights["mtp.fc.weight"] = _fit(inputs, states.hidden[at + 1])
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        weights[f"mtp.{name}.weight"] = torch.ones(size)
    _copy_all_but_weights(source, directory)
    stored = source / "model.safetensors"
    whole = {**(load_file(stored) if stored.exists() else {}), **_bfloat16(weights)}
    save_file(whole, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def write_disturbed(directory: Path, source: Path, share: float = 0.25) -> Path:
    """The model in `source` with noise on its projections, of this share of their spread: a draft model that errs."""
    generator = torch.Generator().manual_seed(7)
    _copy_all_but_weights(source, directory)
    weights = load_file(source / "model.safetensors")
    for name, tensor in weights.items():
        if name.endswith("_proj.weight"):
            noise = torch.empty(tensor.shape).normal_(0, float(tensor.float().std()) * share, generator=generator)
            weights[name] = tensor + noise.to(tensor.dtype)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory
