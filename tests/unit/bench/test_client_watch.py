"""When the client was the limit."""

from __future__ import annotations

import resource

import msgspec
import pytest

from quire.bench import client_watch
from quire.bench.client_watch import (
    ClientLimits,
    LagProbe,
    at_share,
    measure_health,
    missing_files,
    worst_of,
)
from quire.bench.records import ClientHealth, Failure, RequestRecord

WELL = ClientHealth(
    cpu_share=0.3, lag_p50_ms=0.1, lag_p99_ms=1, lag_max_ms=9, dispatch_p99_ms=1, dispatch_max_ms=2, rate_share=1.0,
    num_local_errors=0,
)  # fmt: skip


def changed(**figures: float | None) -> ClientHealth:
    return msgspec.structs.replace(WELL, **figures)


def sent(index: int, due_s: float, late_s: float = 0.0, failure: Failure | None = None) -> RequestRecord:
    return RequestRecord(
        index=index, due_s=due_s, dispatched_s=due_s + late_s, started_s=due_s + late_s, failure=failure
    )


def test_a_client_that_is_well_is_no_limit():
    assert ClientLimits().exceeded_by(WELL) == []
    assert ClientLimits().exceeded_by(changed(rate_share=None, dispatch_p99_ms=500)) == []
    assert ClientLimits().exceeded_by(changed(rate_share=0.5, dispatch_max_ms=20)) == []  # a run of milliseconds


@pytest.mark.parametrize(
    ("figures", "word"),
    [
        ({"lag_p99_ms": 20.5}, "event loop"),
        ({"cpu_share": 0.95}, "of a CPU"),
        ({"rate_share": 0.9, "dispatch_max_ms": 21.0}, "request rate"),
        ({"dispatch_p99_ms": 30.0}, "late"),
        ({"num_local_errors": 1}, "open files"),
    ],
    ids=["lag", "cpu", "rate", "dispatch", "files"],
)
def test_each_limit_has_its_reason(figures: dict[str, float], word: str):
    (reason,) = ClientLimits().exceeded_by(changed(**figures))
    assert word in reason


def test_every_tick_that_a_held_loop_misses_counts():
    now = 10.0
    probe = LagProbe(lambda: now)
    assert probe.note(10.0) == pytest.approx(10.005)
    now = 10.107  # held for 102 ms: the tick that is due and twenty more
    probe.note(10.005)
    assert len(probe.lags_s) == 1 + 21
    assert probe.lags_s[1] == pytest.approx(0.102) and probe.lags_s[-1] == pytest.approx(0.002)


def test_health_is_measured_from_lags_and_dispatches():
    records = [sent(0, 0.0), sent(1, 1.0, 0.002), sent(2, 4.0, 1.0, Failure("connect", "too many files", True))]
    health = measure_health(records, [0.001] * 99 + [0.05], cpu_s=2, wall_s=8, has_rate=True)
    assert health.cpu_share == 0.25 and health.rate_share == pytest.approx(0.8)
    assert (health.lag_p50_ms, health.lag_p99_ms, health.lag_max_ms) == (1, 1, 50)
    assert health.dispatch_p99_ms == health.dispatch_max_ms == pytest.approx(1000) and health.num_local_errors == 1
    assert measure_health(records, [], cpu_s=0, wall_s=0, has_rate=False).rate_share is None


def test_of_several_processes_the_worst_counts():
    worst = worst_of([changed(cpu_share=0.9, rate_share=0.5), changed(lag_p99_ms=7, num_local_errors=2)])
    assert (worst.cpu_share, worst.lag_p99_ms, worst.rate_share, worst.num_local_errors) == (0.9, 7, 0.5, 2)


def test_a_share_of_values_is_found_by_rank():
    assert [at_share([1, 2, 3, 4], share) for share in (0.0, 0.25, 0.5, 0.99, 1.0)] == [1, 1, 2, 4, 4]
    assert at_share([], 0.5) == 0


def test_open_files_are_raised_to_the_limit_and_what_is_missing_is_told(monkeypatch):
    limits = [100, 300]

    def set_limits(_: int, values: tuple[int, int]) -> None:
        limits[:] = values

    monkeypatch.setattr(client_watch.resource, "getrlimit", lambda _: tuple(limits))
    monkeypatch.setattr(client_watch.resource, "setrlimit", set_limits)
    assert missing_files(20) == 0 and limits == [100, 300]
    assert missing_files(100) == 0 and limits == [164, 300]
    assert missing_files(1000) == 764 and limits == [300, 300]
    limits[:] = [resource.RLIM_INFINITY, resource.RLIM_INFINITY]
    assert missing_files(10**6) == 0
