"""What ranks whose scripts a launcher has started say to each other beside what is computed. Values only, bounded."""

from __future__ import annotations

from typing import Any

import msgspec

from quire.core.wire import ErrorInfo
from quire.executor.host_memory import HostInfo, RankPlace


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The first message of a rank to rank 0.

    Attributes:
        version: of Quire.
        machine: which ranks that can open each other's memory have in common.
        address: at which other machines reach it.
        settings: those that all ranks must have alike, by name.
    """

    version: str
    machine: str
    address: str
    host_name: str
    pid: int
    settings: dict[str, Any]


class OpenHere(msgspec.Struct, frozen=True, tag="open"):
    """To the first rank of another machine: open it; answered by `Opened`."""

    size: int
    num_stages: int
    shares_caches: bool


class Opened(msgspec.Struct, frozen=True, tag="opened"):
    """The machine is open."""

    info: HostInfo


class Join(msgspec.Struct, frozen=True, tag="join"):
    """Join the group and load the model; answered by `Loaded`."""

    place: RankPlace


class Loaded(msgspec.Struct, frozen=True, tag="loaded"):
    """The rank's part of the model is loaded."""


class Start(msgspec.Struct, frozen=True, tag="start"):
    """Every rank has loaded its part."""


class Call(msgspec.Struct, frozen=True, tag="call"):
    """What rank 0's script does next with the engine, as the others must.

    Attributes:
        digest: of what it is given.
        text: the call, for people.
        error: what it raised.
        wants_ready: `Ready` is awaited before anything is computed.
    """

    digest: bytes
    text: str
    error: ErrorInfo | None = None
    wants_ready: bool = False


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """This rank's script has made all the calls that rank 0's has."""


class Done(msgspec.Struct, frozen=True, tag="done"):
    """This rank's script has what a call came to; from rank 0: all have, and any may end."""


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The group is at an end, because of this."""

    error: ErrorInfo


ToLead = Hello | Opened | Loaded | Ready | Done | Failed
FromLead = OpenHere | Join | Start | Call | Done | Failed
