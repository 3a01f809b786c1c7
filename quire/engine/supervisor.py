"""Supervisor: keeps one engine core running, and its requests alive when it dies.

Used by `AsyncLLM`, on its event loop. Owns the core's process, the client to it, and what was sent and has not ended.
A core that dies or hangs (`core_launcher` kills it) is replaced, and every live request is sent again together with
the tokens it has put out: its randomness is keyed by seed and position, so it goes on as if nothing had happened.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import msgspec
import numpy as np

from quire.core.engine_messages import EngineCoreOutputs, EngineCoreRequest
from quire.core.process_stats import CoreProcesses
from quire.core.stats import SchedulerStats
from quire.core.wire import FromCore, RequestRefused, StepOutputs, ToCore, UtilityCall, UtilityValue
from quire.core.worker_call import WorkerCall
from quire.engine.core_client.async_mp import AsyncMPClient
from quire.engine.core_launcher import CoreProcess
from quire.engine.crash_reports import write_crash_report
from quire.engine.fault_bisector import FaultBisector
from quire.engine.live_request import Listener, LiveRequest
from quire.engine.output_stream import noop
from quire.errors import EngineDeadError, EngineGenerateError, EngineRestartingError, EngineSleepingError, QuireError
from quire.logger import get_logger

# Requests that were with so many cores in a row that died, without one token in between, take turns apart from others.
SUSPECT_DEATHS = 2
# The only suspect left is ended after so many: twice as the only one, as a core may die by another hand at any moment.
MAX_DEATHS = 4
RETRY_S, MAX_RETRY_S = 0.25, 10.0  # doubled with each try, up to the second
# A core that takes longer to come back is unavailable: its requests need not wait for it.
UNAVAILABLE_S = 10.0
FINISH_POLL_S = HEALTH_POLL_S = 0.05
HEALTH_STALLED_S = 2.0
HEALTHY_S = 60.0  # a core that ran so long is no part of a crash loop, though it may have had no requests

logger = get_logger(__name__)


class Supervisor:
    """One engine core after another.

    Args:
        core: a core that is ready.
        launch: starts another one.
        listener: its callbacks.
        max_restarts: cores in a row that may die without any progress.
        on_unavailable: called when another core could not be started, or takes long; requests may be released then.

    Attributes:
        is_paused: no steps are run.
        weight_version: of the core's weights; "" = those that the engine was started with.
        num_restarts: cores that were replaced.
        num_resumed: answers that were continued on another core.
    """

    def __init__(
        self,
        core: CoreProcess,
        launch: Callable[[], CoreProcess],
        listener: Listener,
        max_restarts: int = 5,
        on_unavailable: Callable[[], None] = noop,
    ) -> None:
        self._launch = launch
        self._listener = listener
        self._max_restarts = max_restarts
        self._on_unavailable = on_unavailable
        self._live: dict[int, LiveRequest] = {}
        self._bisector = FaultBisector()
        self._core = core
        self._client: AsyncMPClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._restarting: asyncio.Task[None] | None = None
        self._is_closed = self._is_resting = self._is_holding = False
        self.weight_version, self.is_paused, self._connected_s = "", False, 0.0
        self.num_restarts = self.num_resumed = self._num_failed_restarts = self._num_steps = self._num_reports = 0
        self._has_lost_cores = False  # since all that is here has advanced
        self._last_stats: SchedulerStats | None = None
        self._report: asyncio.Task[Path | None] | None = None

    @property
    def core_pid(self) -> int | None:
        """Process id of the core of now."""
        return self._core.pid

    def processes(self) -> CoreProcesses:
        """Of the core of now, which is asked to show its memory for the next time."""
        self.tell(UtilityCall(0, "show_memory"))
        return msgspec.structs.replace(self._core.processes, num_reports=self._num_reports)

    @property
    def is_restarting(self) -> bool:
        """True while there is no core to talk to."""
        return self._client is None and self._loop is not None and not self._is_resting

    @property
    def is_resting(self) -> bool:
        """True while there is no core, on purpose."""
        return self._is_resting

    @property
    def has_stopped(self) -> bool:
        """True once no other core will be started."""
        return self._is_closed

    @property
    def stalled_s(self) -> float:
        """Seconds for which the core should have advanced and did not."""
        return self._core.stalled_s

    def attach(self) -> None:
        """Listen on the running event loop; done once.

        Raises:
            EngineDeadError: another event loop is listening already.
        """
        if self._loop is not None and self._loop is not asyncio.get_running_loop():
            raise EngineDeadError("this engine belongs to another event loop", hint="use it on one event loop")
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._connect()

    # --- towards the core ---

    def add_request(self, message: EngineCoreRequest) -> None:
        """Send a request; it stays live until it ends, whatever becomes of the core."""
        live = self._live[message.handle] = LiveRequest(message)
        if message.queue_timeout_s:
            live.deadline_s = time.monotonic() + message.queue_timeout_s
        self._send(live)

    def live_of(self, handle: int) -> LiveRequest | None:
        """A request that has not ended."""
        return self._live.get(handle)

    def message_of(self, handle: int) -> EngineCoreRequest | None:
        """The message of a request that has not ended."""
        live = self._live.get(handle)
        return None if live is None else live.message

    def abort_requests(self, handles: Iterable[int]) -> None:
        """Ask for requests to end."""
        wanted = [handle for handle in handles if handle in self._live]
        sent = [handle for handle in wanted if self._live[handle].is_sent]
        for handle in wanted:
            self._live[handle].is_aborting = True
        if sent and self._client is not None:
            self._try(lambda client: client.abort_requests(sent))
        for handle in set(wanted) - set(sent):
            self._end_aborted(handle)

    def tell(self, message: ToCore) -> None:
        """Send what needs no answer; nothing when there is no core, which begins without it."""
        if self._client is not None:
            self._try(lambda client: client.tell(message))

    def adopt(self, live: LiveRequest) -> None:
        """Take over a request of another supervisor; it goes on behind the tokens that it has put out."""
        live.is_sent, live.was_lost = False, True
        self._has_lost_cores = self._has_lost_cores or live.num_deaths > 0
        self._live[live.message.handle] = live
        self._resend(live)

    def release_all(self) -> list[LiveRequest]:
        """Give up requests, for others to adopt; those whose end was asked for end. The core must be gone.

        Those that may bring down a core stay as long as another one is tried.
        """
        for handle in [handle for handle, live in self._live.items() if live.is_aborting]:
            self._end_aborted(handle)
        released = [one for one in self._live.values() if self._is_closed or one.num_deaths < SUSPECT_DEATHS]
        for live in released:
            del self._live[live.message.handle]
        return released

    def disconnect(self) -> None:
        """Take nothing more from the core, which will be ended; its requests can be released then."""
        self._is_closed = True
        self._disconnect()

    async def call(self, method: str, argument: bool | WorkerCall = False) -> UtilityValue:
        """Call a utility of the core; waits for a core when there is none now. A `WorkerCall` is not sent twice."""
        while True:
            if self._restarting is not None:
                await asyncio.shield(self._restarting)
            client = self._client
            if self._is_resting:
                raise EngineSleepingError("the engine is asleep", hint="wake it up: POST /wake_up")
            if self._is_closed or client is None:
                raise EngineDeadError("the engine has stopped", hint="make a new one")
            try:
                return await client.call(method, argument)
            except EngineDeadError:
                if isinstance(argument, WorkerCall):
                    raise
                if self._client is client and self._restarting is None:
                    await asyncio.sleep(0.01)  # its exit is about to be noticed

    async def check_health(self) -> None:
        """Return when the core, which is asked, answers or advances; else raises `EngineRestartingError`."""
        if self._is_resting:
            return
        if self.is_restarting:
            raise EngineRestartingError("the engine core is being restarted", hint="try again in a few seconds")
        answer = asyncio.ensure_future(self.call("ping"))
        try:
            while not answer.done():
                if self.is_restarting or self.stalled_s > HEALTH_STALLED_S:
                    raise EngineRestartingError(f"the engine core has made no progress for {self.stalled_s:.1f} s")
                num_steps = self._num_steps
                await asyncio.wait([answer], timeout=HEALTH_POLL_S)
                if self._num_steps != num_steps:
                    return
            await answer
        finally:
            answer.cancel()

    async def pause(self, is_paused: bool) -> None:
        """Stop running steps, or go on; holds for later cores too."""
        self.is_paused = is_paused
        if not self._is_resting:
            await self.call("pause" if is_paused else "resume")

    # --- without a core, on purpose ---

    async def finish(self, timeout_s: float) -> bool:
        """Send no new requests until `release` or `wake`, and wait until those that were sent have ended.

        Returns:
            False when that takes longer; new ones are sent again then.
        """
        self._is_holding = True
        deadline = time.monotonic() + timeout_s
        while any(live.is_sent or live.was_lost for live in self._live.values()):
            if time.monotonic() > deadline or self._is_closed:
                self.release()
                return False
            await asyncio.sleep(FINISH_POLL_S)
        return True

    def release(self) -> None:
        """Send what was held back."""
        self._is_holding = False
        for live in list(self._live.values()):
            self._resend(live)

    async def rest(self) -> None:
        """End the core; requests stay here, and new ones wait, until `wake`. Harmless when repeated."""
        self._is_resting = True
        self._disconnect()
        if self._restarting is not None:
            self._core.kill()  # one that starts need not become ready
            await asyncio.wait([self._restarting])
        await asyncio.to_thread(self._core.close)
        for handle, live in list(self._live.items()):
            if live.is_aborting:
                self._end_aborted(handle)
            elif live.is_sent:
                live.is_sent, live.was_lost = False, True

    async def wake(self, launch: Callable[[], CoreProcess] | None = None, version: str | None = None) -> None:
        """Start a core after `rest`; requests go on.

        Args:
            launch: starts it, and those after it; None = as before.
            version: of its weights; None = as before.

        Raises:
            QuireError: it cannot be started, and nothing has changed.
        """
        core = (launch or self._launch)()
        await asyncio.to_thread(core.wait_ready)
        self._core, self._launch = core, launch or self._launch
        if self._is_closed:
            await asyncio.to_thread(core.close)
            return
        self._is_resting = self._is_holding = False
        self.weight_version = self.weight_version if version is None else version
        self._connect()
        await self._continue_all()

    def close(self) -> None:
        """End the core, when the event loop has ended or is the caller's; harmless when repeated."""
        self._is_closed = True
        self._disconnect()
        self._core.close()

    async def stop(self) -> None:
        """End the core while the event loop goes on; harmless when repeated."""
        self._is_closed = True
        self._disconnect()
        restarting = self._restarting
        if restarting is not None:
            self._core.kill()  # one that starts need not become ready
            await asyncio.wait([restarting])
        await asyncio.to_thread(self._core.close)

    def _send(self, live: LiveRequest) -> None:
        if self._client is None or not self._bisector.may_run(live.message.handle):
            return
        if self._is_holding and not live.was_lost:
            return
        live.weight_version = self.weight_version
        live.is_sent = self._try(lambda client: client.add_request(live.message))
        if live.is_sent and live.was_lost:
            live.was_lost = False
            self.num_resumed += 1

    def _try(self, send: Callable[[AsyncMPClient], None]) -> bool:
        """Send, unless the core is gone: then it is about to be replaced, and what is live is sent again."""
        assert self._client is not None
        try:
            send(self._client)
        except EngineDeadError:
            return False
        return True

    # --- from the core ---

    def _on_message(self, message: FromCore) -> None:
        if isinstance(message, StepOutputs):
            self._note_step(message.outputs)
            self._listener.on_step(message.outputs)
        elif isinstance(message, RequestRefused) and self._live.pop(message.handle, None) is not None:
            self._clear(message.handle)
            self._listener.on_failed(message.handle, message.error.to_error())

    def _note_step(self, step: EngineCoreOutputs) -> None:
        """Requests that advanced are free of suspicion; those that ended are no longer live."""
        self._num_steps += 1
        self._last_stats = step.stats
        ended = [one.handle for one in step.finished]
        if self._has_lost_cores:
            for live in (self._live.get(handle) for handle in {*step.handles.tolist(), *ended}):
                if live is not None:
                    live.num_deaths = self._num_failed_restarts = 0
                    if not self._bisector.is_empty:
                        self._clear(live.message.handle)
            is_suspected = any(live.num_deaths for live in self._live.values())
            self._has_lost_cores = is_suspected or bool(self._num_failed_restarts) or not self._bisector.is_empty
        for handle in ended:
            self._live.pop(handle, None)

    def _clear(self, handle: int) -> None:
        """A suspect has advanced or ended; the next ones may have their turn."""
        if self._bisector.clear(handle):
            for live in list(self._live.values()):
                if not live.is_sent:
                    self._resend(live)

    # --- when a core dies ---

    def _connect(self) -> None:
        self._client, self._connected_s = AsyncMPClient(self._core, self._on_message), time.monotonic()
        self._core.watch_exit(self._on_exit)

    def _on_exit(self, core: CoreProcess, reason: str) -> None:
        """Called from the core's thread."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._begin_restart, core, reason)

    def _begin_restart(self, core: CoreProcess, reason: str) -> None:
        if self._is_closed or self._is_resting or core is not self._core:
            return
        logger.error("the engine core failed (%s); %d requests will be resumed", reason, len(self._live))
        self._disconnect()
        self._has_lost_cores = True
        self._num_failed_restarts *= time.monotonic() - self._connected_s < HEALTHY_S
        requests = [(one.message, one.num_deaths) for one in self._live.values()]
        report = partial(write_crash_report, core.remains(), reason, requests, self._last_stats)
        if not core.has_ended_with_group:
            self._report = asyncio.ensure_future(self._write_report(report))  # beside the restart
        self._restarting = asyncio.ensure_future(self._restart(reason))

    async def _write_report(self, write: Callable[[], Path | None]) -> Path | None:
        path = await asyncio.to_thread(write)
        self._num_reports += path is not None
        return path

    def _disconnect(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close(EngineDeadError("the engine core failed"))

    async def _restart(self, reason: str) -> None:
        waiting = asyncio.get_running_loop().call_later(UNAVAILABLE_S, self._on_unavailable)
        try:
            await asyncio.to_thread(self._core.close)
            is_expected = self._fail_unrecoverable()
            while not self._is_closed and not self._is_resting:
                self._num_failed_restarts += not is_expected
                if self._num_failed_restarts > self._max_restarts:
                    raise self._restart_limit_error(reason, None if self._report is None else await self._report)
                try:
                    await self._start_another()
                    break
                except QuireError as error:
                    logger.error("the engine core cannot be restarted: %s", error)
                    reason = error.message
                    self._on_unavailable()
                    is_expected = self._core.has_ended_with_group
                    await asyncio.sleep(min(RETRY_S * 2 ** min(self._num_failed_restarts, 20), MAX_RETRY_S))
        except EngineDeadError as error:
            self.give_up(error)
        finally:
            waiting.cancel()
            self._restarting = None
        if not self._is_closed and not self._is_resting:
            await self._continue_all()

    async def _start_another(self) -> None:
        self._core = self._launch()
        await asyncio.to_thread(self._core.wait_ready)
        if not self._is_closed and not self._is_resting:
            self._connect()
            self.num_restarts += 1

    def _restart_limit_error(self, reason: str, report: Path | None) -> EngineDeadError:
        return EngineDeadError(
            f"the engine core stopped {self._num_failed_restarts} times in a row without progress; last reason: "
            f"{reason}",
            hint="see the log above for the cause" + ("" if report is None else f", and {report}"),
        )

    def _fail_unrecoverable(self) -> bool:
        """Count the death against the requests that were with the core; end aborted ones, and the one that kills it.

        Returns:
            True when fewer are suspects now than before, and where the core ended because another one did.
        """
        is_own = not self._core.has_ended_with_group
        for handle, live in list(self._live.items()):
            if live.is_aborting:
                self._end_aborted(handle)
            elif live.is_sent:
                live.is_sent = False
                live.was_lost = True
                live.num_deaths += is_own
        accused = {handle for handle, live in self._live.items() if is_own and live.num_deaths >= SUSPECT_DEATHS}
        if not accused:
            return not is_own
        faulty = self._bisector.report_failure(accused)
        if faulty is None:
            return True
        if self._live[faulty].num_deaths >= MAX_DEATHS:
            del self._live[faulty]
            self._bisector.clear(faulty)
            self._listener.on_failed(
                faulty,
                EngineGenerateError(
                    f"the engine core stopped {MAX_DEATHS} times while running this request",
                    hint="other requests are not affected",
                ),
            )
        return False

    def _end_aborted(self, handle: int) -> None:
        if self._live.pop(handle, None) is not None:  # what one end leads to may have ended others
            self._clear(handle)
            self._listener.on_aborted(handle)

    async def _continue_all(self) -> None:
        if self.is_paused:
            await self.call("pause")
        for live in list(self._live.values()):
            self._resend(live)

    def _resend(self, live: LiveRequest) -> None:
        """Send a request again, with what it has put out by now."""
        handle = live.message.handle
        if live.is_sent or self._client is None or not self._bisector.may_run(handle):
            return
        token_ids = self._listener.restart(handle)
        if token_ids is None:
            self._live.pop(handle, None)
            return
        output = np.asarray(token_ids, dtype=np.int32) if token_ids else None
        live.message = dataclasses.replace(live.message, output_token_ids=output)
        if live.message.queue_timeout_s:  # what is left of it
            left_s = max(live.deadline_s - time.monotonic(), 1e-6)
            live.message = dataclasses.replace(live.message, queue_timeout_s=left_s)
        self._send(live)

    def give_up(self, error: EngineDeadError) -> None:
        """Start no other core: requests end, or go elsewhere."""
        self._is_closed = True
        self._on_unavailable()
        self._live.clear()
        self._listener.on_dead(error)
