"""CoreProcess: one engine core in a child process: started, watched, ended. Owns the child and its link.

Called by the clients of cores in other processes. A thread of its own starts the child and stays until the child has
ended: the kernel kills the child with that thread, and a blocked event loop cannot be taken for a blocked core.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from quire.config import QuireConfig
from quire.core.expert_group import ExpertGroup
from quire.core.process_stats import CoreProcesses
from quire.core.wire import ONLY_REPLICA, CoreFailed, CoreReady, CoreSetup, ReplicaPlace, UtilityCall
from quire.engine.core_link import CoreLink
from quire.engine.crash_reports import CoreRemains
from quire.engine.hang_detector import HangDetector, Sample
from quire.engine.heartbeat import Heartbeat, HeartbeatField, Phase
from quire.engine.spare_process import CORE_MODULE, SpareProcess
from quire.errors import ConfigError, EngineDeadError, QuireError
from quire.logger import get_logger
from quire.utils.children import Child, describe_exit, start_module, wait_for_end, write_block
from quire.utils.last_words import ASK, LastWords
from quire.utils.phases import Phases

HELLO_TIMEOUT_S = 60.0
CLOSE_TIMEOUT_S = 5.0
END_TIMEOUT_S = 40.0
"""The same for a core with a tier behind its KV cache, which stores what is left: longer than that takes at most."""
STACKS_TIMEOUT_S = 0.2
"""For which a core that hangs may take to write its stacks."""
MIN_POLL_S, MAX_POLL_S = 0.02, 0.25
MAX_ANSWER_BYTES = 1 << 20

logger = get_logger(__name__)


def ignore_end(why: str | None) -> None:
    """For a core with which no other shares experts."""


class CoreProcess:
    """A child process with an engine core.

    Args:
        config: resolved.
        logits_processors: "module:Class" each.
        spare: a process that has its libraries already; None = one is started. Not used for logits processors, whose
            modules are looked for in other places.
        place: where it runs, as one of several.
        experts: its place among cores that share experts; None = it has all.
        on_end: called from another thread when the child has ended: why, None = it was asked to.

    Attributes:
        link: where to talk to it, once it is ready.
        has_ended_with_group: it was ended because another core was, with which it shares experts.
    """

    def __init__(
        self,
        config: QuireConfig,
        logits_processors: Sequence[str] = (),
        spare: SpareProcess | None = None,
        place: ReplicaPlace = ONLY_REPLICA,
        experts: ExpertGroup | None = None,
        on_end: Callable[[str | None], None] = ignore_end,
    ) -> None:
        self.link = CoreLink()
        self.has_ended_with_group = False
        self._on_end = on_end
        self._spare = spare
        self._config = config
        self._on_exit: Callable[[CoreProcess, str], None] | None = None
        self._exit_reason: str | None = None
        self._exit_lock = threading.Lock()
        self._progress = Heartbeat.create(self.link.directory / "progress")
        self._last_words, self._started_s = LastWords(self.link.directory / "log"), time.monotonic()
        self._setup = CoreSetup(
            config=config,
            logits_processors=list(logits_processors),
            input_address=self.link.input_address,
            output_address=self.link.output_address,
            progress_path=str(self.link.directory / "progress"),
            last_words_path=str(self.link.directory / "log"),
            parent_pid=os.getpid(),
            replica=place,
            experts=experts,
        )
        self._timeout_s = config.supervision.hang_timeout_s
        self._detector = HangDetector(self._timeout_s)
        self._child: Child | None = None
        self._answer: CoreReady | QuireError | None = None
        self._answered = threading.Event()
        self._is_closing = False
        self._hang: str | None = None
        self._is_suspected = False
        self._thread = threading.Thread(target=self._keep, name="engine core", daemon=True)

    def start(self) -> None:
        """Start the child; returns at once."""
        self._thread.start()

    def wait_ready(self) -> CoreReady:
        """Wait until the core is built.

        Raises:
            QuireError: it cannot be; the error that its process met.
        """
        self._answered.wait()
        if isinstance(self._answer, CoreReady):
            return self._answer
        self.close()
        raise self._answer or EngineDeadError("the engine core did not start")

    @property
    def start_phases(self) -> Phases:
        """What the child's start took; empty before it is ready."""
        return self._answer.start_phases if isinstance(self._answer, CoreReady) else ()

    @property
    def pid(self) -> int | None:
        """The child's process id."""
        return None if self._child is None else self._child.pid

    @property
    def processes(self) -> CoreProcesses:
        """The child and the ranks beside it; no memory by part before it is ready."""
        ranks = self._answer.rank_pids if isinstance(self._answer, CoreReady) else []
        pids = [] if self.pid is None else [self.pid, *ranks]
        return CoreProcesses(self._setup.replica.engine_index, pids, self._progress.memory, self._progress.silence_s)

    def remains(self) -> CoreRemains:
        """What a report of its death says; to be asked for before `close`."""
        lived_s = time.monotonic() - self._started_s
        return CoreRemains(self._config, self.pid, lived_s, self._progress.memory, self._last_words.read())

    @property
    def is_alive(self) -> bool:
        """True until the child has ended."""
        return self._thread.is_alive()

    @property
    def stalled_s(self) -> float:
        """Seconds for which the core should have advanced and did not."""
        return self._detector.stalled_s

    def watch_exit(self, on_exit: Callable[[CoreProcess, str], None]) -> None:
        """Call `on_exit` once, from another thread, when the child has ended without being asked to."""
        with self._exit_lock:
            self._on_exit = on_exit
            reason = self._exit_reason
        if reason is not None:
            on_exit(self, reason)

    def kill(self) -> None:
        """End the child now, whatever it does."""
        if self._child is not None and self._child.poll() is None:
            self._child.kill()

    def end_with_group(self, reason: str) -> None:
        """End the child as one that has failed by no fault of its own; nothing where it has ended, or is about to."""
        if self._hang is None and not self._is_closing and self._exit_reason is None:
            self._hang, self.has_ended_with_group = reason, True
            self.kill()

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """End the child and remove everything of it; harmless when repeated."""
        is_first, self._is_closing = not self._is_closing, True
        is_alive = self._thread.is_alive() and self._thread is not threading.current_thread()
        if is_first and is_alive and self._config.has_kv_tier and isinstance(self._answer, CoreReady):
            with contextlib.suppress(EngineDeadError):
                self.link.send(UtilityCall(0, "end"))
                self._thread.join(END_TIMEOUT_S)
        self._close_stdin()
        if is_alive:
            self._thread.join(timeout_s)
            self.kill()
            self._thread.join()
        self.link.close()
        self._progress.close()
        self._last_words.close()

    def _close_stdin(self) -> None:
        child = self._child
        if child is not None and child.stdin is not None:
            with contextlib.suppress(OSError):
                child.stdin.close()

    # --- the child's thread ---

    def _keep(self) -> None:
        try:
            self._live()
        finally:
            self._on_end(None if self._is_closing else self._exit_reason or self._hang or "it did not start")

    def _live(self) -> None:
        # The child inherits it: a Ctrl-C is for this process, and would be a traceback while the child imports.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._child, ready_fd = self._take_spare() or self._spawn()
        except OSError as error:
            self._give_answer(EngineDeadError(f"the engine core process cannot be started: {error}"))
            self.link.unlink()
            return
        try:
            self._send_setup()
            self._greet()
            self._wait_for_answer(ready_fd)
            self._watch()
        finally:
            os.close(ready_fd)
            self.link.unlink()
            if self._spare is not None:
                self._spare.release()

    def _take_spare(self) -> tuple[Child, int] | None:
        if self._spare is None:
            return None
        if self._setup.logits_processors:
            self._spare.close()
            return None
        return self._spare.take()

    def _spawn(self) -> tuple[Child, int]:
        """A new child, and the descriptor on which it answers."""
        ready_fd, child_fd = os.pipe()
        experts = self._setup.experts
        try:
            child = start_module(
                CORE_MODULE, str(child_fd), stdin=subprocess.PIPE,
                pass_fds=(child_fd, *(() if experts is None else experts.fds)),
                uses_current_directory=bool(self._setup.logits_processors),
            )  # fmt: skip
        except OSError:
            os.close(ready_fd)
            raise
        finally:
            os.close(child_fd)
        return child, ready_fd

    def _send_setup(self) -> None:
        assert self._child is not None
        if self._is_closing or self.has_ended_with_group:
            self._child.kill()
        write_block(self._child, msgspec.msgpack.encode(self._setup))

    def _greet(self) -> None:
        """Wait until the child has connected, then leave nothing on the disk."""
        assert self._child is not None
        deadline = time.monotonic() + HELLO_TIMEOUT_S
        while not self.link.wait_for_hello(MAX_POLL_S):
            if self._child.poll() is not None or self._is_closing or time.monotonic() > deadline:
                self.kill()
                break
        self.link.unlink()

    def _wait_for_answer(self, ready_fd: int) -> None:
        """Read what the child says when it has built its core, or could not."""
        data, last = b"", time.monotonic()
        while True:
            if select.select([ready_fd], [], [], self._poll_s)[0]:
                part = os.read(ready_fd, 1 << 16)
                data += part
                if not part or len(data) > MAX_ANSWER_BYTES:
                    break
            now = time.monotonic()
            self._look(now - last)
            last = now
        self._give_answer(self._read_answer(data))

    def _read_answer(self, data: bytes) -> CoreReady | QuireError:
        try:
            answer = msgspec.msgpack.decode(data, type=CoreReady | CoreFailed)
        except msgspec.DecodeError:
            assert self._child is not None
            self.kill()
            why = self._hang or f"the process {describe_exit(self._child.wait())}"
            return EngineDeadError(
                f"the engine core process exited during startup: {why}",
                hint="see its messages above; after signal 9 the machine may have run out of memory",
            )
        return answer.error.to_error() if isinstance(answer, CoreFailed) else answer

    def _give_answer(self, answer: CoreReady | QuireError) -> None:
        self._answer = answer
        self._answered.set()

    def _watch(self) -> None:
        assert self._child is not None
        last = time.monotonic()
        while (code := wait_for_end(self._child, self._poll_s)) is None:
            now = time.monotonic()
            self._look(now - last)
            last = now
        if not self._is_closing and isinstance(self._answer, CoreReady):
            with self._exit_lock:
                reason = self._exit_reason = self._hang or f"the process {describe_exit(code)}"
                on_exit = self._on_exit
            if on_exit is not None:
                on_exit(self, reason)

    @property
    def _poll_s(self) -> float:
        return min(MAX_POLL_S, max(MIN_POLL_S, self._timeout_s / 8))

    def _look(self, elapsed_s: float) -> None:
        hang = self._detector.observe(self._sample(), elapsed_s)
        if self._detector.is_suspicious and not self._is_suspected:
            logger.warning(
                "the engine core (process %s) has made no progress for %.1f s; it is killed after %g s "
                "without activity",
                self.pid, self._detector.stalled_s, self._timeout_s,
            )  # fmt: skip
        self._is_suspected = self._detector.is_suspicious
        if hang is not None and self._hang is None:
            self._hang = f"hang: {hang}"
            logger.error("killing the engine core (process %s): %s", self.pid, self._hang)
            self._ask_for_stacks()
            self.kill()

    def _ask_for_stacks(self) -> None:
        """Of a child that is about to be killed; one that is stopped, or waits for a disk, has none to give."""
        if self._child is None or self._child.poll() is not None or not isinstance(self._answer, CoreReady):
            return
        begin = size = self._last_words.num_bytes
        deadline = time.monotonic() + STACKS_TIMEOUT_S
        self._child.send_signal(ASK)
        while time.monotonic() < deadline:
            time.sleep(MIN_POLL_S)
            before, size = size, self._last_words.num_bytes
            if begin < before == size:  # it has written all
                return

    def _sample(self) -> Sample:
        words = self._progress.words
        num_tokens, ns_per_token = int(words[HeartbeatField.STEP_TOKENS]), int(words[HeartbeatField.NS_PER_TOKEN])
        state, cpu_s = process_use(self.pid)
        phase = self._progress.phase
        is_unread = self.link.num_sent > int(words[HeartbeatField.NUM_RECEIVED])
        return Sample(
            progress=(phase, int(words[HeartbeatField.NUM_TICKS]), int(words[HeartbeatField.NUM_RECEIVED])),
            should_advance=phase != Phase.IDLE or is_unread,
            cpu_s=cpu_s if self._config.device.device == "cpu" else None,
            is_stopped=state == "T",
            is_waiting=state in ("D", "R"),
            is_starting=phase == Phase.STARTING,
            step_s=num_tokens * ns_per_token * 1e-9,
            longest_step_s=int(words[HeartbeatField.NS_LONGEST_STEP]) * 1e-9,
        )


def processor_names(processors: Sequence[str | type]) -> list[str]:
    """Custom logits processors as "module:Class", the form in which they reach another process.

    Raises:
        ConfigError: a class cannot be found by its name.
    """
    return [_processor_name(processor) for processor in processors]


def _processor_name(processor: str | type) -> str:
    if isinstance(processor, str):
        return processor
    module, name = processor.__module__, processor.__qualname__
    if module == "__main__" or getattr(sys.modules.get(module), name, None) is not processor:
        raise ConfigError(
            f"logits processor {name} cannot be sent to the engine core process",
            hint="define it at the top of a module that can be imported, or pass 'module:Class'",
            field="logits_processors",
        )
    return f"{module}:{name}"


def process_use(pid: int | None) -> tuple[str, float | None]:
    """A process's state as the kernel writes it (T = stopped, R = runs or waits for a CPU, D = waits for a disk) and
    the CPU time it has used; "" and None where the system does not say.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return "", None
    state, *fields = text.rpartition(")")[2].split()
    return state, (int(fields[10]) + int(fields[11])) / os.sysconf("SC_CLK_TCK")
