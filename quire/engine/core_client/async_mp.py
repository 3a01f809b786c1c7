"""AsyncMPClient: an engine core in another process, for an event loop. Owns nothing but the loop's interest in a link.

Used by the supervisor, one client for each core that it starts. Messages are handed to a callback as they come.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable

from quire.core.engine_messages import EngineCoreRequest
from quire.core.wire import AbortRequests, AddRequest, FromCore, ToCore, UtilityCall, UtilityResult, UtilityValue
from quire.core.worker_call import WorkerCall
from quire.engine.core_launcher import CoreProcess
from quire.errors import EngineDeadError

MAX_MESSAGES_AT_ONCE = 32


class AsyncMPClient:
    """Sends to a core, and listens on the loop it is made on.

    Args:
        core: ready.
        on_message: called on the loop with every message but answers to `call`.
    """

    def __init__(self, core: CoreProcess, on_message: Callable[[FromCore], None]) -> None:
        self._core = core
        self._on_message = on_message
        self._calls: dict[int, asyncio.Future[UtilityValue]] = {}
        self._call_ids = itertools.count()
        self._loop = asyncio.get_running_loop()
        self._is_closed = False
        self._fd = core.link.fd
        self._loop.add_reader(self._fd, self._receive)
        self._loop.call_soon(self._receive)  # what came before is not announced again

    def add_request(self, request: EngineCoreRequest) -> None:
        """Send a request."""
        self._core.link.send(AddRequest(request))

    def abort_requests(self, handles: Iterable[int]) -> None:
        """Ask for requests to end; each still gets a final output."""
        self._core.link.send(AbortRequests(list(handles)))

    def tell(self, message: ToCore) -> None:
        """Send what needs no answer."""
        self._core.link.send(message)

    async def call(self, method: str, argument: bool | WorkerCall = False) -> UtilityValue:
        """Call a utility of the core; its value.

        Raises:
            EngineDeadError: the core ended before it answered.
            QuireError: what the core answered.
        """
        call_id = next(self._call_ids)
        answer: asyncio.Future[UtilityValue] = self._loop.create_future()
        self._calls[call_id] = answer
        try:
            self._core.link.send(UtilityCall(call_id, method, argument))
            return await answer
        finally:
            self._calls.pop(call_id, None)

    def close(self, error: EngineDeadError) -> None:
        """Stop listening; calls that wait for an answer get `error`."""
        if self._is_closed:
            return
        self._is_closed = True
        if not self._loop.is_closed():
            self._loop.remove_reader(self._fd)
            for answer in self._calls.values():
                if not answer.done():
                    answer.set_exception(error)

    def _receive(self) -> None:
        """Take what has come; the rest in the loop's next round, so that others have their turn."""
        for _ in range(MAX_MESSAGES_AT_ONCE):
            if self._is_closed:
                return
            message = self._core.link.receive()
            if message is None:
                return
            if isinstance(message, UtilityResult):
                self._resolve(message)
            else:
                self._on_message(message)
        self._loop.call_soon(self._receive)

    def _resolve(self, result: UtilityResult) -> None:
        answer = self._calls.get(result.call_id)
        if answer is None or answer.done():
            return
        if result.error is None:
            answer.set_result(result.value)
        else:
            answer.set_exception(result.error.to_error())
