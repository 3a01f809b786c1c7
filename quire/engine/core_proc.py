"""EngineCoreProc: an engine core in a process of its own, between two sockets.

Started by `core_launcher`, which writes a `CoreSetup` to its standard input and keeps that open: its end is the end of
this process. Owns the engine core and the sockets' inner ends. The loop: take in what has come, run a step, send what
it gave.
"""

from __future__ import annotations

import gc
import importlib
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import zmq

from quire import envs
from quire.core.engine_messages import EngineCoreOutputs, EngineCoreRequest
from quire.core.serial import MessageDecoder, MessageEncoder
from quire.core.wire import (
    AbortRequests,
    AddRequest,
    CoreFailed,
    CoreReady,
    CoreSetup,
    ErrorInfo,
    FromCore,
    ReplicaPlace,
    RequestRefused,
    StepOutputs,
    TenantCounters,
    ToCore,
    UtilityCall,
    UtilityResult,
    UtilityValue,
)
from quire.core.worker_call import WorkerCall
from quire.engine.core import EngineCore
from quire.engine.core_link import HELLO
from quire.engine.heartbeat import Heartbeat, Phase
from quire.engine.spare_process import PRELOAD
from quire.errors import EngineDeadError, MessageError, QuireError
from quire.logger import configure_logging, get_logger
from quire.utils.child_life import die_with_parent, ignore_terminal_signals, read_block
from quire.utils.garbage import collector_paused
from quire.utils.last_words import keep_last_words
from quire.utils.phases import PhaseTimer

FILES_GONE_TIMEOUT_S = 30.0
PRELOADED = ("quire.engine.core_factory", "quire.platforms.detect", "quire.executor.uniproc", "quire.worker.worker")
"""What a core imports before it knows its model."""

logger = get_logger(__name__)


class _Handle(msgspec.Struct):
    handle: int


class _OnlyHandle(msgspec.Struct):
    """As much of an `AddRequest` as is needed to answer one that cannot be read."""

    request: _Handle


