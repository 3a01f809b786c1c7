"""UniProcExecutor: the worker lives in the caller's own process. Owns the worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from quire.config.engine import QuireConfig
from quire.core.computed_step import ComputedStep
from quire.core.expert_group import ExpertGroup, LockStep
from quire.core.grammar_bitmask import GrammarBitmask
from quire.core.kv_spec import KVCacheConfig, KVCacheSpec
from quire.core.runner_output import ModelRunnerOutput
from quire.core.scheduler_output import SchedulerOutput
from quire.core.worker_call import WorkerCall
from quire.distributed.seat import Seat
from quire.errors import EngineDeadError, ValidationError
from quire.executor.base import Executor
from quire.platforms.interface import Platform
from quire.sample.logits_processor import ProcessorSource, load_processors
from quire.worker.worker import Worker


class UniProcExecutor(Executor):
    """Calls one worker directly.

    Args:
        config: resolved.
        platform: the machine.
        logits_processors: custom processors, classes or "module:Class".
        seat: the worker's place among the processes that compute the model; None = it does so alone.
        experts: its place among replicas that share experts; None = it has all.

    Raises:
        QuireError: whatever keeps the model from loading.
    """

    def __init__(
        self,
        config: QuireConfig,
        platform: Platform,
        logits_processors: Sequence[ProcessorSource] = (),
        seat: Seat | None = None,
        experts: ExpertGroup | None = None,
    ) -> None:
        self._worker: Worker | None = Worker(config, platform, load_processors(logits_processors), seat, experts)

    @property
    def lock_step(self) -> LockStep | None:
        """As `Worker.lock_step`."""
        return self._live_worker().lock_step

    def kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        """As `Worker.kv_cache_specs`."""
        return self._live_worker().kv_cache_specs()

    def available_kv_cache_bytes(self) -> int:
        """As `Worker.available_kv_cache_bytes`."""
        return self._live_worker().available_kv_cache_bytes()

    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig) -> None:
        """As `Worker.initialize_kv_cache`."""
        self._live_worker().initialize_kv_cache(kv_cache_config)

    def execute_model(self, scheduler_output: SchedulerOutput) -> ComputedStep:
        """As `Worker.execute_model`."""
        return self._live_worker().execute_model(scheduler_output)

    def sample_tokens(self, computed: ComputedStep, grammar: GrammarBitmask | None = None) -> ModelRunnerOutput:
        """As `Worker.sample_tokens`."""
        return self._live_worker().sample_tokens(computed, grammar)

    def call_worker(self, method: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """As `Executor.call_worker`."""
        worker = self._live_worker()
        if not isinstance(method, str):
            return method(worker, *args, **kwargs)
        found = None if method.startswith("_") else getattr(worker, method, None)
        if not callable(found):
            raise ValidationError(
                f"the worker does not have a method {method!r}", hint="quire/worker/worker.py has them", field="method"
            )
        return found(*args, **kwargs)

    def collective_rpc(self, call: WorkerCall) -> list[Any]:
        """As `Worker.collective_rpc`."""
        return self._live_worker().collective_rpc(call)

    def shutdown(self) -> None:
        """Let go of the worker, its model and its memory."""
        self._worker = None

    def _live_worker(self) -> Worker:
        if self._worker is None:
            raise EngineDeadError("the executor was shut down", hint="create a new engine")
        return self._worker
