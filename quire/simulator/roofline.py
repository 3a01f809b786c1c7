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
from quire.core.kv_spec import KVCacheConfig
from quire.errors import ConfigError, NotEnoughMemoryError
from quire.kv_cache.planning import plan_kv_cache
from quire.simulator.costs import StepShape
from quire.simulator.hardware import Hardware
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
        link_share: of the link that an all-reduce reaches.
        collective_s: seconds of an all-reduce of nothing.
        step_s: seconds of a step beside the layers: launches, sampling.
        gap_s: seconds between steps: planning and messages.
        request_s: seconds from a client's call to the queue.
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
    delivery_s: float = 0.5e-3
    delivery_token_s: float = 10e-6
    memory_use: float = 0.9
    workspace: float = 2e9


class Roofline:
    """Costs of one replica on `tensor_parallel` x `pipeline_parallel` devices.

    The engine plans one batch at a time, so a pipeline's stages work one after the other: they add memory, not speed.

    Args:
        draft_arch: of a model that drafts, divided among the devices as the other one is; its weights and pages are
            counted, and not what its steps take.

    Raises:
        ConfigError: the device does not compute in this dtype, or heads cannot be divided.
        NotEnoughMemoryError: the weights do not fit.
    """

    def __init__(
        self,
        arch: ModelArch,
        hardware: Hardware,
        *,
        tensor_parallel: int = 1,
        pipeline_parallel: int = 1,
        dtype: str = "bfloat16",
        assumptions: Assumptions | None = None,
        draft_arch: ModelArch | None = None,
    ) -> None:
        if dtype not in hardware.flops:
            raise ConfigError(
                f"{hardware.name} does not have a rate for dtype {dtype!r}",
                hint=f"use {', '.join(hardware.flops)}",
                field="dtype",
            )
        self.assumptions = assumptions or Assumptions()
        self._arch, self._hardware, self._draft_arch = arch, hardware, draft_arch
        self._tp, self._pp = tensor_parallel, pipeline_parallel
        self._item = DTYPE_BYTES[dtype]
        self._layer_params, self._active_params = arch.num_layer_weights, arch.num_active_layer_weights
        self._head_params = arch.vocab_size * arch.table_size
        self._mixers = mixer_costs(arch, self._item, tensor_parallel)
        self._flops = hardware.flops[dtype]
        if self.num_free_bytes() <= 0:
            raise NotEnoughMemoryError(
                f"{self.weight_bytes / 1e9:.0f} GB of weights do not fit in {tensor_parallel * pipeline_parallel} x "
                f"{hardware.name} of {hardware.capacity / 1e9:.0f} GB",
                hint="use more devices (--tensor-parallel-size), a smaller dtype, or larger devices",
                field="tensor_parallel_size",
            )

    @property
    def weight_bytes(self) -> float:
        """Of the whole model, and of one that drafts."""
        draft = self._draft_arch
        num_draft = 0 if draft is None else draft.num_layer_weights + draft.num_table_weights
        return (self._layer_params + self._arch.num_table_weights + num_draft) * self._item

    @property
    def request_s(self) -> float:
        """Seconds from a client's call to the queue."""
        return self.assumptions.request_s

    def num_free_bytes(self) -> float:
        """For the KV cache, on each device."""
        used = self.weight_bytes / (self._tp * self._pp) + self.assumptions.workspace
        return self._hardware.capacity * self.assumptions.memory_use - used

    def kv_cache(
        self, cache: CacheConfig, scheduler: SchedulerConfig, max_model_len: int, num_drafts: int = 0
    ) -> KVCacheConfig:
        """The cache of one replica: groups, pools and blocks, as the engine plans them.

        Args:
            num_drafts: most drafts of a request in a step.

        Raises:
            NotEnoughMemoryError: it does not hold one request of `max_model_len` tokens.
        """
        size = {"num_ranks": self._tp, "num_stages": self._pp}
        block_size = cache.block_size or DEFAULT_BLOCK_SIZE
        specs = cache_specs(self._arch, block_size, self._item, **size)
        if self._draft_arch is not None:
            specs |= of_drafts(cache_specs(self._draft_arch, block_size, self._item, **size))
        return plan_kv_cache(
            specs, int(self.num_free_bytes()), cache, max_model_len, scheduler.max_num_batched_tokens,
            scheduler.max_num_seqs or 1, num_drafts,
        )  # fmt: skip

    def step_seconds(self, shape: StepShape) -> float:
        """Products, attention and all-reduces, one after the other."""
        guess = self.assumptions
        rate = self._flops * guess.compute_share
        bandwidth = self._hardware.bandwidth * guess.memory_share
        read = min(self._layer_params, shape.num_tokens * self._active_params)  # experts of no token are not read
        times = 0.0
        for count, num_bytes, num_rows in (
            (self._active_params, read * self._item, shape.num_tokens),
            (self._head_params, self._head_params * self._item, shape.num_sampling),
        ):
            if num_rows:
                times += max(2 * num_rows * count / rate, num_bytes / bandwidth) / self._tp
        times += self._attention_seconds(shape, bandwidth)
        return times + self._communication_seconds(shape) + guess.step_s

    def _attention_seconds(self, shape: StepShape, bandwidth: float) -> float:
        flops = self._flops * self.assumptions.attention_share
        return sum(count * cost.seconds(shape, flops, bandwidth) for count, cost in self._mixers)

    def _communication_seconds(self, shape: StepShape) -> float:
        guess, num_bytes = self.assumptions, shape.num_tokens * self._arch.hidden_size * self._item
        link = self._hardware.link * guess.link_share
        seconds = 0.0
        if self._tp > 1:
            ring = 2 * (self._tp - 1) / self._tp * num_bytes / link
            seconds += 2 * self._arch.num_layers * (ring + guess.collective_s)
        return seconds + (self._pp - 1) * (num_bytes / link + guess.collective_s)

    def gap_seconds(self, shape: StepShape) -> float:
        """Seconds between two steps."""
        return self.assumptions.gap_s

    def delivery_seconds(self, num_tokens: int) -> float:
        """Seconds from a step's end to its tokens' delivery."""
        return self.assumptions.delivery_s + num_tokens * self.assumptions.delivery_token_s

    def facts(self) -> dict[str, object]:
        """What the model rests on: figures of the device with their source, and every assumption."""
        return {
            "hardware": dataclasses.asdict(self._hardware),
            "tensor_parallel": self._tp,
            "pipeline_parallel": self._pp,
            "assumptions": dataclasses.asdict(self.assumptions),
        }