class EngineCoreProc:
    """The loop of a core's process.

    Args:
        core: what runs the steps.
        inputs, outputs: connected PULL and PUSH sockets.
        progress: where to show it.
        clock_ns: times steps, in nanoseconds: the process's CPU time where steps are computed by the CPU, so that a
            process which was stopped, or had to wait for the CPU, does not seem slow.
    """

    def __init__(
        self,
        core: EngineCore,
        inputs: zmq.Socket[bytes],
        outputs: zmq.Socket[bytes],
        progress: Heartbeat,
        clock_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._core = core
        self._inputs = inputs
        self._outputs = outputs
        self._progress = progress
        self._encoder = MessageEncoder()
        self._decoder: MessageDecoder[ToCore] = MessageDecoder(ToCore)
        self._clock_ns = clock_ns
        self._is_paused = False
        self._has_ended = False
        self._lock_step = core.lock_step
        self._poller = zmq.Poller()
        self._poller.register(inputs, zmq.POLLIN)
        if self._lock_step is not None:
            self._poller.register(self._lock_step.bell, zmq.POLLIN)
            self._lock_step.watch(progress.begin_step)  # which takes longer the more tokens others have

    def run(self) -> None:
        """Serve until the core is asked to end, or the process ends."""
        while not self._has_ended:
            self.run_once()

    def run_once(self) -> None:
        """Take in what has come, waiting when there is nothing to do, then run a step."""
        self._take_in()
        if self._has_ended:
            return
        lock_step = self._lock_step
        num_passes = 0 if lock_step is None else lock_step.num_passes
        outputs = self._core.take_outputs() if self._is_paused else self._step()
        if lock_step is not None and lock_step.num_passes == num_passes:
            lock_step.join()  # there was nothing to compute
        if outputs is not None:
            self._send(StepOutputs(outputs))

    def _step(self) -> EngineCoreOutputs | None:
        start = self._clock_ns()
        outputs = self._core.step()
        self._progress.end_step(self._clock_ns() - start)
        return outputs

    def _take_in(self) -> None:
        if self._is_paused or not self._core.has_work():
            self._progress.enter(Phase.IDLE)
            self._wait()
            self._progress.enter(Phase.BUSY)
        while not self._has_ended and self._inputs.poll(0):
            frames = self._inputs.recv_multipart(zmq.NOBLOCK)
            self._handle(frames)
            self._progress.note_received()

    def _wait(self) -> None:
        """Until something has come; meanwhile take part in what other replicas compute."""
        while self._inputs not in dict(self._poller.poll()):
            assert self._lock_step is not None, "nothing else is waited for"
            self._lock_step.join()

    def _handle(self, frames: list[bytes]) -> None:
        try:
            message = self._decoder.decode(frames)
        except MessageError as error:
            self._refuse_unreadable(frames, error)
            return
        if isinstance(message, AddRequest):
            self._add(message.request)
        elif isinstance(message, AbortRequests):
            self._core.abort_requests(message.handles)
        elif isinstance(message, TenantCounters):
            self._core.take_over_service(message.counters)
        else:
            self._call(message)

    def _add(self, request: EngineCoreRequest) -> None:
        try:
            self._core.add_request(request)
        except QuireError as error:
            self._send(RequestRefused(request.handle, ErrorInfo.of(error)))

    def _refuse_unreadable(self, frames: list[bytes], error: MessageError) -> None:
        """Answer for a request whose message cannot be read, as far as it says whose it is."""
        logger.error("could not decode a message from the front end: %s", error)
        try:
            handle = msgspec.msgpack.decode(frames[0], type=_OnlyHandle).request.handle
        except (msgspec.DecodeError, RecursionError, IndexError):
            return
        self._send(RequestRefused(handle, ErrorInfo.of(error)))

    def _call(self, call: UtilityCall) -> None:
        value: UtilityValue = True
        if call.method == "end":
            self._progress.enter(Phase.IDLE)  # it does not hang
            self._core.end()
            self._has_ended = True
            return
        if call.method == "show_memory":
            self._progress.show_memory(self._core.memory_parts())
            return
        if call.method in ("pause", "resume"):
            self._is_paused = call.method == "pause"
        elif call.method == "reset_prefix_cache":
            value = self._core.reset_prefix_cache(bool(call.argument))
        elif call.method == "live_state":
            value = self._core.live_state()
        elif call.method == "profile":
            self._progress.enter(Phase.IDLE)  # to write takes its time
            value = self._core.profile(bool(call.argument))
            self._progress.enter(Phase.BUSY)
        elif isinstance(call.argument, WorkerCall):
            self._progress.enter(Phase.IDLE)  # a function may take its time
            try:
                value = self._core.collective_rpc(call.argument)
            except EngineDeadError:
                raise
            except QuireError as error:
                self._send(UtilityResult(call.call_id, error=ErrorInfo.of(error)))
                return
            finally:
                self._progress.enter(Phase.BUSY)
        elif call.method != "ping":
            unknown = ErrorInfo.of(MessageError(f"the engine core does not have a method {call.method!r}"))
            self._send(UtilityResult(call.call_id, error=unknown))
            return
        self._send(UtilityResult(call.call_id, value=value))

    def _send(self, message: FromCore) -> None:
        self._outputs.send_multipart(self._encoder.encode(message), copy=False)


def main() -> None:
    """Run the process: read the setup, build the core, say so on the descriptor that is the argument, serve.

    A spare process, whose second argument says so, imports what a core needs before it reads the setup.

    Ends with its parent, however that ends: when its standard input closes, and on Linux by the kernel too.
    """
    ready_fd = int(sys.argv[1])
    ignore_terminal_signals()
    begun = _read_setup(is_spare=PRELOAD in sys.argv[2:])
    if begun is None:
        return
    setup, timer = begun
    _take_place(setup.replica)
    directory = Path(setup.progress_path).parent
    threading.Thread(target=_end_with_parent, args=(directory,), name="parent watch", daemon=True).start()
    context = zmq.Context()
    inputs, outputs = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    for socket in (inputs, outputs):
        socket.setsockopt(zmq.LINGER, 0)
    inputs.setsockopt(zmq.RCVHWM, 0)
    outputs.setsockopt(zmq.SNDHWM, 0)
    progress = Heartbeat(setup.progress_path)
    configure_logging(setup.config.observability.log_level, setup.config.observability.log_format)
    keep_last_words(setup.last_words_path)
    inputs.connect(setup.input_address)
    outputs.connect(setup.output_address)
    outputs.send(HELLO)
    _wait_until_gone(directory)
    die_with_parent(setup.parent_pid)
    timer.end_phase("connection")
    try:
        core = _build(setup, progress, timer)
    except Exception as error:
        if not isinstance(error, QuireError):
            logger.exception("the engine core cannot be built")
        _answer(ready_fd, CoreFailed(ErrorInfo.of(error)))
        return
    core.watch_failure(_end_at_once)
    core.watch_silence(progress.show_silence)
    progress.enter(Phase.IDLE)
    logger.info("engine core %s", timer)
    progress.show_memory(core.memory_parts())
    _answer(ready_fd, CoreReady(core.num_blocks, timer.phases, core.rank_pids))
    try:
        clock_ns = time.process_time_ns if setup.config.device.device == "cpu" else time.monotonic_ns
        EngineCoreProc(core, inputs, outputs, progress, clock_ns).run()
        os._exit(0)  # at once: what was to be kept is
    except EngineDeadError as error:  # of a rank that has ended, where it was waited for tells nothing
        logger.error("the engine core failed: %s", error.message, exc_info=error.__cause__)
        os._exit(1)
    except Exception:
        logger.exception("the engine core failed")
        os._exit(1)  # at once: nothing here is worth tidying up, and the parent waits for the end


def _read_setup(*, is_spare: bool) -> tuple[CoreSetup, PhaseTimer] | None:
    """The setup, and the timer of the start; None when a spare process was not needed."""
    if not is_spare:
        timer = PhaseTimer("python and imports")
        return msgspec.msgpack.decode(read_block(0), type=CoreSetup), timer
    envs.prefer_sleeping_threads()
    with collector_paused():
        for module in PRELOADED:
            importlib.import_module(module)
    try:
        block = read_block(0)
    except EngineDeadError:
        return None
    return msgspec.msgpack.decode(block, type=CoreSetup), PhaseTimer()


def _take_place(place: ReplicaPlace) -> None:
    """Use the CPUs and the device of this core alone; before any thread is started and CUDA is looked at."""
    if place.cpus:
        os.sched_setaffinity(0, place.cpus)
    if place.gpu is not None:
        visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        os.environ["CUDA_VISIBLE_DEVICES"] = visible[place.gpu] if visible else str(place.gpu)


def _build(setup: CoreSetup, progress: Heartbeat, timer: PhaseTimer) -> EngineCore:
    envs.prefer_sleeping_threads()
    with collector_paused():
        with timer.phase("torch"):
            from quire.engine.core_factory import build_core  # late: loads torch
            from quire.platforms.detect import detect_platform
        place = setup.replica
        platform = detect_platform(setup.config.device.device)
        if place.memory_bytes is not None:
            own_bytes = min(place.memory_bytes, platform.memory.available_bytes)
            platform = replace(platform, memory=replace(platform.memory, available_bytes=own_bytes))
        core = build_core(
            setup.config, platform, timer, logits_processors=setup.logits_processors, on_step=progress.begin_step,
            engine_index=place.engine_index, experts=setup.experts,
        )  # fmt: skip
        gc.freeze()  # what the process has by now it keeps: to look through it would stop a step
    return core


def _end_at_once(reason: str) -> None:
    """A process of the group has ended: so does this one, whatever it does, and its watcher starts another group."""
    logger.error("the engine core ends: %s", reason)
    os._exit(1)


def _answer(ready_fd: int, answer: CoreReady | CoreFailed) -> None:
    with os.fdopen(ready_fd, "wb") as pipe:
        pipe.write(msgspec.msgpack.encode(answer))


def _end_with_parent(directory: Path) -> None:
    """End this process when the parent closes its end of the standard input, or dies."""
    while os.read(0, 4096):
        pass
    shutil.rmtree(directory, ignore_errors=True)
    os._exit(0)


def _wait_until_gone(directory: Path) -> None:
    """Wait for the parent to unlink the sockets' files, which a sudden end would leave behind."""
    deadline = time.monotonic() + FILES_GONE_TIMEOUT_S
    while directory.exists() and time.monotonic() < deadline:
        time.sleep(0.002)
