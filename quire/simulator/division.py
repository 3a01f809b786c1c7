"""How a model is divided over ranks, stages and replicas: what each keeps, and what they exchange in a step.

Called by the cost models and `quire plan`. Pure functions of a `ModelArch`, by the rules that the engine follows
(docs/adr/0094): matrices are divided by outputs; norms, routers and recurrences are on every rank; a stage has whole
layers, the first one the embedding and the output projection too; with expert parallelism an expert is whole on one
rank. "The largest rank" is the one that has most, where sizes do not divide.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from quire.config.model_arch import AttentionArch, LayerArch, ModelArch, MoEArch
from quire.errors import ConfigError
from quire.simulator.costs import StepShape
from quire.simulator.interconnect import Interconnect

LOGIT_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """Sizes.

    Attributes:
        num_ranks: that compute each layer together (tensor parallel).
        num_stages: of the pipeline.
        num_replicas: engines; they share experts where `divides_experts`, else nothing.
        divides_experts: experts are whole, on one rank each (expert parallel).
    """

    num_ranks: int = 1
    num_stages: int = 1
    num_replicas: int = 1
    divides_experts: bool = False

    @property
    def num_devices(self) -> int:
        """Of one replica."""
        return self.num_ranks * self.num_stages

    @property
    def num_expert_ranks(self) -> int:
        """Among which the experts of a layer are divided."""
        return self.num_ranks * (self.num_replicas if self.divides_experts else 1)

    def check(self, arch: ModelArch) -> None:
        """Refuse what no engine could be divided into.

        Raises:
            ConfigError: more stages than layers, or expert ranks than experts, or no experts.
        """
        if self.num_stages > arch.num_layers:
            raise ConfigError(
                f"{arch.num_layers} layers cannot be divided among {self.num_stages} stages",
                hint="use fewer stages", field="pipeline_parallel_size",
            )  # fmt: skip
        if not self.divides_experts:
            return
        experts = [layer.moe.num_experts for layer in arch.layers if layer.moe is not None]
        if not experts or min(experts) < self.num_expert_ranks:
            raise ConfigError(
                f"{min(experts, default=0)} experts cannot be divided among {self.num_expert_ranks} ranks",
                hint="leave out --enable-expert-parallel, or use fewer ranks", field="enable_expert_parallel",
            )  # fmt: skip

    def layers_of(self, stage: int, num_layers: int) -> range:
        """The layers of a stage, as `config.pipeline.divide_layers` divides those that share no cache."""
        return range(num_layers * stage // self.num_stages, num_layers * (stage + 1) // self.num_stages)


def divides_heads(arch: ModelArch, mixer: AttentionArch, num_ranks: int) -> bool:
    """Whether ranks have some heads each; else every rank computes all (as in `models.parts.head_shards`)."""
    norm = mixer.head_norm
    has_own_gains = norm is not None and (mixer.has_row_norm or norm.is_centered)
    shares = any(layer.shares_cache_of is not None for layer in arch.attention_layers)
    is_even = mixer.num_heads % num_ranks == 0 and (
        mixer.num_kv_heads % num_ranks == 0 or num_ranks % mixer.num_kv_heads == 0
    )
    return is_even and not has_own_gains and not shares


def expert_weights(moe: MoEArch, hidden_size: int) -> int:
    """Of one expert."""
    return (3 if moe.is_gated else 2) * (moe.latent_size or hidden_size) * moe.intermediate_size


def rank_weights(arch: ModelArch, division: Division, stage: int) -> float:
    """Numbers of the weights that the largest rank of a stage keeps."""
    layers = [arch.layers[number] for number in division.layers_of(stage, arch.num_layers)]
    total = sum(_layer_weights(arch, layer, division) for layer in layers)
    return total + (arch.num_table_weights / division.num_ranks if stage == 0 else 0)


def _layer_weights(arch: ModelArch, layer: LayerArch, division: Division) -> float:
    num_ranks, hidden_size = division.num_ranks, arch.hidden_size
    divided, whole = float(layer.num_weights(hidden_size)), 2.0 * hidden_size  # whole: the norms
    if layer.moe is not None:
        moe, of_expert = layer.moe, expert_weights(layer.moe, hidden_size)
        router = hidden_size * moe.num_experts
        divided -= router
        whole += router
        if division.divides_experts:
            divided -= moe.num_experts * of_expert
            whole += -(-moe.num_experts // division.num_expert_ranks) * of_expert
    attention = layer.attention
    if attention is not None and num_ranks > attention.num_kv_heads and divides_heads(arch, attention, num_ranks):
        # Key/value heads are on several ranks where there are fewer.
        num_kv = 0 if attention.shares_cache_of is not None else 1 if attention.keys_are_values else 2
        of_head = num_kv * (attention.input_size or hidden_size) * attention.head_size
        divided -= attention.num_kv_heads * of_head
        whole += of_head
    return divided / num_ranks + whole


class Exchanges:
    """What the ranks and stages of one replica exchange in a step.

    Args:
        item_bytes: bytes of a number in the model's type.
        between_ranks, between_stages: what connects them.
    """

    def __init__(
        self,
        arch: ModelArch,
        division: Division,
        item_bytes: int,
        between_ranks: Interconnect,
        between_stages: Interconnect,
    ) -> None:
        self._arch, self._division, self._item = arch, division, item_bytes
        self._between_ranks, self._between_stages = between_ranks, between_stages
        self._widths = [width for layer in arch.layers for width in self._layer_widths(layer)]
        self._widths.append(arch.table_size)  # rows of the embedding
        self._chosen = [
            layer.moe.num_chosen * (layer.moe.latent_size or arch.hidden_size)
            for layer in arch.layers if layer.moe is not None and division.divides_experts
        ]  # fmt: skip

    def _layer_widths(self, layer: LayerArch) -> Iterator[int]:
        """Elements of a token in each all-gather of a layer."""
        for _, mixer in layer.mixers():
            if isinstance(mixer, AttentionArch) and divides_heads(self._arch, mixer, self._division.num_ranks):
                yield mixer.num_heads * mixer.head_size
            else:
                yield mixer.width  # what its projections make is whole on every rank
            yield self._arch.hidden_size
        if layer.mlp is not None:
            yield from (layer.mlp.width, self._arch.hidden_size)
        if layer.moe is not None:
            yield from self._expert_widths(layer.moe)

    def _expert_widths(self, moe: MoEArch) -> Iterator[int]:
        if not self._division.divides_experts:
            yield moe.num_chosen * moe.intermediate_size * (2 if moe.is_gated else 1)
            yield moe.num_chosen * (moe.latent_size or self._arch.hidden_size)
        if moe.shared_size:
            yield from (moe.shared_size, self._arch.hidden_size)

    def seconds(self, shape: StepShape) -> float:
        """Of all exchanges of a step, one after the other."""
        num_ranks, item = self._division.num_ranks, self._item
        total = 0.0
        if num_ranks > 1:
            gather = self._between_ranks.gather_seconds
            total += sum(gather(shape.num_tokens * width * item / num_ranks, num_ranks) for width in self._widths)
            total += gather(shape.num_sampling * self._arch.vocab_size * LOGIT_BYTES / num_ranks, num_ranks)
        if self._division.num_expert_ranks > 1:
            total += sum(2 * self._all_to_all_seconds(shape, width) for width in self._chosen)
        return total + sum(self._between_stages.send_seconds(size) for size in self._sends(shape))

    def num_bytes(self, shape: StepShape) -> float:
        """That reach the rank that receives most, in a step."""
        num_ranks, item = self._division.num_ranks, self._item
        others = (num_ranks - 1) / num_ranks
        logits = shape.num_sampling * self._arch.vocab_size * LOGIT_BYTES
        total = others * (shape.num_tokens * sum(self._widths) * item + logits)
        total += sum(2 * self._routed_bytes(shape, width) for width in self._chosen)
        return total + sum(self._sends(shape))

    def _all_to_all_seconds(self, shape: StepShape, width: int) -> float:
        num_ranks = self._division.num_expert_ranks
        return self._between_ranks.gather_seconds(self._routed_bytes(shape, width) / (num_ranks - 1), num_ranks)

    def _routed_bytes(self, shape: StepShape, width: int) -> float:
        """Of tokens that the experts of other ranks take; tokens are divided among the ranks of a replica."""
        num_ranks = self._division.num_expert_ranks
        return shape.num_tokens / self._division.num_ranks * width * self._item * (num_ranks - 1) / num_ranks

    def _sends(self, shape: StepShape) -> list[float]:
        """Bytes from stage to stage, and of the rows that sample from the last stage to the first."""
        num_stages, row_bytes = self._division.num_stages, self._arch.hidden_size * self._item
        if num_stages == 1:
            return []
        return [float(shape.num_tokens * row_bytes)] * (num_stages - 1) + [float(shape.num_sampling * row_bytes)]
