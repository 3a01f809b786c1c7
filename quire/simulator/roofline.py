"""A roofline cost model: a step is as slow as its arithmetic or its memory traffic, whichever takes longer.

For named accelerators and a model's shape, with degrees of tensor and pipeline parallelism. The rates are facts
(`hardware`); how much of them is reached is assumed, and every assumption is a field of `Assumptions`.

Source: Williams et al. 2009 (roofline); byte and operation counts of a decoder as in Kaplan et al. 2020, appendix B.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from quire.config.cache import CacheConfig
from quire.config.model_arch import ModelArch
from quire.config.scheduler import SchedulerConfig
from quire.core.kv_spec import KVCacheConfig, KVCacheSpec
from quire.errors import ConfigError, NotEnoughMemoryError
from quire.kv_cache.planning import plan_kv_cache
from quire.simulator.costs import StepShape
from quire.simulator.division import Division, Exchanges, expert_weights, rank_weights
from quire.simulator.hardware import Hardware
from quire.simulator.interconnect import Interconnect
from quire.simulator.mixers import cache_specs, mixer_costs, of_drafts

DEFAULT_BLOCK_SIZE = 16
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """What no data sheet says.

    Attributes:
        compute_share: of the peak rate that matrix products reach.
        attention_share: of the peak rate that attention over prompts reaches.
        memory_share: of the bandwidth that is reached.
        link_share: of an interconnect's bandwidth that an exchange reaches; measured ones are taken as they are.
        collective_s: seconds of an exchange of nothing over the device's own links.
        step_s: seconds of a step beside the layers: launches, sampling.
        gap_s: seconds between steps: planning and messages.
        request_s: seconds from a client's call to the queue.
        request_each_s: seconds between requests that come at once.
        delivery_s, delivery_token_s: seconds of a step's delivery, and of each token in it.
        memory_use: share of the memory for weights and KV cache.
        workspace: bytes of each device for activations.
    """

    compute_share: float = 0.6
    attention_share: float = 0.4
    memory_share: float = 0.8
    link_share: float = 0.7
    collective_s: float = 10e-6
    step_s: float = 1e-3
    gap_s: float = 0.3e-3
    request_s: float = 1e-3
    request_each_s: float = 0.1e-3
    delivery_s: float = 0.5e-3
    delivery_token_s: float = 10e-6
    memory_use: float = 0.9
    workspace: float = 2e9


class Roofline:
    """Costs of one replica, divided over `division.num_devices` devices by the engine's rules (ADR 0094).

    The engine plans one batch at a time, so a pipeline's stages work one after the other: they add memory, not speed.

    Args:
        between_ranks, between_stages: interconnects; None = the device's own links, and the same as between ranks.
        draft_arch: of a model that drafts, divided among the devices as the other one is; its weights and pages are
            counted, and not what its steps take.

    Raises:
        ConfigError: the device does not compute in this dtype, or the model cannot be divided like this.
        NotEnoughMemoryError: the weights do not fit.
    """

    def __init__(
        self,
        arch: ModelArch,
        hardware: Hardware,
        *,
        division: Division | None = None,
        dtype: str = "bfloat16",
        assumptions: Assumptions | None = None,
        between_ranks: Interconnect | None = None,
        between_stages: Interconnect | None = None,
        draft_arch: ModelArch | None = None,
    ) -> None:
        if dtype not in hardware.flops:
            raise ConfigError(
                f"{hardware.name} does not have a rate for dtype {dtype!r}",
                hint=f"use {', '.join(hardware.flops)}",
                field="dtype",
            )
        self.division = division or Division()
        self.division.check(arch)
        self.assumptions = guess = assumptions or Assumptions()
        self._arch, self._hardware, self._draft_arch = arch, hardware, draft_arch
        self._item = DTYPE_BYTES[dtype]
        self._num_expert_weights = sum(
            layer.moe.num_experts * expert_weights(layer.moe, arch.hidden_size) for layer in arch.layers if layer.moe
        )
        self._head_params = arch.vocab_size * arch.table_size
        self._mixers = mixer_costs(arch, self._item, self.division.num_ranks)
        self._flops = hardware.flops[dtype]
        links = between_ranks or Interconnect(
            name=f"{hardware.name}'s own", latency_s=guess.collective_s, bandwidth=hardware.link, source=hardware.source
        )
        self._links = links, between_stages or links
        reached = (one.with_share(guess.link_share) for one in self._links)
        self.exchanges = Exchanges(arch, self.division, self._item, *reached)
        if min(self.num_free_bytes(stage) for stage in range(self.division.num_stages)) <= 0:
            raise NotEnoughMemoryError(
                f"{self.weight_bytes / 1e9:.0f} GB of weights do not fit in {self.division.num_devices} x "
                f"{hardware.name} of {hardware.capacity / 1e9:.0f} GB",
                hint="use more devices (--tensor-parallel-size), a smaller dtype, or larger devices",
                field="tensor_parallel_size",
            )

    @property
    def weight_bytes(self) -> float:
        """Of the whole model, and of one that drafts."""
        draft = self._draft_arch
        num_draft = 0 if draft is None else draft.num_layer_weights + draft.num_table_weights
        return (self._arch.num_layer_weights + self._arch.num_table_weights + num_draft) * self._item

    @property
    def request_s(self) -> float:
        """Seconds from a client's call to the queue."""
        return self.assumptions.request_s

    @property
    def request_each_s(self) -> float:
        """Seconds between requests that come at once."""
        return self.assumptions.request_each_s

    def rank_weight_bytes(self, stage: int) -> float:
        """That the largest rank of a stage keeps."""
        draft, num_devices = self._draft_arch, self.division.num_devices
        num_draft = 0 if draft is None else (draft.num_layer_weights + draft.num_table_weights) / num_devices
        return (rank_weights(self._arch, self.division, stage) + num_draft) * self._item

    def num_free_bytes(self, stage: int = 0) -> float:
        """For the KV cache, on each device of a stage."""
        used = self.rank_weight_bytes(stage) + self.assumptions.workspace
        return self._hardware.capacity * self.assumptions.memory_use - used

    def kv_cache(
        self, cache: CacheConfig, scheduler: SchedulerConfig, max_model_len: int, num_drafts: int = 0
    ) -> KVCacheConfig:
        """The cache of one replica: groups, pools and blocks, as the engine plans them, of the stage that has fewest.

        Args:
            num_drafts: most drafts of a request in a step.

        Raises:
            NotEnoughMemoryError: it does not hold one request of `max_model_len` tokens.
        """
        block_size = cache.block_size or DEFAULT_BLOCK_SIZE
        plans = [
            plan_kv_cache(
                self._specs(stage, block_size), int(self.num_free_bytes(stage)), cache, max_model_len,
                scheduler.max_num_batched_tokens, scheduler.max_num_seqs or 1, num_drafts,
            )
            for stage in range(self.division.num_stages)
        ]  # fmt: skip
        return min(plans, key=lambda plan: plan.num_blocks)

    def _specs(self, stage: int, block_size: int) -> dict[str, KVCacheSpec]:
        layers = self.division.layers_of(stage, self._arch.num_layers)
        num_ranks, draft = self.division.num_ranks, self._draft_arch
        specs = cache_specs(self._arch, block_size, self._item, num_ranks=num_ranks, layers=layers)
        if draft is not None:
            layers = self.division.layers_of(stage, draft.num_layers)
            specs |= of_drafts(cache_specs(draft, block_size, self._item, num_ranks=num_ranks, layers=layers))
        return specs

    def step_seconds(self, shape: StepShape) -> float:
        """Products, attention and exchanges, one after the other."""
        rate = self._flops * self.assumptions.compute_share
        bandwidth = self._hardware.bandwidth * self.assumptions.memory_share
        times = 0.0
        for count, num_bytes, num_rows in (
            (self._arch.num_active_layer_weights, self._read_bytes(shape.num_tokens), shape.num_tokens),
            (self._head_params, self._head_params * self._item, shape.num_sampling),
        ):
            if num_rows:
                times += max(2 * num_rows * count / rate, num_bytes / bandwidth) / self.division.num_ranks
        times += self._attention_seconds(shape, bandwidth)
        return times + self.exchanges.seconds(shape) + self.assumptions.step_s

    def _read_bytes(self, num_tokens: int) -> float:
        """Of the layers' weights in a step, by the ranks of one replica; experts of no token are not read."""
        arch, num_replicas = self._arch, self.division.num_expert_ranks // self.division.num_ranks
        dense = arch.num_layer_weights - self._num_expert_weights
        of_token = arch.num_active_layer_weights - dense
        experts = min(self._num_expert_weights, num_replicas * num_tokens * of_token) / num_replicas
        return (dense + experts) * self._item

    def _attention_seconds(self, shape: StepShape, bandwidth: float) -> float:
        flops = self._flops * self.assumptions.attention_share
        return sum(count * cost.seconds(shape, flops, bandwidth) for count, cost in self._mixers)

    def gap_seconds(self, shape: StepShape) -> float:
        """Seconds between two steps."""
        return self.assumptions.gap_s

    def delivery_seconds(self, num_tokens: int) -> float:
        """Seconds from a step's end to its tokens' delivery."""
        return self.assumptions.delivery_s + num_tokens * self.assumptions.delivery_token_s

    def memory(self, kv_cache: KVCacheConfig) -> list[dict[str, object]]:
        """Where the bytes of each rank go, by stage; `kv_cache` is what was planned."""
        block_size, found = kv_cache.block_size, []
        for stage in range(self.division.num_stages):
            layers = self.division.layers_of(stage, self._arch.num_layers)
            found.append(
                {
                    "stage": stage, "ranks": self.division.num_ranks, "layers": [layers.start, layers.stop],
                    "has_embedding_and_head": stage == 0, "weights_bytes": int(self.rank_weight_bytes(stage)),
                    "workspace_bytes": int(self.assumptions.workspace),
                    "kv_cache_bytes": int(self.num_free_bytes(stage)),
                    "kv_bytes_per_token": sum(
                        spec.page_size_bytes for spec in self._specs(stage, block_size).values() if spec.keeps_sequence
                    ) // block_size,
                }
            )  # fmt: skip
        return found

    def facts(self) -> dict[str, object]:
        """What the model rests on: figures of the device with their source, and every assumption."""
        between_ranks, between_stages = (dataclasses.asdict(one) for one in self._links)
        return {
            "hardware": dataclasses.asdict(self._hardware),
            "tensor_parallel": self.division.num_ranks,
            "pipeline_parallel": self.division.num_stages,
            "expert_parallel": self.division.divides_experts,
            "interconnect": between_ranks,
            "stage_interconnect": between_stages,
            "assumptions": dataclasses.asdict(self.assumptions),
        }
