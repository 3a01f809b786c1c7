"""The program of a front-end process: text and HTTP of one part of a server's connections.

Started by `front_process`, which writes two blocks to its standard input and keeps that open: its end is the end of
this process. The model's cores, the address and what all front ends share are the owner's.
"""

from __future__ import annotations

import asyncio
import dataclasses
import gc
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from functools import partial

import msgspec
import uvloop

from quire import envs
from quire.core.wire import ErrorInfo
from quire.engine.front_ends.link import FrontEndLink
from quire.engine.front_ends.messages import FrontEndFailed, Listening, ToFrontEnd, Wake
from quire.engine.front_ends.remote import RemoteEngine
from quire.engine.front_factory import build_front_end
from quire.engine.mp_factory import params_check, with_num_blocks
from quire.engine.parts import FrontEndParts
from quire.errors import QuireError
from quire.logger import configure_logging, get_logger
from quire.metrics.count_page import CountPage
from quire.models.model_dir import read_model_dir
from quire.server.app import FrontEndShare, make_app
from quire.server.front_ends.engine import FrontEndEngine
from quire.server.front_ends.ledger import Ledger
from quire.server.front_ends.peers import Arrivals, FrontEndPeers, Reporter
from quire.server.front_ends.server import FrontEndServer, given_protocol
from quire.server.front_ends.setup import CoresReady, FrontEndSetup
from quire.server.front_ends.shared_limits import SharedAdmission, SharedBodyBudget, SharedPlaces, SharedTenant
from quire.server.front_ends.shelf import RemoteShelf
from quire.server.http.limit_makers import LimitMakers
from quire.server.launcher import uvicorn_config
from quire.utils.child_life import die_with_parent, ignore_terminal_signals, read_block
from quire.utils.heap import map_large_blocks

WAKE_DELAY_S = 0.005
SWITCH_INTERVAL_S = 0.0005
"""As of a server that is alone."""

logger = get_logger(__name__)


class Waker:
    """Lets the other front ends know that something became free; several times in a moment are one.

    Args:
        owner: passes it on.
    """

    def __init__(self, owner: RemoteEngine) -> None:
        self._owner = owner
        self._timer: asyncio.TimerHandle | None = None

    def wake(self) -> None:
        """Do so soon."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(WAKE_DELAY_S, self._send)

    def _send(self) -> None:
        self._timer = None
        if not self._owner.has_stopped:
            self._owner.send(Wake())


def main() -> None:
    """Run the process."""
    ignore_terminal_signals()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    setup = msgspec.msgpack.decode(read_block(0), type=FrontEndSetup)
    die_with_parent(setup.parent_pid)
    observability = setup.config.observability
    configure_logging(observability.log_level, observability.log_format)
    envs.prefer_sleeping_threads()
    link: FrontEndLink[ToFrontEnd] = FrontEndLink(
        socket.socket(fileno=setup.link_fd), ToFrontEnd, "owner of the engine cores"
    )
    CountPage(setup.counts_fd).install()
    try:
        parts = _front_end_parts(setup)
        ready = msgspec.msgpack.decode(read_block(0), type=CoresReady)
        threading.Thread(target=_end_with_parent, name="parent watch", daemon=True).start()
        parts = dataclasses.replace(parts, config=with_num_blocks(parts.config, ready.num_blocks))
        owner = RemoteEngine(link, setup.serial, ready.start_phases)
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        map_large_blocks()
        gc.freeze()  # what the process has by now it keeps: to look through it would stop every stream
        uvloop.run(_serve(setup, parts, owner))
    except QuireError as error:
        link.send(FrontEndFailed(ErrorInfo.of(error)))
        threading.Event().wait(LAST_WORDS_S)  # the owner ends this process when it has read that
        raise SystemExit(1) from None


LAST_WORDS_S = 5.0


def _front_end_parts(setup: FrontEndSetup) -> FrontEndParts:
    config = setup.config
    assert config.model_path is not None, "the owner has resolved it"
    return build_front_end(config, read_model_dir(config.model_path), params_check(setup.logits_processors))


async def _serve(setup: FrontEndSetup, parts: FrontEndParts, owner: RemoteEngine) -> None:
    """Serve until the owner says that it is enough."""
    ledger = Ledger(setup.ledger_fd, setup.server.http.api_server_count, setup.slot)
    waker = Waker(owner)
    arrivals = Arrivals()
    peers = FrontEndPeers(owner, arrivals, setup.slot)
    shelf = None if setup.server.responses.response_store == "none" else RemoteShelf(owner)
    engine = FrontEndEngine(parts, owner)
    app = make_app(engine, setup.server, FrontEndShare(shared_limits(ledger, waker.wake), shelf, peers))
    state = app.state.server
    server = FrontEndServer(
        uvicorn_config(app, setup.server, given_protocol(setup.server.limits)), state,
        setup.server.http.shutdown_timeout, socket.socket(fileno=setup.connections_fd), ledger,
        arrivals,
    )  # fmt: skip

    def drain(is_last: bool) -> None:
        state.begin_drain()
        if is_last:
            server.end_at_once()

    def look_again() -> None:
        state.places.serve()
        state.parts.body_budget.give_up_stalled()

    owner.events.on_drain, owner.events.on_wake = drain, look_again
    owner.events.on_report = Reporter(
        owner, state.metrics.all_series, state.parts.recent, state.parts.accounts.ledger
    ).report
    server.on_started = lambda _: owner.send(Listening())
    owner.attach()
    await server.serve()
    engine.shutdown()


def shared_limits(ledger: Ledger, wake: Callable[[], None]) -> LimitMakers:
    """The limits of a front end among others.

    Args:
        wake: lets the others know that something became free.
    """
    return LimitMakers(
        tenant=partial(SharedTenant, ledger),
        admission=partial(SharedAdmission, ledger),
        places=lambda max_num_seqs: SharedPlaces(ledger, max_num_seqs, wake),
        body_budget=lambda max_bytes, has_several: SharedBodyBudget(
            ledger, ledger.tenant, max_bytes, has_several, wake
        ),
    )


def _end_with_parent() -> None:
    """End this process when the owner closes its end of the standard input, or dies."""
    while os.read(0, 4096):
        pass
    os._exit(0)
