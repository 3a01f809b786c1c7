"""SleepableClient: a client whose core can be ended and built again, for sleep mode of engines that callers step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from quire.core.engine_messages import EngineCoreOutputs, EngineCoreRequest
from quire.core.worker_call import WorkerCall
from quire.engine.core_client.base import EngineCoreClient
from quire.errors import EngineSleepingError
from quire.utils.heap import give_back_free_memory


class SleepableClient(EngineCoreClient):
    """Passes everything to another client, while there is one.

    Args:
        client: the first one.
        build: makes another one like it.
    """

    def __init__(self, client: EngineCoreClient, build: Callable[[], EngineCoreClient]) -> None:
        self._client: EngineCoreClient | None = client
        self._build = build

    @property
    def is_asleep(self) -> bool:
        """True while there is no core."""
        return self._client is None

    def sleep(self) -> None:
        """End the core and give back its memory; harmless when repeated."""
        self.shutdown()
        self._client = None
        give_back_free_memory()

    def wake_up(self) -> None:
        """Build a core; harmless when repeated. Raises what building one raises."""
        if self._client is None:
            self._client = self._build()

    def add_request(self, request: EngineCoreRequest) -> None:
        """As the core's; raises `EngineSleepingError` while there is none."""
        self._awake().add_request(request)

    def abort_requests(self, handles: Iterable[int]) -> None:
        """As the core's; there are none while it sleeps."""
        if self._client is not None:
            self._client.abort_requests(handles)

    def get_output(self) -> EngineCoreOutputs | None:
        """As the core's; raises as `add_request`."""
        return self._awake().get_output()

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """As the core's; there is no cache while it sleeps."""
        return self._client is None or self._client.reset_prefix_cache(reset_running_requests)

    def call_worker(self, method: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """As the core's; raises as `add_request`."""
        return self._awake().call_worker(method, *args, **kwargs)

    def collective_rpc(self, call: WorkerCall, timeout_s: float | None = None) -> list[Any]:
        """As the core's; raises as `add_request`."""
        return self._awake().collective_rpc(call, timeout_s)

    @property
    def has_worker(self) -> bool:
        """As the core's; raises as `add_request`."""
        return self._awake().has_worker

    def profile(self, starts: bool) -> bool:
        """As the core's; raises as `add_request`."""
        return self._awake().profile(starts)

    def shutdown(self) -> None:
        """End the core."""
        if self._client is not None:
            self._client.shutdown()

    def _awake(self) -> EngineCoreClient:
        if self._client is None:
            raise EngineSleepingError("the engine is asleep", hint="call wake_up() first")
        return self._client
