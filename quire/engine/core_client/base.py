"""How a front-end talks to an engine core, wherever that core runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

from quire.core.engine_messages import EngineCoreOutputs, EngineCoreRequest
from quire.core.worker_call import WorkerCall
from quire.errors import UnsupportedError


class EngineCoreClient(ABC):
    """The front-end's end of the line to an engine core."""

    @abstractmethod
    def add_request(self, request: EngineCoreRequest) -> None:
        """Send a request."""

    @abstractmethod
    def abort_requests(self, handles: Iterable[int]) -> None:
        """Ask for requests to end; each still gets a final output."""

    @abstractmethod
    def get_output(self) -> EngineCoreOutputs | None:
        """The next step's outputs; None when nothing is unfinished."""

    @abstractmethod
    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget all cached blocks, those of running requests if asked; False while any block is in use."""

    def call_worker(self, method: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a method of the worker, or a function of it; refused where the core is in another process."""
        raise UnsupportedError(
            "the worker of an engine core in another process cannot be called",
            hint="use LLM, or LLMEngine.from_config(in_process=True)",
            field="method",
        )

    def collective_rpc(self, call: WorkerCall, timeout_s: float | None = None) -> list[Any]:
        """Run a function on every rank of every core: what each returns, in the order of cores and ranks.

        Args:
            timeout_s: to wait for another process; None = as long as it takes.

        Raises:
            QuireError: of the first rank on which it failed, which is named.
            EngineDeadError: a rank, or a core, has ended.
            TimeoutError: a core has not answered in time.
        """
        raise UnsupportedError("the workers of this engine cannot be called", field="method")

    @property
    def has_worker(self) -> bool:
        """`call_worker` works: the worker is in this process."""
        return False

    def profile(self, starts: bool) -> bool:
        """Start recording steps, or stop and write the trace; False where that was done before."""
        raise UnsupportedError("this engine core cannot be profiled", field="profile")

    @abstractmethod
    def shutdown(self) -> None:
        """End the core; harmless when repeated."""
