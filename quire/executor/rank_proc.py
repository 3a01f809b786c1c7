"""A rank other than 0: a process with a worker that follows rank 0.

Started by `rank_process`, which writes a `RankSetup` to its standard input and keeps that open: its end is the end of
this process.
"""

from __future__ import annotations

import gc
import os
import sys
import threading

import msgspec

from quire import envs
from quire.config.engine import QuireConfig
from quire.core.expert_group import ExpertGroup
from quire.core.wire import ErrorInfo
from quire.errors import CommunicationError, QuireError
from quire.logger import configure_logging, get_logger
from quire.utils.child_life import die_with_parent, ignore_terminal_signals, read_block
from quire.utils.garbage import collector_paused

logger = get_logger(__name__)


class RankSetup(msgspec.Struct, frozen=True):
    """What a rank's process is given to start with.

    Attributes:
        config: resolved.
        fd: of the region that the ranks share, which the process inherits.
        stage_fd: of that of the ranks of this pipeline stage; None = it is not needed.
        timeout_s: for which a rank waits for another.
        cache_fds: as of `Seat`; inherited, too.
        experts: place of the group among replicas that share experts; its descriptors are inherited, too.
    """

    config: QuireConfig
    rank: int
    size: int
    fd: int
    stage_fd: int | None
    timeout_s: float
    parent_pid: int
    cache_fds: tuple[int, ...] = ()
    experts: ExpertGroup | None = None


class RankAnswer(msgspec.Struct, frozen=True):
    """The model is loaded, or what keeps it from being."""

    error: ErrorInfo | None = None


def main() -> None:
    """Run the process: read the setup, load this rank's part, say so on the descriptor that is the argument, follow."""
    ready_fd = int(sys.argv[1])
    ignore_terminal_signals()
    setup = msgspec.msgpack.decode(read_block(0), type=RankSetup)
    die_with_parent(setup.parent_pid)
    threading.Thread(target=_end_with_parent, name="parent watch", daemon=True).start()
    configure_logging(setup.config.observability.log_level, setup.config.observability.log_format)
    try:
        worker = _load(setup)
    except Exception as error:
        if not isinstance(error, QuireError):
            logger.exception("rank %d cannot be loaded", setup.rank)
        _answer(ready_fd, RankAnswer(ErrorInfo.of(error)))
        return
    _answer(ready_fd, RankAnswer())
    try:
        worker.await_cache()
        worker.follow()
    except CommunicationError as error:
        logger.error("rank %d ends: %s", setup.rank, error.message)
    except Exception:
        logger.exception("rank %d failed", setup.rank)
    os._exit(1)  # at once: its parent waits for the end


def _load(setup: RankSetup):  # type: ignore[no-untyped-def]  # the class is loaded here
    envs.prefer_sleeping_threads()
    with collector_paused():
        from quire.distributed.seat import Seat  # late: loads torch
        from quire.platforms.detect import detect_platform
        from quire.worker.worker import Worker

        seat = Seat(
            rank=setup.rank, size=setup.size, fd=setup.fd, timeout_s=setup.timeout_s, stage_fd=setup.stage_fd,
            num_stages=setup.config.parallel.pipeline_parallel_size, cache_fds=setup.cache_fds,
        )  # fmt: skip
        worker = Worker(setup.config, detect_platform(setup.config.device.device), (), seat, setup.experts)
        gc.freeze()
    return worker


def _answer(fd: int, answer: RankAnswer) -> None:
    with os.fdopen(fd, "wb") as pipe:
        pipe.write(msgspec.msgpack.encode(answer))


def _end_with_parent() -> None:
    while os.read(0, 4096):
        pass
    os._exit(0)
