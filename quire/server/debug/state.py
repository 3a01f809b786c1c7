"""DebugState: what `/debug/state` says. Values only; `docs/reference/debug-endpoints.md` describes every field."""

from __future__ import annotations

from typing import Any

import msgspec

from quire.core.live_state import EngineState, ProcessState
from quire.core.process_stats import RankUsage


class Series(msgspec.Struct):
    """Columns of equal length, one entry a look, the oldest first; None = nothing happened in between.

    Attributes:
        time: Unix seconds. Rates are per second; times of tokens in seconds.
    """

    time: list[float] = []
    generated_tps: list[float] = []
    computed_tps: list[float] = []
    requests_ps: list[float] = []
    running: list[int] = []
    waiting: list[int] = []
    kv_usage: list[float] = []
    ttft_p50: list[float | None] = []
    ttft_p95: list[float | None] = []
    itl_mean: list[float | None] = []
    itl_p95: list[float | None] = []
    prefix_hit_rate: list[float | None] = []
    acceptance_rate: list[float | None] = []
    preemptions: list[float] = []
    mfu: list[float | None] = []
    mbu: list[float | None] = []


class ModelLive(msgspec.Struct, frozen=True):
    """One model.

    Attributes:
        names: that requests may ask for.
        num_answers: sequences admitted by the server, running or waiting.
        is_draining, is_paused: no new work is taken; no steps are run.
        restarts, resumed: engine cores that were replaced; sequences that were continued on another one.
        predicted_wait_s: of a request that came last now; None = nothing was measured.
        problem: why there is no state of an engine; "" = there is.
        speculation: settings and decisions of speculative decoding, as `/server_info`; None = it is off.
        engines: by `index`.
        processes: of the engine cores, in the order of their engines and ranks.
        sleep_state: awake, weights_offloaded or discard_all.
        num_held: sequences that wait for the engine to wake up or to be resumed.
        weight_versions: of each engine, by its number; "" = those of the server's start.
        series: since the time that the viewer has.
    """

    names: list[str]
    num_answers: int
    is_draining: bool
    is_paused: bool
    restarts: int
    resumed: int
    predicted_wait_s: float | None
    problem: str
    speculation: dict[str, Any] | None
    engines: list[EngineState]
    processes: list[RankUsage]
    series: Series
    sleep_state: str = "awake"
    num_held: int = 0
    weight_versions: dict[str, str] = {}


class TenantUse(msgspec.Struct, frozen=True):
    """A tenant as the server sees it: its requests under way, in answers too, and its weight under the fair policy."""

    name: str
    is_operator: bool
    weight: float
    num_requests: int
    num_answers: int


class DebugState(msgspec.Struct, frozen=True):
    """The server at one moment.

    Attributes:
        time: Unix seconds; time_s: the monotonic clock of engines' times.
        interval_s: between two looks at the least.
        server: the process of the HTTP server.
    """

    version: str
    time: float
    time_s: float
    interval_s: float
    uptime_s: float
    num_viewers: int
    server: ProcessState
    tenants: list[TenantUse]
    models: list[ModelLive]
