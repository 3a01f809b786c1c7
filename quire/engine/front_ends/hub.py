"""FrontEndHub: in the owner of the engine cores, between these and the front-end processes.

The listener of the supervisor of one core, or of several. A request comes from one front end, whose serial number is in
its handle, and goes to the cores; a step is split by these numbers, and each front end gets its part. Owns the tokens
that each request has put out, with which it goes on when its core dies; a front end is not asked then.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from quire.config import QuireConfig
from quire.core.engine_messages import EngineCoreOutputs, EngineCoreRequest
from quire.core.live_state import EngineState
from quire.core.process_stats import CoreProcesses
from quire.core.stats import SchedulerStats
from quire.core.wire import AbortRequests, ErrorInfo, RequestRefused, StepOutputs
from quire.engine.data_parallel.replicas import Replicas
from quire.engine.front_ends.link import FrontEndLink
from quire.engine.front_ends.messages import (
    EngineDead,
    EngineStatus,
    OwnerAnswer,
    OwnerCall,
    PlaceRequest,
    RequestAborted,
    RequestRestarted,
    ToFrontEnd,
    ToOwner,
    serial_of,
)
from quire.engine.front_ends.split import split_step
from quire.engine.sleep_levels import SleepState
from quire.engine.step_logs import StepLogs
from quire.engine.supervisor import Supervisor
from quire.errors import EngineDeadError, EngineGenerateError, QuireError, UnsupportedError
from quire.logger import get_logger
from quire.metrics.family_sums import Family

STATS_INTERVAL_S = 0.05
"""A front end learns the state of cores that compute nothing of its own so often."""
STATUS_INTERVAL_S = 0.1
CORES_INTERVAL_S = 2.0
"""Front ends learn so often what the cores' processes have shown of their memory; each look wakes a core up."""
SUMMED = ("num_scheduled_tokens", "num_first_tokens", "prefix_cache_queries", "prefix_cache_hits")
"""Counts of `SchedulerStats` that front ends estimate waits from."""
NO_HANDLES, NO_TOKENS = np.empty(0, np.int64), np.empty(0, np.int32)

logger = get_logger(__name__)


class Controls(Protocol):
    """What changes the cores, as `WeightControls`."""

    config: QuireConfig

    @property
    def sleep_state(self) -> SleepState:
        """What the engine lacks now."""

    @property
    def weight_versions(self) -> dict[int, str]:
        """By replica."""

    def note_request_while_asleep(self) -> None:
        """A request comes while the engine sleeps; raises `EngineSleepingError` when it is refused."""


class FrontEndPeer:
    """A front end, to the hub.

    Args:
        serial: the high bits of its handles.
        link: to its process.
        counted: what it has counted by now, also after its end.
    """

    def __init__(self, serial: int, link: FrontEndLink[ToOwner], counted: Callable[[], list[Family]] = list) -> None:
        self.serial = serial
        self.counted = counted
        self.live: set[int] = set()
        self._link = link
        self._skipped: dict[int, tuple[SchedulerStats, dict[str, int]]] = {}  # by engine: the newest, and sums
        self._sent_s: dict[int, float] = {}

    def send(self, message: ToFrontEnd) -> None:
        """Send a message; one that has ended gets none."""
        try:
            self._link.send(message)
        except EngineDeadError:
            logger.debug("front end %d has ended", self.serial)

    def send_step(self, step: EngineCoreOutputs, now_s: float) -> None:
        """Send its part of a step, with counts of the steps that it had no part in."""
        _, sums = self._skipped.pop(step.engine_index, (None, {}))
        self._sent_s[step.engine_index] = now_s
        self.send(StepOutputs(replace(step, stats=_with_sums(step.stats, sums)) if any(sums.values()) else step))

    def skip_step(self, step: EngineCoreOutputs, now_s: float) -> None:
        """It has no part in a step: it learns the state of the core now and then."""
        _, sums = self._skipped.get(step.engine_index, (None, {}))
        sums = {name: sums.get(name, 0) + getattr(step.stats, name) for name in SUMMED}
        self._skipped[step.engine_index] = step.stats, sums
        if now_s - self._sent_s.get(step.engine_index, 0.0) >= STATS_INTERVAL_S:
            self.send_skipped(now_s)

    def send_skipped(self, now_s: float) -> None:
        """Send what it has not been sent of the states of cores."""
        skipped, self._skipped = self._skipped, {}
        for engine_index, (stats, sums) in skipped.items():
            self._sent_s[engine_index] = now_s
            sums = {name: count - getattr(stats, name) for name, count in sums.items()}
            self.send(StepOutputs(_without_requests(_with_sums(stats, sums), engine_index)))


