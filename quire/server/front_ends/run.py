"""Runs a server with several front ends in this process, which becomes their owner. Called by `quire serve`."""

from __future__ import annotations

import gc
from socket import socket

import uvloop

from quire import envs
from quire.config import QuireConfig
from quire.config.resolve import UsageContext
from quire.config.server import ServerConfig
from quire.engine.mp_factory import begin_start
from quire.logger import get_logger
from quire.server.front_ends.owner import FrontEnds, FrontEndsOwner
from quire.utils.phases import PhaseTimer

logger = get_logger(__name__)


def serve_front_ends(config: QuireConfig, server: ServerConfig, sockets: list[socket] | None, timer: PhaseTimer) -> int:
    """Serve until a signal; returns the exit status.

    Args:
        sockets: bound to the address; None = that is a Unix socket.

    Raises:
        QuireError: the settings, the model or the machine does not allow it; no process is left.
    """
    with timer.phase("start of the engine core"):
        envs.prefer_sleeping_threads()
        start = begin_start(config, usage=UsageContext.API_SERVER)
    try:
        front_ends = FrontEnds(start, server)
    except BaseException:
        start.cancel()
        raise
    ready = front_ends.wait_ready(timer)
    owner = FrontEndsOwner(front_ends, ready, sockets, timer)

    def report(address: str) -> None:
        logger.info("listening on %s; %s; %d front ends", address, timer, front_ends.count)

    gc.freeze()  # what the process has by now it keeps: to look through it would stop every stream
    uvloop.run(owner.run(report))
    return 1 if owner.errored else 0
