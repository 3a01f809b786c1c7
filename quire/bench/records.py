"""Messages between the parts of the load generator; also what crosses to client processes, as JSON. No state."""

from __future__ import annotations

import msgspec


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """Where requests go.

    Attributes:
        path: of generation requests, with whatever prefix the server has.
        models_path: of the list of models.
        headers: of every request, by name.
    """

    host: str
    port: int
    path: str
    models_path: str
    is_tls: bool = False
    checks_certificate: bool = True
    headers: dict[str, str] = {}

    @property
    def is_chat(self) -> bool:
        """Whether requests are conversations."""
        return self.path.endswith("/chat/completions")


class Job(msgspec.Struct, frozen=True):
    """A request that is to be sent.

    Attributes:
        index: its place in the workload.
        due_s: seconds after the start at which it is to be sent.
        body: JSON.
    """

    index: int
    due_s: float
    body: str


class Failure(msgspec.Struct, frozen=True):
    """Why a request has no usable answer.

    Attributes:
        kind: what failures are counted by, such as "connect", "status 503" or "early close".
        message: for people.
        is_local: the client's machine was short of something (open files, ports).
    """

    kind: str
    message: str
    is_local: bool = False


class RequestRecord(msgspec.Struct, kw_only=True):
    """One request, as the client saw it. Times are of the monotonic clock, in seconds.

    Attributes:
        due_s: when it was to be sent; `dispatched_s` when the client came to it, `started_s` when, after waiting for
            its turn under the concurrency limit, it was sent.
        event_times: of each event that brought tokens.
        ended_s: of the last event with a choice in it; of a failure, when it was noticed.
        num_prompt_tokens: by `usage`; None = the server did not say.
        num_output_tokens: by `token_source`; None = the server did not say.
        token_source: "usage", "token_ids", or "" for none.
    """

    index: int
    due_s: float
    dispatched_s: float
    started_s: float
    ended_s: float = 0.0
    event_times: list[float] = []
    num_prompt_tokens: int | None = None
    num_output_tokens: int | None = None
    token_source: str = ""
    failure: Failure | None = None


class ClientHealth(msgspec.Struct, frozen=True, kw_only=True):
    """How the client itself fared; of several processes the worst of each figure.

    Attributes:
        cpu_share: CPU seconds per second of one process.
        lag_p50_ms, lag_p99_ms, lag_max_ms: by how much the event loop's timers were late.
        dispatch_p99_ms, dispatch_max_ms: by how much requests were taken up after they were due.
        rate_share: dispatched over asked request rate; None = no rate was asked for.
        num_local_errors: connections that failed for want of open files or ports.
    """

    cpu_share: float
    lag_p50_ms: float
    lag_p99_ms: float
    lag_max_ms: float
    dispatch_p99_ms: float
    dispatch_max_ms: float
    rate_share: float | None = None
    num_local_errors: int = 0


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What one client process does.

    Attributes:
        max_concurrency: most requests at once; None = no limit.
        timeout_s: for one request.
        start_s: on the monotonic clock, which all processes of a machine share; None = at once.
        has_rate: `due_s` of the jobs follows an asked rate.
    """

    target: Target
    jobs: list[Job]
    max_concurrency: int | None
    timeout_s: float
    has_rate: bool
    start_s: float | None = None


class LoadReport(msgspec.Struct, frozen=True):
    """What came of a `Load`.

    Attributes:
        start_s: on the monotonic clock.
    """

    start_s: float
    records: list[RequestRecord]
    health: ClientHealth
