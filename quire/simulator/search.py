"""Questions that need several simulations: how many replicas, which setting, which routing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from quire.scheduler.setup import SchedulerSetup
from quire.simulator.fleet import ROUTERS, FleetSetup, simulate
from quire.simulator.results import Slo, figures
from quire.simulator.workload import SimRequest

MAX_REPLICAS = 1024
SLOWDOWNS = (0.0, 1.25, 1.5, 2.0, 4.0, 8.0)


@dataclass(frozen=True, slots=True)
class Trial:
    """A simulation: what was tried, and its figures."""

    name: str
    figures: dict[str, Any]


def run_trial(name: str, fleet: FleetSetup, requests: Sequence[SimRequest], slo: Slo) -> Trial:
    """Simulate once."""
    return Trial(name, figures(simulate(fleet, requests), slo))


def replicas_needed(
    fleet: FleetSetup,
    requests: Sequence[SimRequest],
    slo: Slo,
    target: float,
    note: Callable[[Trial], None] = lambda trial: None,
) -> tuple[int | None, list[Trial]]:
    """The fewest replicas with which a share `target` of the requests keeps to the objectives.

    Doubles until it is enough, then halves the interval. None = not with `MAX_REPLICAS`, or when a doubling of them no
    longer helps.
    """
    trials: dict[int, Trial] = {}

    def share(count: int) -> float:
        trials[count] = run_trial(
            f"{count} replicas", dataclasses.replace(fleet, num_replicas=count), requests, slo
        )  # fmt: skip
        note(trials[count])
        answered: float = trials[count].figures["good_share"]
        return answered

    low, high, last = 0, 1, -1.0
    while (found := share(high)) < target:
        if high >= MAX_REPLICAS or (high >= 4 and found <= last):
            return None, list(trials.values())
        low, high, last = high, 2 * high, found
    while high - low > 1:
        middle = (low + high) // 2
        if share(middle) < target:
            low = middle
        else:
            high = middle
    return high, [trials[count] for count in sorted(trials)]


def variations(setup: SchedulerSetup) -> list[tuple[str, SchedulerSetup]]:
    """The setup with one setting changed, for each setting worth trying; the name says which."""
    tried: list[tuple[str, SchedulerSetup]] = []
    config = setup.scheduler
    tokens, seqs = config.max_num_batched_tokens or 1, config.max_num_seqs or 1

    def add(name: str, **changes: Any) -> None:
        tried.append((name, dataclasses.replace(setup, scheduler=dataclasses.replace(config, **changes))))

    for factor in (4, 2, 0.5):
        if (count := int(tokens * factor)) >= seqs:
            add(f"max_num_batched_tokens={count}", max_num_batched_tokens=count)
    for factor in (4, 2, 0.5):
        if 1 <= (count := int(seqs * factor)) <= tokens:
            add(f"max_num_seqs={count}", max_num_seqs=count)
    for slowdown in SLOWDOWNS:
        if slowdown != config.max_decode_slowdown:
            add(f"max_decode_slowdown={slowdown:g}", max_decode_slowdown=slowdown)
    add(f"reserve_full_prompt={not config.reserve_full_prompt}", reserve_full_prompt=not config.reserve_full_prompt)
    blocks = dataclasses.replace(setup.kv_cache, num_blocks=2 * setup.kv_cache.num_blocks)
    tried.append(
        (f"num_gpu_blocks_override={blocks.num_blocks} (more memory)", dataclasses.replace(setup, kv_cache=blocks))
    )
    return tried


def sweep(fleet: FleetSetup, requests: Sequence[SimRequest], slo: Slo) -> list[Trial]:
    """The setup as it is, and each variation, by goodput and then by throughput, the best first."""
    trials = [run_trial("as given", fleet, requests, slo)]
    for name, setup in variations(fleet.scheduler):
        trials.append(run_trial(name, dataclasses.replace(fleet, scheduler=setup), requests, slo))
    return sorted(trials, key=_merit, reverse=True)


def _merit(trial: Trial) -> tuple[float, float, float]:
    """Goodput to within half a percent; then latency, as rates below capacity are all alike."""
    return round(trial.figures["good_share"], 2), -(trial.figures["p95_ttft_ms"] or 0.0), trial.figures["goodput"]


def compare_routing(fleet: FleetSetup, requests: Sequence[SimRequest], slo: Slo) -> list[Trial]:
    """One simulation for each router."""
    return [run_trial(name, dataclasses.replace(fleet, routing=name), requests, slo) for name in ROUTERS]
