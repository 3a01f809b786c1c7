"""The decoder of every family, built from a `ModelArch`: embedding, layers of parts, final norm, output projection.

Imported by the registry of models. A family is data (`config.families`); what a layer can consist of is in `parts`.

A Llama's layer, as modules: mixer_norm, self_attn (qkv_proj, attn, o_proj), ffn_norm, mlp (gate_up_proj, down_proj).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from quire.attention.context import ForwardContext
from quire.config.model_arch import LayerArch, NormArch
from quire.core.kv_spec import KVCacheSpec
from quire.distributed.pipeline import PipelineStage
from quire.layers.embedding import TokenTable
from quire.layers.linear import Linear
from quire.layers.norm import Norm
from quire.layers.weight_target import LaterRows, TensorTarget, WeightTarget
from quire.models.aux_states import AuxStates
from quire.models.interfaces import BuildContext
from quire.models.parts.part import Part
from quire.models.parts.per_layer_input import LayerEnd, PerLayerEmbedding
from quire.models.parts.table import FEED_FORWARDS, MIXERS, PartTable
from quire.models.stage_tensors import tensors_elsewhere
from quire.models.tensor_layouts import linear_targets

NORMS = ("mixer_norm", "mixer_post_norm", "ffn_norm", "ffn_post_norm")


# Checkpoints of models that tie both ends may hold the output projection as well.
TIED_HEAD = r"(^|\.)lm_head\.weight$"


class DecoderLayer(nn.Module):
    """Mixers and feed-forward networks, whose outputs are added to the residual stream.

    Attributes:
        narrows: it returns the tokens alone that are wanted of the step; as the last layer can, where its feed-forward
            networks follow its mixers.
    """

    def __init__(self, build: BuildContext, layer: LayerArch, layer_idx: int, name: str) -> None:
        super().__init__()
        self.layer = layer
        self.kernels = build.options.kernels
        self.mixer_norm = _norm(build, layer.mixer_norm)
        self.mixer_post_norm = _norm(build, layer.mixer_post_norm)
        self.ffn_norm = _norm(build, layer.ffn_norm)
        self.ffn_post_norm = _norm(build, layer.ffn_post_norm)
        has_end = layer.output_scale or layer.per_layer_input
        self.end = LayerEnd(build, layer) if has_end else None
        is_last = layer_idx == len(build.arch.layers) - 1
        self.narrows = is_last and self.end is None and not layer.is_post_norm and not layer.is_parallel
        self.mixers = tuple(self._add(build, MIXERS, *part, layer_idx, name) for part in layer.mixers())
        self.feed_forwards = tuple(
            self._add(build, FEED_FORWARDS, *part, layer_idx, name) for part in layer.feed_forwards()
        )

    def _add(self, build: BuildContext, table: PartTable, field: str, arch: object, layer_idx: int, name: str) -> Part:
        """Make a part, which becomes a module of the layer under its own name."""
        module_name, part_class = table[field]
        part = part_class(build, arch, layer_idx, f"{name}.{module_name}")
        self.add_module(module_name, part)
        return part

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        positions: torch.Tensor,
        context: ForwardContext,
        per_layer_input: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Add the layer before (`x`) to the residual stream; return this layer's output and the stream.

        The first layer has no stream yet (None): it begins with the embedding. A layer that has done something with the
        sum returns that, and no stream.
        """
        if self.layer.is_post_norm:
            return self._post_norm(x if residual is None else self.kernels.add(x, residual), positions, context), None
        compute = self._parallel if self.layer.is_parallel else self._in_sequence
        x, residual = compute(x, residual, positions, context)
        if self.end is None:
            return x, residual
        return self.end(self.kernels.add(x, residual), per_layer_input), None

    def _in_sequence(
        self, x: torch.Tensor, residual: torch.Tensor | None, positions: torch.Tensor, context: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        for parts, norm, post_norm in (
            (self.mixers, self.mixer_norm, self.mixer_post_norm),
            (self.feed_forwards, self.ffn_norm, self.ffn_post_norm),
        ):
            if parts is self.feed_forwards and self.narrows and context.wanted is not None:
                x = self.kernels.take_rows(x, context.wanted)
                residual = None if residual is None else self.kernels.take_rows(residual, context.wanted)
            if parts:
                entered, residual = self._enter(norm, x, residual)
                x = self._finish(self._sum(parts, entered, residual, positions, context), post_norm)
        assert residual is not None, "a layer has a part"
        return x, residual

    def _parallel(
        self, x: torch.Tensor, residual: torch.Tensor | None, positions: torch.Tensor, context: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        entered, residual = self._enter(self.mixer_norm, x, residual)
        ffn_input = entered if self.ffn_norm is None else self.ffn_norm(residual)
        mixed = self._finish(self._sum(self.mixers, entered, residual, positions, context), self.mixer_post_norm)
        output = self._sum(self.feed_forwards, ffn_input, residual, positions, context)
        return self.kernels.add(self._finish(output, self.ffn_post_norm), mixed), residual

    def _post_norm(self, x: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        for parts, norm in ((self.mixers, self.mixer_norm), (self.feed_forwards, self.ffn_norm)):
            if parts:
                x = self.kernels.add(self._finish(self._sum(parts, x, x, positions, context), None), x)
                x = x if norm is None else norm(x)
        return x

    def _enter(
        self, norm: Norm | None, x: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """A part's input, and the stream with `x` added to it; without a norm the input is the stream."""
        if residual is None:
            return (x if norm is None else norm(x)), x
        if norm is None:
            total = self.kernels.add(x, residual)
            return total, total
        return norm.add_and_norm(x, residual)

    def _sum(
        self,
        parts: Sequence[Part],
        x: torch.Tensor,
        stream: torch.Tensor,
        positions: torch.Tensor,
        context: ForwardContext,
    ) -> torch.Tensor:
        outputs: list[torch.Tensor] = [part(stream if part.takes_stream else x, positions, context) for part in parts]
        return functools.reduce(self.kernels.add, outputs)

    def _finish(self, output: torch.Tensor, post_norm: Norm | None) -> torch.Tensor:
        if post_norm is not None:
            output = post_norm(output)
        if self.layer.residual_scale != 1.0:
            output = self.kernels.scale(output, self.layer.residual_scale)
        return output

    def targets(self, name: str) -> Iterator[tuple[str, WeightTarget]]:
        """This program's name of each checkpoint tensor, and where it goes."""
        for norm_name in NORMS:
            norm = getattr(self, norm_name)
            if norm is not None:
                yield from norm.targets(f"{name}.{norm_name}")
        for part_name, part in self.named_children():
            if isinstance(part, Part):
                yield from part.targets(f"{name}.{part_name}")
        if self.end is not None:
            yield from self.end.targets(name)


class DecoderModel(nn.Module):
    """Embedding, layers, final norm; or those of them that a pipeline stage has.

    Attributes:
        stage: the layers that are here, and where the others are; None = all are here.
    """

    # Of the first stage alone.
    embed_tokens: TokenTable

    def __init__(self, build: BuildContext) -> None:
        super().__init__()
        arch = build.arch
        self.stage = stage = build.parallel.stage
        self.kernels = build.options.kernels
        self.dtype, self.hidden_size, self.num_layers = build.options.dtype, arch.hidden_size, arch.num_layers
        self.project_in: Linear | None = None
        self.project_out: Linear | None = None
        self.embed_positions: TokenTable | None = None
        self.embedding_norm: Norm | None = None
        self.has_embedding = stage is None or stage.is_first
        if self.has_embedding:
            self._add_embedding(build)
        layers = range(arch.num_layers) if stage is None else stage.layers
        self.first_layer = layers.start
        self.layers = nn.ModuleList(
            DecoderLayer(build, arch.layers[layer_idx], layer_idx, f"model.layers.{layer_idx}") for layer_idx in layers
        )
        # The layer before these leaves a residual stream beside its output.
        self.follows_stream = layers.start > 0 and arch.layers[layers.start - 1].leaves_stream
        last = self.layers[-1]
        self.narrows = isinstance(last, DecoderLayer) and last.narrows
        self.norm = _norm(build, arch.head.norm)
        self.per_layer_size = max(layer.per_layer_input for layer in arch.layers)
        self.per_layer_embedding: PerLayerEmbedding | None = None
        if self.per_layer_size and self.has_embedding:
            assert arch.head.norm is not None, "the projection has a norm like the model's"
            self.per_layer_embedding = PerLayerEmbedding(build, self.per_layer_size, arch.head.norm)
        self.rotaries = nn.ModuleList(build.rotaries.values())
        self.aux_states: AuxStates | None = None

    def _add_embedding(self, build: BuildContext) -> None:
        arch, options = build.arch, build.options
        # Rounded to the model's dtype, as the families that have such a factor do.
        self.embedding_scale = torch.tensor(arch.embedding.scale, dtype=options.dtype).item()
        self.embed_tokens = TokenTable(arch.vocab_size, arch.table_size, options=options)
        if arch.embedding.table_size:
            self.project_in = Linear(arch.table_size, arch.hidden_size, bias=False, options=options)
            self.project_out = Linear(arch.hidden_size, arch.table_size, bias=False, options=options)
        self.position_offset = arch.embedding.position_offset
        if arch.embedding.num_positions:
            self.embed_positions = TokenTable(arch.embedding.num_positions, arch.hidden_size, options=options)
        self.embedding_norm = _norm(build, arch.embedding.norm)

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """[num_tokens] -> [num_tokens, hidden_size], without positions."""
        x = self.embed_tokens.lookup(input_ids)
        if self.embedding_scale != 1.0:
            x = self.kernels.scale(x, self.embedding_scale)
        return x if self.project_in is None else self.project_in(x)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """[num_tokens] -> [num_tokens, hidden_size]; with `context.wanted` the other tokens have anything."""
        hidden = self._hidden(input_ids, positions, context)
        if context.wanted is None or not self.narrows:
            return hidden
        return self.kernels.put_rows(hidden, context.wanted, len(input_ids))

    def _hidden(self, input_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """Of all tokens, or of those that the last layer leaves."""
        if self.stage is not None:
            return self._hidden_of_stage(self.stage, input_ids, positions, context)
        x, inputs = self._begin(input_ids, positions)
        return self._end(*self._through_layers(x, None, inputs, positions, context))

    def _hidden_of_stage(
        self, stage: PipelineStage, input_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext
    ) -> torch.Tensor:
        """What the layers before these give, from there, through these; from the last stage hidden states."""
        residual: torch.Tensor | None = None
        inputs: torch.Tensor | None = None
        if stage.is_first:
            x, inputs = self._begin(input_ids, positions)
        else:
            receive = functools.partial(stage.receive, len(input_ids), dtype=self.dtype)
            x = receive(self.hidden_size)
            residual = receive(self.hidden_size) if self.follows_stream else None
            inputs = receive(self.num_layers * self.per_layer_size) if self.per_layer_size else None
        x, residual = self._through_layers(x, residual, inputs, positions, context)
        if stage.is_last:
            return self._end(x, residual)
        for tensor in (x, residual, inputs):
            if tensor is not None:
                stage.send(tensor)
        return x

    def _begin(self, input_ids: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What the first layer takes in, and what layers have as inputs of their own, side by side."""
        x = self.embed(input_ids)
        if self.embed_positions is not None:
            x = self.kernels.add(x, self.embed_positions.lookup(positions))
        if self.embedding_norm is not None:
            x = self.embedding_norm(x)
        return x, None if self.per_layer_embedding is None else self.per_layer_embedding(input_ids, x)

    def _through_layers(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        inputs: torch.Tensor | None,
        positions: torch.Tensor,
        context: ForwardContext,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if inputs is None:
            if self.aux_states is not None:
                self.aux_states.begin()
            for layer_idx, layer in enumerate(self.layers, self.first_layer):
                if self.aux_states is not None and layer_idx in self.aux_states.layers:
                    self.aux_states.take(self.kernels.sum(x, residual))
                x, residual = layer(x, residual, positions, context)
        else:
            for layer_idx, layer in enumerate(self.layers, self.first_layer):
                per_layer_input = inputs.narrow(1, layer_idx * self.per_layer_size, self.per_layer_size)
                x, residual = layer(x, residual, positions, context, per_layer_input)
        return x, residual

    def _end(self, x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
        if residual is not None:
            return self.kernels.add(x, residual) if self.norm is None else self.norm.add_and_norm(x, residual)[0]
        return x if self.norm is None else self.norm(x)

    def targets(self, name: str) -> Iterator[tuple[str, WeightTarget]]:
        """This program's name of each checkpoint tensor, and where it goes."""
        if self.has_embedding:
            yield from self.embed_tokens.targets(f"{name}.embed_tokens")
        if self.project_in is not None and self.project_out is not None:
            yield from linear_targets(self.project_in, f"{name}.project_in")
            yield from linear_targets(self.project_out, f"{name}.project_out")
        if self.per_layer_embedding is not None:
            yield from self.per_layer_embedding.targets(name)
        if self.embed_positions is not None:
            for full_name, target in self.embed_positions.targets(f"{name}.embed_positions"):
                yield full_name, LaterRows(target, self.position_offset) if self.position_offset else target
        if self.embedding_norm is not None:
            yield from self.embedding_norm.targets(f"{name}.embedding_norm")
        for layer_idx, layer in enumerate(self.layers, self.first_layer):
            assert isinstance(layer, DecoderLayer)
            yield from layer.targets(f"{name}.layers.{layer_idx}")
        if self.norm is not None:
            yield from self.norm.targets(f"{name}.norm")


class DecoderForCausalLM(nn.Module):
    """A decoder with its output projection, which the first of several stages has: implements `interfaces.CausalLM`."""

    lm_head: TokenTable

    def __init__(self, build: BuildContext) -> None:
        super().__init__()
        arch = build.arch
        self.family = build.family
        self.names = build.family.names(arch)
        self.model = DecoderModel(build)
        self.lm_head_bias: nn.Parameter | None = None
        if self.model.has_embedding:
            self._add_head(build)
        self.is_tied = arch.tie_word_embeddings
        self.head = arch.head
        self.dtype = build.options.dtype
        self.__dict__["cache_layers"] = build.cache_layers  # not as modules: they are those of layers

    def _add_head(self, build: BuildContext) -> None:
        """With tied embeddings both ends are one table, so they are in one stage."""
        arch = build.arch
        self.lm_head = (
            self.model.embed_tokens
            if arch.tie_word_embeddings
            else TokenTable(arch.vocab_size, arch.table_size, options=build.options)
        )
        if arch.head.has_bias:
            self.lm_head_bias = build.options.parameter(arch.vocab_size)

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """Hidden states [num_tokens, hidden_size] of the step's tokens; writes their keys and values."""
        hidden: torch.Tensor = self.model(input_ids, positions, context)
        return hidden

    def compute_logits(self, hidden_rows: torch.Tensor) -> torch.Tensor:
        """[num_logits, hidden_size] -> [num_logits, vocab_size] float32."""
        if self.model.project_out is not None:
            hidden_rows = self.model.project_out(hidden_rows)
        logits = self.lm_head.logits(hidden_rows)
        if self.lm_head_bias is not None:
            logits += self.lm_head_bias
        if self.head.scale != 1.0:
            logits *= self.head.scale
        if self.head.soft_cap:
            logits = logits.div_(self.head.soft_cap).tanh_().mul_(self.head.soft_cap)
        return logits

    def kv_cache_specs(self, block_size: int) -> dict[str, KVCacheSpec]:
        """Layer name -> what it needs from the KV cache, in the order of `ForwardContext.kv_caches`."""
        parts = self.__dict__["cache_layers"].parts
        return {name: part.kv_cache_spec(block_size, self.dtype.itemsize) for name, part in parts.items()}

    def checkpoint_targets(self) -> dict[str, WeightTarget]:
        """The checkpoint's name of each tensor -> where it goes (rows of a fused projection, for some)."""
        targets = dict(self.model.targets("model"))
        if self.model.has_embedding and not self.is_tied:
            targets.update(linear_targets(self.lm_head, "lm_head"))
        if self.lm_head_bias is not None:
            targets["lm_head.bias"] = TensorTarget(self.lm_head_bias.data)
        return {self._stored_name(name): target for name, target in targets.items()}

    def ignored_tensors(self) -> tuple[str, ...]:
        """Patterns of names that checkpoints may have and the model does not need."""
        of_others = () if self.model.stage is None else tensors_elsewhere(self.model.stage, self.model.num_layers)
        return (*self.family.ignored_tensors, *((TIED_HEAD,) if self.is_tied else ()), *of_others)

    def _stored_name(self, name: str) -> str:
        for pattern, replacement in self.names:
            name = re.sub(pattern, replacement, name)
        return name

    def stored_tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor that holds weights, as stored, under this program's own names."""
        weights = dict(self.named_parameters())
        packed = {name: tensor for name, tensor in self.named_buffers() if not _is_table(name)}
        return {name: tensor.detach() for name, tensor in {**weights, **packed}.items()}


def _is_table(name: str) -> bool:
    """Whether a buffer is computed, not loaded: a rotary table, under whichever of its names."""
    return "rotar" in name


def _norm(build: BuildContext, arch: NormArch | None) -> Norm | None:
    return None if arch is None else Norm(build.arch.hidden_size, arch, options=build.options)