class FrontEndHub:
    """The listener of `supervisor`, which is set once both are made.

    Args:
        config: resolved.
        has_replicas: there are several cores, or may be.

    Attributes:
        supervisor: of the cores.
        step_listeners: called with every whole step.
        own_calls: by method, what others answer: the server, and `OwnerControls`.
        controls: asked before a request is placed, and of the weights; None = there are none.
        peers: front ends by serial number.
        dead: why the engine is of no further use; None = it is.
    """

    supervisor: Supervisor | Replicas

    def __init__(self, config: Any, *, has_replicas: bool) -> None:
        self.step_listeners: list[Callable[[EngineCoreOutputs], None]] = []
        self.own_calls: dict[str, Callable[[int, OwnerCall], Awaitable[OwnerAnswer]]] = {}
        self.controls: Controls | None = None
        self.dead: EngineDeadError | None = None
        self._logs = StepLogs(config, names_replicas=has_replicas)
        self.peers: dict[int, FrontEndPeer] = {}
        self._tokens: dict[int, list[int]] = {}
        self._beams: set[int] = set()
        self._status = EngineStatus()
        self._cores: list[CoreProcesses] = []
        self._cores_s = float("-inf")
        self._calls: set[asyncio.Task[None]] = set()

    @property
    def handles(self) -> list[int]:
        """Of the sequences that have not ended."""
        return list(self._tokens)

    @property
    def num_requests(self) -> int:
        """Sequences that have not ended."""
        return len(self._tokens)

    def add_front_end(
        self, serial: int, link: FrontEndLink[ToOwner], counted: Callable[[], list[Family]] = list
    ) -> FrontEndPeer:
        """A front end is ready; arguments as `FrontEndPeer`."""
        peer = self.peers[serial] = FrontEndPeer(serial, link, counted)
        peer.send(self._status)
        if self.dead is not None:
            peer.send(EngineDead(ErrorInfo.of(self.dead)))
        return peer

    def remove_front_end(self, serial: int) -> int:
        """A front end has ended: so do its requests, which are returned as a number."""
        peer = self.peers.pop(serial, None)
        if peer is None:
            return 0
        if self.dead is None and peer.live:
            self.supervisor.abort_requests(list(peer.live))
        return len(peer.live)

    async def keep_status(self) -> None:
        """Let the front ends know what changes, until cancelled."""
        while True:
            await asyncio.sleep(STATUS_INTERVAL_S)
            self.send_status()
            now_s = time.monotonic()
            for peer in self.peers.values():
                peer.send_skipped(now_s)

    def send_status(self) -> None:
        """Let the front ends know the state of the cores, if it has changed."""
        one = self.supervisor
        indexes: tuple[int, ...] = (0,)
        num_ready = 1
        if isinstance(one, Replicas):
            indexes, num_ready = tuple(one.indexes), one.num_ready
        elif one.is_restarting:
            num_ready = 0
        status = EngineStatus(
            one.is_paused, one.num_restarts, one.num_resumed, indexes, num_ready, one.core_pid,
            self._shown_cores(one.core_pid), *self._weights(),
        )  # fmt: skip
        if status != self._status:
            self._status = status
            self.broadcast(status)

    def _weights(self) -> tuple[int, tuple[str, ...], dict[int, str], str | None]:
        """The last part of an `EngineStatus`."""
        controls = self.controls
        if controls is None:
            return 0, (), {}, None
        sleep = controls.sleep_state
        return sleep.level, tuple(sorted(sleep.tags)), controls.weight_versions, controls.config.model_path

    def _shown_cores(self, first_pid: int | None) -> list[CoreProcesses]:
        """The processes of the cores, looked at now and then."""
        now_s = time.monotonic()
        known = self._cores[0].pids[:1] if self._cores else []
        if now_s - self._cores_s >= CORES_INTERVAL_S or known != [first_pid]:
            self._cores, self._cores_s = self.core_processes(), now_s
        return self._cores

    def core_processes(self) -> list[CoreProcesses]:
        """The processes of the cores."""
        one = self.supervisor
        return one.processes() if isinstance(one, Replicas) else [one.processes()]

    def broadcast(self, message: ToFrontEnd, but: int | None = None) -> None:
        """Send a message to all front ends, or all but one."""
        for peer in self.peers.values():
            if peer.serial != but:
                peer.send(message)

    # --- from a front end ---

    def take(self, serial: int, message: ToOwner) -> None:
        """A front end has sent a message about requests, or a call."""
        peer = self.peers.get(serial)
        if peer is None:
            return
        if isinstance(message, PlaceRequest):
            self._place(peer, message.request, message.rank)
        elif isinstance(message, AbortRequests):
            self.supervisor.abort_requests([handle for handle in message.handles if serial_of(handle) == serial])
        elif isinstance(message, OwnerCall):
            task = asyncio.get_running_loop().create_task(self._answer(peer, message))
            self._calls.add(task)
            task.add_done_callback(self._calls.discard)

    def _place(self, peer: FrontEndPeer, request: EngineCoreRequest, rank: int | None) -> None:
        handle, before = request.handle, request.output_token_ids
        if serial_of(handle) != peer.serial or handle in self._tokens:
            logger.error("front end %d sent a request with a handle that is not its own", peer.serial)
            return
        peer.live.add(handle)
        self._tokens[handle] = [] if before is None else before.tolist()
        if request.sampling_params.beam_search is not None:
            self._beams.add(handle)
        try:
            if self.controls is not None and self.controls.sleep_state.tags:
                self.controls.note_request_while_asleep()
            if isinstance(self.supervisor, Replicas):
                self.supervisor.add_request(request, rank)
            else:
                self.supervisor.add_request(request)
        except QuireError as error:
            self.on_failed(handle, error)

    async def _answer(self, peer: FrontEndPeer, call: OwnerCall) -> None:
        try:
            own = self.own_calls.get(call.method)
            answer = await (self._engine_call(call) if own is None else own(peer.serial, call))
        except QuireError as error:
            answer = OwnerAnswer(call.call_id, error=ErrorInfo.of(error))
        except Exception as error:  # one call's failure is the caller's alone
            logger.exception("the call of %s by front end %d failed", call.method, peer.serial)
            failed = EngineGenerateError(f"{call.method}: {type(error).__name__}: {error}")  # the engine lives on
            answer = OwnerAnswer(call.call_id, error=ErrorInfo.of(failed))
        self.send_status()
        peer.send(answer)

    async def _engine_call(self, call: OwnerCall) -> OwnerAnswer:
        one = self.supervisor
        if self.dead is not None:
            raise self.dead
        if call.method == "check_health":
            await one.check_health()
        elif call.method == "live_states" and isinstance(one, Replicas):
            return OwnerAnswer(call.call_id, states=await one.live_states())
        elif call.method == "profile":
            value = await (one.profile(call.flag) if isinstance(one, Replicas) else one.call("profile", call.flag))
            return OwnerAnswer(call.call_id, value=value is not False)
        elif call.method in ("scale", "restart_replicas"):
            if not isinstance(one, Replicas):
                raise UnsupportedError("this engine has one replica", field="data_parallel_size")
            await (one.scale(call.number, call.seconds) if call.method == "scale" else one.restart_all(call.seconds))
        else:
            value = await one.call("live_state" if call.method == "live_states" else call.method, call.flag)
            if isinstance(value, EngineState):
                return OwnerAnswer(call.call_id, states=[value])
            return OwnerAnswer(call.call_id, value=None if value is None else bool(value))
        return OwnerAnswer(call.call_id)

    # --- from the cores: as `Listener` ---

    def on_step(self, step: EngineCoreOutputs) -> None:
        """A step's outputs came."""
        tokens = self._tokens
        for handle, token in zip(step.handles.tolist(), step.new_token_ids.tolist(), strict=True):
            if handle in tokens:
                tokens[handle].append(token)
        self._logs.record(step)
        if step.events and self.controls is not None and self.controls.weight_versions != self._status.weight_versions:
            self.send_status()  # before what these weights have computed
        for listener in self.step_listeners:
            listener(step)
        parts, now_s = split_step(step), time.monotonic()
        for serial, peer in self.peers.items():
            part = parts.get(serial)
            if part is None:
                peer.skip_step(step, now_s)
            else:
                peer.send_step(part, now_s)
        for end in step.finished:
            self._forget(end.handle)

    def on_failed(self, handle: int, error: QuireError) -> None:
        """The core refused a request, or a request was given up."""
        peer = self._forget(handle)
        if peer is not None:
            peer.send(RequestRefused(handle, ErrorInfo.of(error)))

    def on_aborted(self, handle: int) -> None:
        """A request whose end was asked for was lost with its core before it ended."""
        peer = self._forget(handle)
        if peer is not None:
            peer.send(RequestAborted(handle))

    def on_dead(self, error: EngineDeadError) -> None:
        """The engine is of no further use."""
        self.dead = self.dead or error
        self._tokens.clear()
        self.broadcast(EngineDead(ErrorInfo.of(error)))

    def restart(self, handle: int) -> list[int] | None:
        """A request is about to be sent again: the tokens it has put out; None when it was abandoned."""
        peer, tokens = self.peers.get(serial_of(handle)), self._tokens.get(handle)
        if peer is None or tokens is None:
            self._forget(handle)
            return None
        peer.send(RequestRestarted(handle))
        return [] if handle in self._beams else tokens

    def close(self) -> None:
        """Log nothing more."""
        for task in self._calls:
            task.cancel()
        self._logs.close()

    def _forget(self, handle: int) -> FrontEndPeer | None:
        """A request has ended; its front end, if that is there."""
        self._tokens.pop(handle, None)
        self._beams.discard(handle)
        peer = self.peers.get(serial_of(handle))
        if peer is not None:
            peer.live.discard(handle)
        return peer


def _with_sums(stats: SchedulerStats, sums: dict[str, int]) -> SchedulerStats:
    return replace(stats, **{name: getattr(stats, name) + count for name, count in sums.items()})


def _without_requests(stats: SchedulerStats, engine_index: int) -> EngineCoreOutputs:
    """A step in which a front end had no part."""
    return EngineCoreOutputs(
        handles=NO_HANDLES, new_token_ids=NO_TOKENS, logprobs=None, prompt_logprobs=(), finished=(), events=(),
        stats=stats, timestamp=time.monotonic(), engine_index=engine_index,
    )  # fmt: skip
