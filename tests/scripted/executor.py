"""ScriptedExecutor: every step gives each row the next token of a text, without a model. For what surrounds an engine.

The pace is that of SCRIPTED_STEP_MS (0 = as fast as the core turns). Scheduler, KV-cache blocks, processes and messages
are the real ones. `scripted_environment` makes it known to a server as a plugin: `--distributed-executor-backend
scripted`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from quire.config.engine import QuireConfig
from quire.core.computed_step import ComputedStep
from quire.core.grammar_bitmask import GrammarBitmask
from quire.core.kv_spec import FullAttentionSpec, KVCacheConfig, KVCacheSpec
from quire.core.runner_output import ModelRunnerOutput
from quire.core.scheduler_output import SchedulerOutput
from quire.executor.base import Executor

ROOT = Path(__file__).parents[2]
STEP_MS = "SCRIPTED_STEP_MS"
FIRST_TOKEN, NUM_TOKENS = 300, 64
CACHE_BYTES = 1 << 28


class Scripted(ComputedStep):
    """A step that was not computed."""

    __slots__ = ("rows",)

    def __init__(self, rows: np.ndarray) -> None:
        self.rows = rows


class ScriptedExecutor(Executor):
    """Holds no model."""

    quire_contract = 1

    def __init__(self, config: QuireConfig, platform: Any, logits_processors: Sequence[Any] = ()) -> None:
        self._block_size = config.cache.block_size or 16
        self._step_s = float(os.environ.get(STEP_MS, "0")) / 1e3
        self._due_s = 0.0
        self._step = 0

    def kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        return {"layer": FullAttentionSpec(block_size=self._block_size, num_kv_heads=1, head_size=8, dtype_bytes=2)}

    def available_kv_cache_bytes(self) -> int:
        return CACHE_BYTES

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig) -> None:
        """There is none."""

    def execute_model(self, scheduler_output: SchedulerOutput) -> ComputedStep:
        now_s = time.monotonic()
        self._due_s = max(self._due_s + self._step_s, now_s)
        time.sleep(self._due_s - now_s)
        return Scripted(scheduler_output.rows[scheduler_output.is_sampling])

    def sample_tokens(self, computed: ComputedStep, grammar: GrammarBitmask | None = None) -> ModelRunnerOutput:
        assert isinstance(computed, Scripted)
        self._step += 1
        token = FIRST_TOKEN + self._step % NUM_TOKENS
        return ModelRunnerOutput(
            rows=computed.rows, sampled_token_ids=np.full(len(computed.rows), token, dtype=np.int32)
        )

    def call_worker(self, method: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return {} if method == "memory_parts" else None

    def shutdown(self) -> None:
        """Nothing to release."""


def scripted_environment(directory: Path, step_ms: float = 0.0) -> dict[str, str]:
    """Variables with which a process finds the plugin, installed below `directory` as pip leaves a package."""
    info = directory / "scripted_engine-1.0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: scripted-engine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[quire.executors]\nscripted = tests.scripted.executor:ScriptedExecutor\n")
    return {"PYTHONPATH": f"{directory}{os.pathsep}{ROOT}", STEP_MS: str(step_ms)}
