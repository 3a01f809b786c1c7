"""WorkerSetup: everything a worker is made from, read once from a resolved configuration and the machine."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quire.config.engine import QuireConfig
from quire.config.model_arch import ModelArch
from quire.core.expert_group import ExpertGroup
from quire.core.memory_budget import StepLimits
from quire.distributed.seat import Seat
from quire.platforms.interface import Platform

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
KV_CACHE_DTYPES = {**DTYPES, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSetup:
    """What the parts of a worker look at.

    Attributes:
        config: resolved: nothing in it is "auto" or missing.
        platform: the machine, with the config's device.
        arch: the model's shape.
        dtype: of weights and activations.
        kv_cache_dtype: of the cache's elements.
        block_size: tokens per block.
        num_threads: for computing on the CPU, of each rank.
        seat: this process's place in a group that computes the model; None = it does so alone.
        experts: the replica's place among those that share experts; None = it has all.
    """

    config: QuireConfig
    platform: Platform
    arch: ModelArch
    limits: StepLimits
    dtype: torch.dtype
    kv_cache_dtype: torch.dtype
    block_size: int
    num_threads: int
    seat: Seat | None = None
    experts: ExpertGroup | None = None

    @property
    def rank(self) -> int:
        """Of this process."""
        return 0 if self.seat is None else self.seat.rank

    @property
    def num_ranks(self) -> int:
        """Processes that compute the model."""
        return 1 if self.seat is None else self.seat.size

    @property
    def stage_size(self) -> int:
        """Of these, the ones that have the same layers."""
        return 1 if self.seat is None else self.seat.stage_size

    @property
    def num_local_ranks(self) -> int:
        """Those of them that are on this machine."""
        return 1 if self.seat is None else len(self.seat.local_ranks)


def make_setup(
    config: QuireConfig, platform: Platform, seat: Seat | None = None, experts: ExpertGroup | None = None
) -> WorkerSetup:
    """The setup of a config that went through `resolve`."""
    hint = "is missing: the config did not go through config.resolve"
    assert config.arch is not None, f"arch {hint}"
    assert config.model.max_model_len is not None, f"max_model_len {hint}"
    assert config.model.dtype in DTYPES, f"dtype={config.model.dtype!r} is not one of {', '.join(DTYPES)}"
    assert config.scheduler.max_num_seqs is not None, f"max_num_seqs {hint}"
    assert config.scheduler.max_num_batched_tokens is not None, f"max_num_batched_tokens {hint}"
    assert config.cache.block_size is not None, f"block_size {hint}"
    limits = StepLimits(
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        max_model_len=config.model.max_model_len,
        num_drafts=config.num_draft_tokens,
        max_step_drafts=config.max_step_drafts,
    )
    return WorkerSetup(
        config=config,
        platform=platform,
        arch=config.arch,
        limits=limits,
        dtype=DTYPES[config.model.dtype],
        kv_cache_dtype=KV_CACHE_DTYPES[config.cache.kv_cache_dtype],
        block_size=config.cache.block_size,
        num_threads=config.device.num_threads or platform.num_cpus,
        seat=seat,
        experts=experts,
    )
