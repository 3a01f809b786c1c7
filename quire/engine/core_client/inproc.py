"""InprocClient: the engine core in the caller's own process, stepped by the caller."""

from __future__ import annotations

from collections.abc import Iterable

from quire.core.engine_messages import EngineCoreOutputs, EngineCoreRequest
from quire.engine.core import EngineCore
from quire.engine.core_client.base import EngineCoreClient


class InprocClient(EngineCoreClient):
    """Calls the core directly; `get_output` runs one step."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core

    def add_request(self, request: EngineCoreRequest) -> None:
        self._core.add_request(request)

    def abort_requests(self, handles: Iterable[int]) -> None:
        self._core.abort_requests(handles)

    def get_output(self) -> EngineCoreOutputs | None:
        return self._core.step()

    def reset_prefix_cache(self) -> bool:
        return self._core.reset_prefix_cache()

    def shutdown(self) -> None:
        self._core.shutdown()
