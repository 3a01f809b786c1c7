"""InprocClient: the engine core in the caller's own process, stepped by the caller."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from quire.core.engine_messages import EngineCoreOutputs, EngineCoreRequest
from quire.core.worker_call import WorkerCall
from quire.engine.core import EngineCore
from quire.engine.core_client.base import EngineCoreClient


class InprocClient(EngineCoreClient):
    """Calls the core directly; `get_output` runs one step."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queue a request; raises `ValidationError` when it can never run."""
        self._core.add_request(request)

    def abort_requests(self, handles: Iterable[int]) -> None:
        """End requests; each still gets a final output."""
        self._core.abort_requests(handles)

    def get_output(self) -> EngineCoreOutputs | None:
        """Run one step."""
        outputs = self._core.step()
        self._core.send_transfers()
        return outputs

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget all cached blocks, those of running requests if asked; False while any block is in use."""
        return self._core.reset_prefix_cache(reset_running_requests)

    def call_worker(self, method: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a method of the worker, or a function of it."""
        return self._core.call_worker(method, *args, **kwargs)

    def collective_rpc(self, call: WorkerCall, timeout_s: float | None = None) -> list[Any]:
        """As the core's; the function runs in this thread, to its end."""
        return self._core.collective_rpc(call)

    @property
    def has_worker(self) -> bool:
        """It is here."""
        return True

    def profile(self, starts: bool) -> bool:
        """As the core's."""
        return self._core.profile(starts) is not False

    def shutdown(self) -> None:
        """End the core; harmless when repeated."""
        self._core.shutdown()
