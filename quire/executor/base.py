"""The interface between engine core and workers. One process today; more kinds implement the same calls."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from quire.core.computed_step import ComputedStep
from quire.core.expert_group import LockStep
from quire.core.grammar_bitmask import GrammarBitmask
from quire.core.kv_spec import KVCacheConfig, KVCacheSpec
from quire.core.runner_output import ModelRunnerOutput
from quire.core.scheduler_output import SchedulerOutput
from quire.core.worker_call import WorkerCall, answer_call


class Executor(ABC):
    """Drives the workers that hold the model. Made with the model loaded and no KV cache yet."""

    @abstractmethod
    def kv_cache_specs(self) -> dict[str, KVCacheSpec]:
        """Layer name -> what it needs from the KV cache."""

    @abstractmethod
    def available_kv_cache_bytes(self) -> int:
        """Bytes the KV cache may take, weights and workspace already subtracted."""

    @abstractmethod
    def initialize_kv_cache(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocate the cache and warm up."""

    @abstractmethod
    def execute_model(self, scheduler_output: SchedulerOutput) -> ComputedStep:
        """Apply the message to the rows and run the model; what sampling needs is in the result."""

    @abstractmethod
    def sample_tokens(self, computed: ComputedStep, grammar: GrammarBitmask | None = None) -> ModelRunnerOutput:
        """Sample a step that `execute_model` ran, once; `grammar` masks the rows that have one, None = no row has."""

    @abstractmethod
    def call_worker(self, method: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a method of the worker by name, or a function with the worker in front of its arguments.

        Raises:
            ValidationError: the worker has no such method.
        """

    def collective_rpc(self, call: WorkerCall) -> list[Any]:
        """Run a function on every rank: what each returns, as plain values in the order of ranks.

        Raises:
            QuireError: of the first rank on which it failed, which is named.
            EngineDeadError: a rank has ended.
        """
        return [self.call_worker(answer_call, call)]

    @property
    def lock_step(self) -> LockStep | None:
        """With replicas that share experts with this one; None = there are none."""
        return None

    @property
    def rank_pids(self) -> Sequence[int | None]:
        """Processes of this machine that compute the model beside this one, in the order of their ranks."""
        return ()

    def check_health(self) -> None:
        """Raise `EngineDeadError` where a process that computes the model has ended."""
        return None

    def watch_failure(self, on_failure: Callable[[str], None]) -> None:
        """Call `on_failure` with the reason, from another thread, when such a process ends without being asked."""
        return None

    def watch_silence(self, show: Callable[[float], None]) -> None:
        """Call `show` again and again, from another thread, with the seconds since something came from the ranks of
        other machines, the longest of them. Nothing where there are none.
        """
        return None

    @abstractmethod
    def shutdown(self) -> None:
        """Release the workers; harmless when repeated."""
