"""What crosses between a front-end process and the owner of the engine cores. Values only, encoded by `core.serial`.

`ToOwner` goes to the owner, `ToFrontEnd` comes back. Both ends are of one version: the owner starts the front ends.
"""

from __future__ import annotations

import msgspec

from quire.core.engine_messages import EngineCoreRequest
from quire.core.live_state import EngineState
from quire.core.process_stats import CoreProcesses
from quire.core.wire import AbortRequests, ErrorInfo, RequestRefused, StepOutputs

HANDLE_BITS = 36
"""A front end counts its handles up from its serial number times 2 ** HANDLE_BITS: they say whose they are."""
MAX_SERIAL = (1 << (63 - HANDLE_BITS)) - 1


def first_handle(serial: int) -> int:
    """The first handle of a front end."""
    return serial << HANDLE_BITS


def serial_of(handle: int) -> int:
    """The front end that gave a handle."""
    return handle >> HANDLE_BITS


class PlaceRequest(msgspec.Struct, frozen=True, tag="place"):
    """Queue a request; `rank` is that of the replica that it must be, None = any."""

    request: EngineCoreRequest
    rank: int | None = None


class OwnerCall(msgspec.Struct, frozen=True, tag="call"):
    """Anything rare, answered by an `OwnerAnswer`.

    Attributes:
        method: "scale" (`number` of replicas, `seconds` to drain), "restart_replicas" (`seconds`), "check_health",
            "live_states"; a method of `OwnerControls` or of the server's; or else a utility of the cores (`flag`).
        words: arguments that are texts.
        key: of a stored response: tenant, id.
        data: its record.
    """

    call_id: int
    method: str
    flag: bool = False
    number: int = 0
    seconds: float = 0.0
    words: tuple[str, ...] = ()
    key: tuple[str, str] = ("", "")
    data: bytes = b""


class OwnerAnswer(msgspec.Struct, frozen=True, tag="answer"):
    """Answer to an `OwnerCall`: what the method gives, or an error."""

    call_id: int
    value: bool | None = True
    number: int | None = None
    states: list[EngineState] = []
    data: bytes | None = None
    reports: list[bytes] = []
    error: ErrorInfo | None = None


class Listening(msgspec.Struct, frozen=True, tag="listening"):
    """The front end takes connections."""


class FrontEndFailed(msgspec.Struct, frozen=True, tag="failed"):
    """The front end cannot be built."""

    error: ErrorInfo


class Wake(msgspec.Struct, frozen=True, tag="wake"):
    """Something that front ends share became free, or is short: each looks whether it waits for it, or can give it
    back. Passed on to the others.
    """


class Report(msgspec.Struct, frozen=True, tag="report"):
    """Answer to a `ReportWanted`, encoded."""

    report_id: int
    data: bytes


class RequestAborted(msgspec.Struct, frozen=True, tag="aborted"):
    """A request that was to end was lost with its core before it ended."""

    handle: int


class RequestRestarted(msgspec.Struct, frozen=True, tag="restarted"):
    """A request is sent to another core, with the tokens that it has put out."""

    handle: int


class EngineStatus(msgspec.Struct, frozen=True, tag="status"):
    """What the owner knows of the cores; sent when it changes.

    Attributes:
        indexes: of the replicas that serve, or will again.
        num_ready: of those whose cores run.
        core_pid: process of the first core.
        cores: all their processes.
        sleep_level, sleep_tags: of the `SleepState`.
        weight_versions: by replica.
        model_path: of the weights.
    """

    is_paused: bool = False
    num_restarts: int = 0
    num_resumed: int = 0
    indexes: tuple[int, ...] = (0,)
    num_ready: int = 1
    core_pid: int | None = None
    cores: list[CoreProcesses] = []
    sleep_level: int = 0
    sleep_tags: tuple[str, ...] = ()
    weight_versions: dict[int, str] = {}
    model_path: str | None = None


class EngineDead(msgspec.Struct, frozen=True, tag="dead"):
    """The engine is of no further use."""

    error: ErrorInfo


class BeginDrain(msgspec.Struct, frozen=True, tag="drain"):
    """Take no new work and end; at once with `is_last`."""

    is_last: bool = False


class ReportWanted(msgspec.Struct, frozen=True, tag="report_wanted"):
    """Another front end wants to know: "metrics" or "requests"; or "usage" is to be written."""

    report_id: int
    kind: str


ToOwner = PlaceRequest | AbortRequests | OwnerCall | Listening | FrontEndFailed | Wake | Report
ToFrontEnd = (
    StepOutputs | RequestRefused | RequestAborted | RequestRestarted | EngineStatus | EngineDead | OwnerAnswer
    | BeginDrain | Wake | ReportWanted
)  # fmt: skip
