"""SyncMPClient: an engine core in another process, for a caller that waits for each step.

Owns the core's process. A core that ends is not restarted: the caller gets `EngineDeadError`.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterable
from typing import Any

from quire.core.engine_messages import EngineCoreOutputs, EngineCoreRequest
from quire.core.wire import (
    AbortRequests,
    AddRequest,
    FromCore,
    RequestRefused,
    StepOutputs,
    ToCore,
    UtilityCall,
    UtilityResult,
)
from quire.core.worker_call import WorkerCall
from quire.engine.core_client.base import EngineCoreClient
from quire.engine.core_launcher import CoreProcess
from quire.errors import EngineDeadError

POLL_S = 0.25


class SyncMPClient(EngineCoreClient):
    """Sends to a core and waits for its answers.

    Args:
        core: ready.
    """

    def __init__(self, core: CoreProcess) -> None:
        self._core = core
        self._steps: deque[EngineCoreOutputs] = deque()
        self._live: set[int] = set()
        self._call_ids = itertools.count()

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queue a request; raises `ValidationError` when it can never run."""
        self._live.add(request.handle)
        self._core.link.send(AddRequest(request))
        call_id = next(self._call_ids)
        self._core.link.send(UtilityCall(call_id, "ping"))  # answered after the request was taken or refused
        while True:
            message = self._receive()
            if isinstance(message, RequestRefused) and message.handle == request.handle:
                self._live.discard(request.handle)
                self._wait_for(call_id)
                raise message.error.to_error()
            if isinstance(message, UtilityResult) and message.call_id == call_id:
                return

    def abort_requests(self, handles: Iterable[int]) -> None:
        """Ask for requests to end; each still gets a final output."""
        self._core.link.send(AbortRequests(list(handles)))

    def tell(self, message: ToCore) -> None:
        """Send what needs no answer."""
        self._core.link.send(message)

    @property
    def fd(self) -> int:
        """As `CoreLink.fd`."""
        return self._core.link.fd

    @property
    def has_unfinished(self) -> bool:
        """True while steps will come."""
        return bool(self._live or self._steps)

    def poll_output(self) -> EngineCoreOutputs | None:
        """A step's outputs, if they have come."""
        while not self._steps and self._receive_one(0.0) is not None:
            pass
        return self._steps.popleft() if self._steps else None

    def get_output(self) -> EngineCoreOutputs | None:
        """The next step's outputs; None when nothing is unfinished."""
        while not self._steps:
            if not self._live:
                return None
            self._receive()
        return self._steps.popleft()

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget all cached blocks, those of running requests if asked; False while any block is in use."""
        call_id = next(self._call_ids)
        self._core.link.send(UtilityCall(call_id, "reset_prefix_cache", reset_running_requests))
        return bool(self._wait_for(call_id).value)

    def profile(self, starts: bool) -> bool:
        """Start recording steps, or stop and write the trace; False where that was done before."""
        return self.ask_profile(starts) is not False

    def ask_profile(self, starts: bool) -> bool | str:
        """As `EngineCore.profile`; raises what the core answers."""
        call_id = next(self._call_ids)
        self._core.link.send(UtilityCall(call_id, "profile", starts))
        answer = self._wait_for(call_id)
        if answer.error is not None:
            raise answer.error.to_error()
        return answer.value if isinstance(answer.value, str) else bool(answer.value)

    def collective_rpc(self, call: WorkerCall, timeout_s: float | None = None) -> list[Any]:
        """As `EngineCoreClient.collective_rpc`."""
        return self.end_rpc(self.begin_rpc(call), None if timeout_s is None else time.monotonic() + timeout_s)

    def begin_rpc(self, call: WorkerCall) -> int:
        """Send it; the number to wait for with `end_rpc`."""
        call_id = next(self._call_ids)
        self._core.link.send(UtilityCall(call_id, "collective_rpc", call))
        return call_id

    def end_rpc(self, call_id: int, deadline_s: float | None) -> list[Any]:
        """What each rank returned; `deadline_s` by the monotonic clock."""
        answer = self._wait_for(call_id, deadline_s)
        if answer.error is not None:
            raise answer.error.to_error()
        assert isinstance(answer.value, list), "it is what a core answers"
        return answer.value

    def shutdown(self) -> None:
        """End the core; harmless when repeated."""
        self._core.close()

    def _wait_for(self, call_id: int, deadline_s: float | None = None) -> UtilityResult:
        while True:
            message = self._receive_one(POLL_S)
            if message is None and deadline_s is not None and time.monotonic() > deadline_s:
                raise TimeoutError("the engine core has not answered in time; the call continues there")
            if isinstance(message, UtilityResult) and message.call_id == call_id:
                return message

    def _receive(self) -> FromCore:
        """The next message; a step's outputs are kept for `get_output` too."""
        while True:
            message = self._receive_one(POLL_S)
            if message is not None:
                return message

    def _receive_one(self, timeout_s: float) -> FromCore | None:
        """As `_receive`; None when nothing has come in time."""
        is_alive = self._core.is_alive
        message = self._core.link.receive(timeout_s)
        if message is None and not is_alive:
            raise EngineDeadError("the engine core process has exited", hint="create a new engine")
        if isinstance(message, StepOutputs):
            self._steps.append(message.outputs)
            self._live.difference_update(one.handle for one in message.outputs.finished)
        return message
