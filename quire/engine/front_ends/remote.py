"""RemoteEngine: what `AsyncLLM` in a front-end process uses in place of a supervisor: the owner's, by messages.

Owns the link, what is known of requests that have not ended, and calls that wait for an answer. The owner's
end is this process's end, so that it is always there.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from quire.core.engine_messages import EngineCoreOutputs, EngineCoreRequest
from quire.core.live_state import EngineState
from quire.core.process_stats import CoreProcesses
from quire.core.wire import AbortRequests, RequestRefused, StepOutputs, UtilityValue
from quire.core.worker_call import WorkerCall
from quire.engine.front_ends.link import FrontEndLink
from quire.engine.front_ends.messages import (
    BeginDrain,
    EngineDead,
    EngineStatus,
    OwnerAnswer,
    OwnerCall,
    PlaceRequest,
    ReportWanted,
    RequestAborted,
    RequestRestarted,
    ToFrontEnd,
    Wake,
    first_handle,
)
from quire.engine.live_request import Listener, LiveRequest
from quire.engine.output_stream import noop
from quire.errors import EngineDeadError, EngineRestartingError, UnsupportedError
from quire.utils.phases import Phases


@dataclass(slots=True)
class OwnerEvents:
    """What the owner asks of a front end besides the engine; set by the server, `on_status` by its engine."""

    on_status: Callable[[EngineStatus], None] = lambda status: None
    on_drain: Callable[[bool], None] = lambda is_last: None
    on_wake: Callable[[], None] = noop
    on_report: Callable[[ReportWanted], None] = lambda wanted: None


class RemoteEngine:
    """The cores of an owner.

    Args:
        link: to the owner.
        serial: the number of this front end.
        start_phases: of the first core's start.

    Attributes:
        start_phases: as given.
        first_handle: of this front end's requests.
        events: what else the owner sends.
        has_stopped: the engine is of no further use.
    """

    def __init__(self, link: FrontEndLink[ToFrontEnd], serial: int, start_phases: Phases = ()) -> None:
        self.start_phases = start_phases
        self.first_handle = first_handle(serial)
        self.events = OwnerEvents()
        self.has_stopped = False
        self._link = link
        self._listener: Listener | None = None
        self._is_attached = False
        self._live: dict[int, LiveRequest] = {}
        self._status = EngineStatus()
        self._calls: dict[int, asyncio.Future[OwnerAnswer]] = {}
        self._call_ids = itertools.count()

    def listen(self, listener: Listener) -> None:
        """Call `listener` with what the cores do; before `attach`."""
        self._listener = listener

    def attach(self) -> None:
        """Listen on the running event loop; done once."""
        if not self._is_attached:
            self._is_attached = True
            self._link.listen(self._take)

    @property
    def is_paused(self) -> bool:
        """No steps are run."""
        return self._status.is_paused

    @property
    def num_restarts(self) -> int:
        """Cores that were replaced."""
        return self._status.num_restarts

    @property
    def num_resumed(self) -> int:
        """Answers that were continued on another core, of all front ends."""
        return self._status.num_resumed

    @property
    def core_pid(self) -> int | None:
        """Process id of the first core."""
        return self._status.core_pid

    @property
    def indexes(self) -> tuple[int, ...]:
        """Numbers of the replicas that serve, or will again."""
        return self._status.indexes

    @property
    def num_ready(self) -> int:
        """Replicas that can be given requests now."""
        return self._status.num_ready

    @property
    def weight_versions(self) -> dict[int, str]:
        """As `Replicas.weight_versions`."""
        return self._status.weight_versions

    @property
    def is_restarting(self) -> bool:
        """True while there is no core to talk to."""
        return not self._status.num_ready and not self._status.sleep_level

    def processes(self) -> list[CoreProcesses]:
        """As `Replicas.processes`."""
        return self._status.cores

    # --- to the owner ---

    def add_request(self, message: EngineCoreRequest, rank: int | None = None) -> None:
        """As `Replicas.add_request`; what is wrong with it is sent later."""
        self._live[message.handle] = LiveRequest(message)
        self._link.send(PlaceRequest(message, rank))

    def message_of(self, handle: int) -> EngineCoreRequest | None:
        """The message of a request that has not ended."""
        live = self._live.get(handle)
        return None if live is None else live.message

    def live_of(self, handle: int) -> LiveRequest | None:
        """What is known of a request that has not ended: its message, and the weights that compute it."""
        return self._live.get(handle)

    def abort_requests(self, handles: Iterable[int]) -> None:
        """Ask for requests to end."""
        wanted = [handle for handle in handles if handle in self._live]
        if wanted:
            self._link.send(AbortRequests(wanted))

    def send(self, message: Any) -> None:
        """Send what needs no answer."""
        self._link.send(message)

    async def ask(self, method: str, **arguments: Any) -> OwnerAnswer:
        """Call the owner, with fields of `OwnerCall`; its answer.

        Raises:
            QuireError: what the owner answered.
        """
        self.attach()
        call_id = next(self._call_ids)
        answer: asyncio.Future[OwnerAnswer] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = answer
        try:
            self._link.send(OwnerCall(call_id, method, **arguments))
            given = await answer
        finally:
            del self._calls[call_id]
        if given.error is not None:
            raise given.error.to_error()
        return given

    async def call(self, method: str, argument: bool | WorkerCall = False) -> UtilityValue:
        """As `Supervisor.call`; a `WorkerCall` is refused."""
        if isinstance(argument, WorkerCall):
            raise UnsupportedError(
                "collective_rpc is not passed on by one of several front-end processes",
                hint="use one front end (api_server_count=1)", field="api_server_count",
            )  # fmt: skip
        answer = await self.ask(method, flag=argument)
        return answer.states[0] if answer.states else answer.value

    async def live_states(self) -> list[EngineState]:
        """What each core does now, by replica."""
        return (await self.ask("live_states")).states

    async def check_health(self) -> None:
        """As `Supervisor.check_health`."""
        if self.is_restarting:
            raise EngineRestartingError("the engine core is being restarted", hint="try again in a few seconds")
        await self.ask("check_health")

    async def scale(self, count: int, drain_timeout_s: float = 30.0) -> None:
        """As `Replicas.scale`."""
        await self.ask("scale", number=count, seconds=drain_timeout_s)

    async def restart_all(self, drain_timeout_s: float = 30.0) -> None:
        """As `Replicas.restart_all`."""
        await self.ask("restart_replicas", seconds=drain_timeout_s)

    def close(self) -> None:
        """Take nothing more from the cores, which go on; harmless when repeated."""
        self.has_stopped = True
        self._link.close()

    async def stop(self) -> None:
        """As `close`."""
        self.close()

    # --- from the owner ---

    def _take(self, message: ToFrontEnd) -> None:
        assert self._listener is not None, "`listen` was called"
        if isinstance(message, StepOutputs):
            if message.outputs.events:
                self._note_weights(message.outputs)
            for end in message.outputs.finished:
                self._live.pop(end.handle, None)
            self._listener.on_step(message.outputs)
        elif isinstance(message, RequestRefused):
            if self._live.pop(message.handle, None) is not None:
                self._listener.on_failed(message.handle, message.error.to_error())
        elif isinstance(message, RequestAborted):
            if self._live.pop(message.handle, None) is not None:
                self._listener.on_aborted(message.handle)
        elif isinstance(message, RequestRestarted):
            self._listener.restart(message.handle)
        elif isinstance(message, EngineStatus):
            self._status = message
            self.events.on_status(message)
        elif isinstance(message, EngineDead):
            self._note_dead(message)
        elif isinstance(message, OwnerAnswer):
            waiting = self._calls.get(message.call_id)
            if waiting is not None and not waiting.done():
                waiting.set_result(message)
        elif isinstance(message, BeginDrain):
            self.events.on_drain(message.is_last)
        elif isinstance(message, Wake):
            self.events.on_wake()
        else:
            self.events.on_report(message)

    def _note_weights(self, step: EngineCoreOutputs) -> None:
        """Requests that begin in a step are computed with what the owner said of that core last."""
        version = self._status.weight_versions.get(step.engine_index, "")
        for event in step.events:
            live = self._live.get(event.handle)
            if live is not None:
                live.weight_version = version

    def _note_dead(self, message: EngineDead) -> None:
        self.has_stopped = True
        self._live.clear()
        error = message.error.to_error()
        assert self._listener is not None, "`listen` was called"
        is_dead = isinstance(error, EngineDeadError)
        self._listener.on_dead(error if is_dead else EngineDeadError(error.message))  # type: ignore[arg-type]
