"""FeatureHead: one decoder layer that continues a target's hidden states, which are then called features.

Made by `models.heads.loading`, run by `worker.drafting.features`. The input at position p is the feature of the token
there beside the embedding of the token behind it; the output estimates the feature of that token, whose logits are
those of the next one. Fed back, the head drafts token by token.

    EAGLE-1     layer(fc([embedding, feature]))               Li et al. 2024 (EAGLE), section 3.2
    EAGLE-3     layer([norm(embedding), norm(feature)])       Li et al. 2025 (EAGLE-3), section 3.1
    MTP         layer(fc([norm(embedding), norm(feature)]))   DeepSeek-AI 2024 (DeepSeek-V3), section 2.2

Names of tensors: see `checkpoint_targets` of each class; embedding and, but for EAGLE-3, output projection are the
target's.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from quire.attention.context import ForwardContext
from quire.config.model_arch import LayerArch, NormArch
from quire.core.kv_spec import KVCacheSpec
from quire.layers.embedding import TokenTable
from quire.layers.linear import Linear
from quire.layers.norm import Norm
from quire.layers.weight_target import SideBySide, TensorTarget, WeightTarget
from quire.models.decoder import DecoderForCausalLM, DecoderLayer
from quire.models.interfaces import BuildContext
from quire.models.parts.attention import AttentionPart
from quire.models.parts.mlp import MLPPart
from quire.models.tensor_layouts import linear_targets


class FeatureHead(nn.Module, ABC):
    """A head on features of a target.

    Attributes:
        aux_layers: the features are made from the residual stream before these layers of the target; empty = from its
            final hidden states.
        num_places: tokens that a feature says something of.
        is_native: `forward` computes nothing beside the kernels of `LayerKernels`, so that it can be captured.
    """

    aux_layers: tuple[int, ...] = ()
    num_places = 1
    is_native = False

    def __init__(self, build: BuildContext, target: DecoderForCausalLM) -> None:
        super().__init__()
        self.kernels = build.options.kernels
        self.family, self.arch = build.family, build.arch
        self.dtype = build.options.dtype
        self.__dict__["cache_layers"] = build.cache_layers  # as of a decoder
        self.__dict__["target"] = target  # its weights are not this module's

    @property
    def hidden_shape(self) -> tuple[int, ...]:
        """Of a feature."""
        return (self.arch.hidden_size,)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """[num_tokens] -> [num_tokens, hidden_size] as the target embeds them."""
        target: DecoderForCausalLM = self.__dict__["target"]
        return target.model.embed(token_ids)

    def features(self, states: torch.Tensor) -> torch.Tensor:
        """The features [num_tokens, hidden_size] of the target's states, of `aux_layers` side by side if it has any."""
        return states

    @abstractmethod
    def forward(
        self, token_ids: torch.Tensor, features: torch.Tensor, positions: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """[num_tokens, hidden_size]: the features of `token_ids` ([num_tokens]), from those of the tokens before them.

        Args:
            features: may be overwritten.
            positions: [num_tokens] int64, of the tokens that `features` are of.
        """

    def compute_logits(self, features: torch.Tensor) -> torch.Tensor:
        """[n, hidden_size] of `forward` -> [n, draft vocabulary] float32."""
        target: DecoderForCausalLM = self.__dict__["target"]
        return target.compute_logits(features)

    @property
    def has_own_vocabulary(self) -> bool:
        """Whether its tokens have ids of their own."""
        return False

    def target_ids(self, token_ids: np.ndarray) -> np.ndarray:
        """The target's ids of tokens of the draft vocabulary; -1 stays."""
        return token_ids

    def kv_cache_specs(self, block_size: int) -> dict[str, KVCacheSpec]:
        """As `CausalLM`."""
        parts = self.__dict__["cache_layers"].parts
        return {name: part.kv_cache_spec(block_size, self.dtype.itemsize) for name, part in parts.items()}

    def stored_tensors(self) -> dict[str, torch.Tensor]:
        """As `CausalLM`."""
        packed = {name: tensor for name, tensor in self.named_buffers() if "rotar" not in name}
        return {name: tensor.detach() for name, tensor in {**dict(self.named_parameters()), **packed}.items()}

    def checkpoint_targets(self) -> dict[str, WeightTarget]:
        """The checkpoint's name of each tensor -> where it goes."""
        return {self._stored_name(name): target for name, target in self._targets()}

    @abstractmethod
    def _targets(self) -> Iterator[tuple[str, WeightTarget]]: ...

    def _stored_name(self, name: str) -> str:
        for pattern, replacement in self.family.names(self.arch):
            name = re.sub(pattern, replacement, name)
        return name


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedNames:
    """How a checkpoint names the tensors of a `FusedHead`; None = it has no such tensor.

    Attributes:
        layer: the decoder layer.
        projection: of embedding and feature, side by side.
        embedding_norm, feature_norm: before that.
        output_norm: after the layer.
    """

    layer: str
    projection: str
    embedding_norm: str | None = None
    feature_norm: str | None = None
    output_norm: str | None = None


class FusedHead(FeatureHead):
    """EAGLE-1 and the heads that ship with models: one projection of embedding and feature, then a decoder layer.

    Checkpoints hold the projection as one matrix. Here its halves are multiplied apart: nothing is put side by side.

    Args:
        layer: of the target's kind.
        norm: of those that `names` name.
        has_bias: of the projection.
        feeds_normed: what is fed back has gone through the output norm (Qwen3-Next), not only the logits.
    """

    is_native = True

    def __init__(
        self,
        build: BuildContext,
        target: DecoderForCausalLM,
        layer: LayerArch,
        names: FusedNames,
        norm: NormArch,
        *,
        has_bias: bool = False,
        feeds_normed: bool = False,
    ) -> None:
        super().__init__(build, target)
        size, options = build.arch.hidden_size, build.options
        self.names, self.feeds_normed = names, feeds_normed
        self.embedding_projection = Linear(size, size, bias=has_bias, options=options)
        self.feature_projection = Linear(size, size, bias=False, options=options)
        self.embedding_norm = None if names.embedding_norm is None else Norm(size, norm, options=options)
        self.feature_norm = None if names.feature_norm is None else Norm(size, norm, options=options)
        self.output_norm = None if names.output_norm is None else Norm(size, norm, options=options)
        self.layer = DecoderLayer(build, layer, 0, names.layer)
        self.rotaries = nn.ModuleList(build.rotaries.values())

    def forward(
        self, token_ids: torch.Tensor, features: torch.Tensor, positions: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """As `FeatureHead`."""
        embedded = self.embed(token_ids)
        if self.embedding_norm is not None:
            embedded = self.embedding_norm(embedded)
        if self.feature_norm is not None:
            features = self.feature_norm(features)
        projected = self.kernels.add(self.embedding_projection(embedded), self.feature_projection(features))
        x, residual = self.layer(projected, None, positions, context)
        if residual is not None:
            x = self.kernels.add(x, residual)
        if self.feeds_normed and self.output_norm is not None:
            x = self.output_norm(x)
        output: torch.Tensor = x
        return output

    def compute_logits(self, features: torch.Tensor) -> torch.Tensor:
        """As `FeatureHead`."""
        if self.output_norm is not None and not self.feeds_normed:
            features = self.output_norm(features)
        return super().compute_logits(features)

    def _targets(self) -> Iterator[tuple[str, WeightTarget]]:
        halves = self.embedding_projection, self.feature_projection
        weights = [half.method.row_target(half, 0, half.output_size) for half in halves]
        yield f"{self.names.projection}.weight", SideBySide(weights)
        if halves[0].bias is not None:
            yield f"{self.names.projection}.bias", TensorTarget(halves[0].bias.data)
        for norm, name in (
            (self.embedding_norm, self.names.embedding_norm),
            (self.feature_norm, self.names.feature_norm),
            (self.output_norm, self.names.output_norm),
        ):
            if norm is not None and name is not None:
                yield from norm.targets(name)
        yield from self.layer.targets(self.names.layer)


class Eagle3Head(FeatureHead):
    """EAGLE-3: features of three layers, a layer that sees embedding and feature side by side, words of its own.

    Args:
        layer: a Llama's; its attention takes twice the hidden size.
        layer_name: in the checkpoint, such as "midlayer".
        aux_layers: see `FeatureHead`.
        target_offsets: [draft vocabulary] int64; the target's id of a token less its own; None = the ids are the same.
        has_projection: the head has an output projection of its own.
    """

    def __init__(
        self,
        build: BuildContext,
        target: DecoderForCausalLM,
        layer: LayerArch,
        layer_name: str,
        aux_layers: tuple[int, ...],
        draft_vocab_size: int,
        target_offsets: np.ndarray | None,
        *,
        has_projection: bool,
        fusion_has_bias: bool = False,
    ) -> None:
        super().__init__(build, target)
        size, options = build.arch.hidden_size, build.options
        assert layer.attention is not None and layer.mlp is not None and layer.ffn_norm is not None, "a Llama's layer"
        self.aux_layers, self.layer_name, self._offsets = aux_layers, layer_name, target_offsets
        fused_size = len(aux_layers) * build.arch.hidden_size
        self.fusion = Linear(fused_size, size, bias=fusion_has_bias, options=options)
        self.embedding_norm, self.feature_norm, self.ffn_norm, self.output_norm = (
            Norm(size, layer.ffn_norm, options=options) for _ in range(4)
        )
        self.self_attn = AttentionPart(build, layer.attention, 0, f"{layer_name}.self_attn")
        self.mlp = MLPPart(build, layer.mlp, 0, f"{layer_name}.mlp")
        self.lm_head = TokenTable(draft_vocab_size, size, options=options) if has_projection else None
        self.rotaries = nn.ModuleList(build.rotaries.values())

    def features(self, states: torch.Tensor) -> torch.Tensor:
        """As `FeatureHead`: [num_tokens, 3 * hidden_size] in one projection."""
        fused: torch.Tensor = self.fusion(states)
        return fused

    def forward(
        self, token_ids: torch.Tensor, features: torch.Tensor, positions: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """As `FeatureHead`."""
        both = torch.cat((self.embedding_norm(self.embed(token_ids)), self.feature_norm(features)), 1)
        x, residual = self.ffn_norm.add_and_norm(self.self_attn(both, positions, context), features)
        return self.kernels.add(self.mlp(x, positions, context), residual)

    def compute_logits(self, features: torch.Tensor) -> torch.Tensor:
        """As `FeatureHead`."""
        normed = self.output_norm(features)
        return super().compute_logits(normed) if self.lm_head is None else self.lm_head.logits(normed)

    @property
    def has_own_vocabulary(self) -> bool:
        """As `FeatureHead`."""
        return self._offsets is not None

    def target_ids(self, token_ids: np.ndarray) -> np.ndarray:
        """As `FeatureHead`."""
        if self._offsets is None:
            return token_ids
        found: np.ndarray = np.where(token_ids < 0, -1, token_ids + self._offsets[np.maximum(token_ids, 0)])
        return found.astype(np.int32)

    def _targets(self) -> Iterator[tuple[str, WeightTarget]]:
        name = self.layer_name
        yield from linear_targets(self.fusion, "fc")
        yield from self.embedding_norm.targets(f"{name}.input_layernorm")
        yield from self.feature_norm.targets(f"{name}.hidden_norm")
        yield from self.ffn_norm.targets(f"{name}.post_attention_layernorm")
        yield from self.output_norm.targets("norm")
        yield from self.self_attn.targets(f"{name}.self_attn")
        yield from self.mlp.targets(f"{name}.mlp")
        if self.lm_head is not None:
            yield from linear_targets(self.lm_head, "lm_head")
