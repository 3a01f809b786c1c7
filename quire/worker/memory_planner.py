"""MemoryPlanner: the figures of `core.memory_budget`, for this model on this device. Made by the worker; no tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from quire.config.model_arch import ModelArch
from quire.core.draft_trees import num_scratch_blocks
from quire.core.kv_spec import KVCacheConfig, KVCacheSpec
from quire.core.memory_budget import (
    check_allocation,
    check_swap_space,
    drawn_drafts_bytes,
    estimate_weights_bytes,
    estimate_workspace_bytes,
    plan_memory,
)
from quire.kv_cache.pool_sizes import useful_bytes
from quire.logger import get_logger
from quire.models.weight_files import kept_bytes
from quire.utils.memory import GIB, read_memory
from quire.worker.device.ops import DeviceOps
from quire.worker.group_messages import StageReport
from quire.worker.setup import WorkerSetup

logger = get_logger(__name__)


class MemoryPlanner:
    """Divides what was free when it was made, which is before the weights are read.

    Ranks of one machine share its memory evenly.

    Args:
        draft_arch: of a model that drafts beside the target; None = there is none.
    """

    def __init__(self, setup: WorkerSetup, ops: DeviceOps, draft_arch: ModelArch | None = None) -> None:
        self._setup = setup
        self._memory = ops.memory
        self._free_bytes = ops.memory.free_bytes()
        self._num_ranks, self._total_ranks = setup.num_local_ranks, setup.num_ranks
        self._utilization = setup.config.cache.memory_utilization
        limits = setup.limits
        if setup.experts is not None:  # whose tokens may all come to the experts of one
            num_tokens = setup.experts.num_replicas * limits.max_num_batched_tokens
            limits = dataclasses.replace(limits, max_num_batched_tokens=num_tokens)
        workspace_bytes = estimate_workspace_bytes(setup.arch, limits, setup.dtype.itemsize)
        self._draft_weights_bytes = 0
        if draft_arch is not None:  # it works when the target does not
            draft_bytes = estimate_workspace_bytes(draft_arch, setup.limits, setup.dtype.itemsize)
            workspace_bytes = max(workspace_bytes, draft_bytes) + ops.graph_bytes
            self._draft_weights_bytes = estimate_weights_bytes(
                draft_arch, setup.limits.max_model_len, setup.dtype.itemsize, setup.config.model.quantization
            )
        speculative = setup.config.speculative
        if speculative is not None and speculative.draws_drafts:
            max_num_seqs = setup.limits.max_num_seqs
            workspace_bytes += drawn_drafts_bytes(max_num_seqs, speculative.num_tokens, setup.arch.vocab_size)
        # Of all ranks together, as the swap space is.
        self._offload_bytes = int(setup.config.cache.kv_offloading_size * GIB) if ops.memory.is_host else 0
        self._workspace_bytes = workspace_bytes + ops.graph_bytes
        swap_bytes = int(setup.config.cache.swap_space * GIB)
        stage = ops.stage
        self._swap_share = 1 / self._num_ranks  # of the swap space that this rank has
        if stage is not None:
            self._swap_share = len(stage.layers) / setup.arch.num_layers / stage.size
        # The swap space is always the host's memory, which may be the device's.
        self._swap_bytes, self._host_swap_bytes = (swap_bytes, 0) if ops.memory.is_host else (0, swap_bytes)

    def check_weights_fit(self) -> None:
        """Refuse a model that is too large before its weights fill the memory.

        Raises:
            NotEnoughMemoryError: it is, or the swap space or kv_offloading_size is.
        """
        check_swap_space(self._offload_bytes, int(self._free_bytes * self._utilization), "kv_offloading_size")
        setup = self._setup
        weights_bytes = estimate_weights_bytes(
            setup.arch,
            setup.limits.max_model_len,
            setup.dtype.itemsize,
            setup.config.model.quantization,
            kept_bytes(setup.config),
        )
        if setup.experts is not None:
            weights_bytes = int(weights_bytes * _own_share(setup.arch, setup.experts.num_replicas))
        plan_memory(
            free_bytes=self._free_bytes,
            utilization=self._utilization,
            weights_bytes=weights_bytes * self._num_ranks // self._total_ranks + self._draft_weights_bytes,
            workspace_bytes=self._num_ranks * self._workspace_bytes + self._offload_bytes,
            useful_bytes=None,
            swap_bytes=self._swap_bytes,
        )
        if self._host_swap_bytes:
            check_swap_space(self._host_swap_bytes, read_memory().available_bytes)

    def available_kv_cache_bytes(self, weights_bytes: int, specs: Mapping[str, KVCacheSpec]) -> int:
        """Bytes the KV cache may take beside the weights; logs how they were found.

        Args:
            specs: layer name -> what it needs from the KV cache.
        """
        return self._budget(weights_bytes, self._useful_bytes(specs) if self._memory.is_host else None)

    def spare_bytes(self, weights_bytes: int) -> int:
        """As `available_kv_cache_bytes`, however much of it can be of use."""
        return self._budget(weights_bytes, None)

    def bytes_of_stages(self, reports: Sequence[StageReport]) -> int:
        """Bytes that the KV cache may take on all pipeline stages together, which have equally many blocks: as many as
        the stage with the least memory for its layers.
        """
        page_bytes = [sum(spec.page_size_bytes for spec in report.specs.values()) for report in reports]
        spare_bytes = min(
            report.kv_cache_bytes * sum(page_bytes) // own
            for report, own in zip(reports, page_bytes, strict=True)
            if own
        )
        specs = {name: spec for report in reports for name, spec in report.specs.items()}
        return min(spare_bytes, self._useful_bytes(specs))

    def _budget(self, weights_bytes: int, useful_bytes: int | None) -> int:
        budget = plan_memory(
            free_bytes=self._free_bytes // self._num_ranks,
            utilization=self._utilization,
            weights_bytes=weights_bytes,
            workspace_bytes=self._workspace_bytes + self._offload_bytes // self._num_ranks,
            useful_bytes=useful_bytes,
            swap_bytes=int(self._swap_bytes * self._swap_share),
        )
        logger.info(budget.describe())
        return budget.kv_cache_bytes

    def check_allocation(self, kv_cache_config: KVCacheConfig) -> None:
        """Refuse a KV cache that does not fit what is free now.

        Raises:
            NotEnoughMemoryError: names the largest size that fits.
        """
        check_allocation(
            kv_cache_config.total_bytes,
            self._memory.free_bytes(),
            self._workspace_bytes + self._offload_bytes // self._num_ranks,
            kv_cache_config.swap_bytes if self._swap_bytes else 0,
        )

    def _useful_bytes(self, specs: Mapping[str, KVCacheSpec]) -> int:
        """Blocks for every row at its longest, null blocks, and those for trees of drafts."""
        limits, found = self._setup.limits, self._setup.config.speculative
        num_scratch = num_scratch_blocks(
            () if found is None else found.tree, limits.max_num_seqs, self._setup.block_size
        )
        num_scratch *= self._setup.config.parallel.pipeline_parallel_size  # of each step in flight
        return num_scratch * sum(spec.page_size_bytes for spec in specs.values()) + useful_bytes(
            specs, self._setup.config.cache, limits.max_model_len, limits.max_num_seqs, limits.num_drafts
        )


def _own_share(arch: ModelArch, num_replicas: int) -> float:
    """Of a model's weights, what one of several replicas has that share experts."""
    size = arch.hidden_size
    experts = sum(layer.moe.num_expert_weights(size) for layer in arch.layers if layer.moe is not None)
    return 1.0 - experts / (arch.num_layer_weights + arch.num_table_weights) * (1.0 - 1.0 / num_replicas)
