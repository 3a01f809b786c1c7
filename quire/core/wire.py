"""What crosses between the front-end's process and the engine core's, besides what is inside. Values only.

Encoded by `core.serial`. `ToCore` goes to the core, `FromCore` comes back, `CoreSetup` and `CoreReady` are exchanged
once when a core starts.
"""

from __future__ import annotations

from typing import Any

import msgspec

from quire import errors
from quire.config.engine import QuireConfig
from quire.core.engine_messages import EngineCoreOutputs, EngineCoreRequest
from quire.core.expert_group import ExpertGroup
from quire.core.live_state import EngineState
from quire.core.worker_call import WorkerCall
from quire.errors import EngineDeadError, QuireError


class ErrorInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """An exception: the name of its class in `quire.errors` ("" = none of them), and what it says."""

    kind: str
    message: str
    hint: str | None = None
    field: str | None = None

    @classmethod
    def of(cls, error: BaseException) -> ErrorInfo:
        """The message for `error`."""
        if isinstance(error, QuireError):
            known = next((kind.__name__ for kind in type(error).__mro__ if kind.__module__ == errors.__name__), "")
            return cls(known, error.message, error.hint, error.field)
        return cls("", f"{type(error).__name__}: {error}")

    def within(self, where: str) -> ErrorInfo:
        """The same, with where it was met."""
        return msgspec.structs.replace(self, message=f"{where}: {self.message}")

    def to_error(self) -> QuireError:
        """The same exception again; one of a foreign class becomes an `EngineDeadError`."""
        kind: Any = getattr(errors, self.kind, None)
        if not (isinstance(kind, type) and issubclass(kind, QuireError)):
            kind = EngineDeadError
        error: QuireError = kind(self.message, hint=self.hint, field=self.field)
        return error


class ReplicaPlace(msgspec.Struct, frozen=True):
    """Where one of several engine cores runs.

    Attributes:
        engine_index: its number.
        cpus: the only CPUs it may use; empty = any.
        memory_bytes: the most memory that is its own; None = all that is free.
        gpu: the only CUDA device that it sees, by number; None = all.
    """

    engine_index: int = 0
    cpus: list[int] = []
    memory_bytes: int | None = None
    gpu: int | None = None


ONLY_REPLICA = ReplicaPlace()
"""That of a core without others."""


class CoreSetup(msgspec.Struct, frozen=True):
    """What a core process is given to start with.

    Attributes:
        config: resolved.
        logits_processors: "module:Class" each.
        input_address, output_address: ZMQ endpoints to connect to.
        progress_path: file of the progress block; last_words_path: of its log and its stacks.
        parent_pid: whose child it is.
        replica: what is its own among several cores of one server.
        experts: its place among cores that share experts; None = it has all.
    """

    config: QuireConfig
    logits_processors: list[str]
    input_address: str
    output_address: str
    progress_path: str
    last_words_path: str
    parent_pid: int
    replica: ReplicaPlace = ONLY_REPLICA
    experts: ExpertGroup | None = None


class CoreReady(msgspec.Struct, frozen=True, tag="ready"):
    """The core is built.

    Attributes:
        num_blocks: its KV cache in blocks.
        start_phases: (name, seconds) of each phase of its process's start.
        rank_pids: other processes of this machine that compute the model, in the order of their ranks.
    """

    num_blocks: int
    start_phases: list[tuple[str, float]] = []
    rank_pids: list[int] = []


class CoreFailed(msgspec.Struct, frozen=True, tag="failed"):
    """The core cannot be built."""

    error: ErrorInfo


class AddRequest(msgspec.Struct, frozen=True, tag="add"):
    """Queue a request."""

    request: EngineCoreRequest


class AbortRequests(msgspec.Struct, frozen=True, tag="abort"):
    """End requests."""

    handles: list[int]


class TenantCounters(msgspec.Struct, frozen=True, tag="tenants"):
    """What tenants, by name, were served by all engine cores of a server together (policy "fair", several cores)."""

    counters: dict[str, float]


class UtilityCall(msgspec.Struct, frozen=True, tag="call"):
    """Anything rare: "ping", "pause", "resume", "live_state", "reset_prefix_cache" (`argument`: of running requests,
    too), "show_memory", "profile" (`argument`: it starts; else the value is the file), "collective_rpc" (`argument`:
    what is called; the value has what each rank returns), "end".

    Answered by a `UtilityResult`; "show_memory" in the memory that the two processes share; "end" by the end of the
    process, which first stores what is to be kept.
    """

    call_id: int
    method: str
    argument: bool | WorkerCall = False


class StepOutputs(msgspec.Struct, frozen=True, tag="outputs"):
    """One step's outputs."""

    outputs: EngineCoreOutputs


class RequestRefused(msgspec.Struct, frozen=True, tag="refused"):
    """A request that the core did not take."""

    handle: int
    error: ErrorInfo


UtilityValue = bool | str | EngineState | list[Any] | None


class UtilityResult(msgspec.Struct, frozen=True, tag="result"):
    """Answer to a `UtilityCall`: a value, or an error."""

    call_id: int
    value: UtilityValue = None
    error: ErrorInfo | None = None


ToCore = AddRequest | AbortRequests | TenantCounters | UtilityCall
FromCore = StepOutputs | RequestRefused | UtilityResult
