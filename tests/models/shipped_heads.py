"""Tiny checkpoints that ship a head for further tokens, and references of what it drafts.

A model of one layer more than it is to have is written by transformers; its last layer becomes the head's.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.models.checkpoints import COMMON, make_tokenizer
from tests.models.heads import best

HIDDEN = COMMON["hidden_size"]


class ShippedHead:
    """A model of transformers whose last layer is a head, written to `directory` as it would be published.

    Args:
        prefix: of the classes.
        offset: what norms add to their gains.
    """

    def __init__(self, prefix: str, directory: Path, fields: dict[str, Any], *, offset: float = 0.0) -> None:
        config = getattr(transformers, f"{prefix}Config")(**{**COMMON, **fields})
        config._attn_implementation = "eager"
        torch.manual_seed(0)
        self.model = getattr(transformers, f"{prefix}ForCausalLM")(config).float().eval()
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                mean = 1.0 - offset if "norm" in name else 0.0
                parameter.normal_(mean, 0.1)
        self.num_layers = config.num_hidden_layers - 1
        self.eps, self.offset = config.rms_norm_eps, offset
        generator = torch.Generator().manual_seed(4)
        self.projection = torch.empty(HIDDEN, 2 * HIDDEN).normal_(0.0, 0.15, generator=generator)
        self.embedding_gain, self.feature_gain, self.output_gain = (
            torch.empty(HIDDEN).normal_(1.0 - offset, 0.1, generator=generator) for _ in range(3)
        )
        self.model.save_pretrained(directory)
        make_tokenizer().save_pretrained(directory)
        file, raw = directory / "model.safetensors", json.loads((directory / "config.json").read_text())
        raw["num_hidden_layers"] = self.num_layers
        if raw.get("layer_types"):
            raw["layer_types"] = raw["layer_types"][:-1]
        (directory / "config.json").write_text(json.dumps(raw))
        self.is_qwen = prefix.startswith("Qwen")
        save_file(self._published(load_file(file)), file, metadata={"format": "pt"})

    def _published(self, weights: dict[str, Tensor]) -> dict[str, Tensor]:
        behind = f"model.layers.{self.num_layers}."
        names = {"eh_proj": self.projection, "enorm": self.embedding_gain, "hnorm": self.feature_gain}
        own = {f"{behind}{name}.weight": tensor for name, tensor in names.items()}
        own[f"{behind}shared_head.norm.weight"] = self.output_gain
        own[f"{behind}shared_head.head.weight"] = weights.get("lm_head.weight", self.projection).clone()
        if self.is_qwen:
            weights = {name.replace(behind, "mtp.layers.0."): tensor for name, tensor in weights.items()}
            own = {
                "mtp.fc.weight": self.projection, "mtp.pre_fc_norm_embedding.weight": self.embedding_gain,
                "mtp.pre_fc_norm_hidden.weight": self.feature_gain, "mtp.norm.weight": self.output_gain,
            }  # fmt: skip
        return {**weights, **own}

    def _norm(self, x: Tensor, gain: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * (gain + self.offset)

    def _layer(self, x: Tensor) -> Tensor:
        """The head's layer over whole sequences, by transformers."""
        base, n = self.model.model, len(x)
        positions = torch.arange(n)[None]
        mask = torch.full((n, n), float("-inf")).triu(1)[None, None]
        found = base.layers[-1](
            x[None], position_embeddings=base.rotary_emb(x[None], positions), attention_mask=mask,
            position_ids=positions,
        )  # fmt: skip
        return (found[0] if isinstance(found, tuple) else found)[0]

    @torch.no_grad()
    def drafts(self, tokens: Sequence[int], num_drafts: int) -> tuple[list[int], list[float]]:
        """Draft behind `tokens`, everything computed anew for each draft."""
        states: list[Tensor] = []
        layers = self.model.model.layers
        hook = layers[-1].register_forward_pre_hook(lambda module, args: states.append(args[0]))
        self.model.model(torch.tensor([list(tokens[:-1])]))
        hook.remove()
        features, following = self.model.model.norm(states[0])[0], list(tokens[1:])
        found = []
        for _ in range(num_drafts):
            embedded = self.model.model.embed_tokens(torch.tensor(following))
            both = torch.cat((self._norm(embedded, self.embedding_gain), self._norm(features, self.feature_gain)), -1)
            output = self._layer(F.linear(both, self.projection))
            normed = self._norm(output, self.output_gain)
            found.append(best(self.model.lm_head(normed[-1])))
            following.append(found[-1][0])
            features = torch.cat((features, (normed if self.is_qwen else output)[-1:]))
        return [token for token, _ in found], [score for _, score in found]
