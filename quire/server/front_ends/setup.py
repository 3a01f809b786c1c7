"""What a front-end process is given to start with, on its standard input: two blocks. Values only."""

from __future__ import annotations

import msgspec

from quire.config import QuireConfig
from quire.config.server import ServerConfig

CLIENT, OVER, PEER = b"c", b"x", b"p"
"""What comes with a connection: it is a client's; one beyond the limit; another front end's. Else the call of this
front end that has asked for it."""
MAX_MARK_BYTES = 32


class FrontEndSetup(msgspec.Struct, frozen=True):
    """The first block.

    Attributes:
        config: resolved.
        logits_processors: "module:Class" each.
        slot: its place among the front ends.
        serial: the number of this process, never used again.
        link_fd: of the link to the owner.
        connections_fd: where connections come.
        ledger_fd: of the ledger's file.
        counts_fd: of the page of what it counts.
        parent_pid: the owner.
    """

    config: QuireConfig
    server: ServerConfig
    logits_processors: list[str]
    slot: int
    serial: int
    link_fd: int
    connections_fd: int
    ledger_fd: int
    counts_fd: int
    parent_pid: int


class CoresReady(msgspec.Struct, frozen=True):
    """The second block, once the engine cores are ready.

    Attributes:
        num_blocks: of the KV cache of one core.
        start_phases: of the first core's start.
    """

    num_blocks: int
    start_phases: list[tuple[str, float]] = []
