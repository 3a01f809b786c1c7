"""How a plan is shown: lines for people, and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from quire.bench.svg import Panel, figure
from quire.simulator.costs import StepShape
from quire.simulator.fleet import FleetSetup
from quire.simulator.results import Results
from quire.simulator.search import Trial

MAX_POINTS = 4000
SIMULATED = "simulated"


def capacity_tokens(fleet: FleetSetup) -> int:
    """That the KV caches of all replicas hold."""
    kv_cache = fleet.scheduler.kv_cache
    return fleet.num_replicas * kv_cache.pool_sizes()[0].num_blocks * kv_cache.block_size


def decode_steps(fleet: FleetSetup, context: int) -> list[dict[str, Any]]:
    """What a decode step of one replica takes, and its ranks' exchanges: of 1, 32, and `max_num_seqs` requests.

    Args:
        context: tokens before each request's new one.
    """
    costs, most, found = fleet.costs(), fleet.scheduler.scheduler.max_num_seqs or 1, []
    for num_rows in sorted({1, min(32, most), most}):
        shape = StepShape(num_rows, 0, num_rows, num_rows * context, 0.0, num_rows, 0)
        exchanges = getattr(costs, "exchanges", None)
        found.append(
            {
                "requests": num_rows, "step_s": costs.step_seconds(shape),
                "exchange_s": 0.0 if exchanges is None else exchanges.seconds(shape),
                "exchange_bytes": 0.0 if exchanges is None else exchanges.num_bytes(shape),
            }
        )  # fmt: skip
    return found


def print_division(basis: dict[str, Any], steps: list[dict[str, Any]], kv_tokens: int) -> None:
    """Bytes of each rank, room of the caches, and what exchanges take."""
    for stage in basis.get("memory", ()):
        first, end = stage["layers"]
        tables = ", embedding and head" if stage["has_embedding_and_head"] else ""
        print(
            f"each of {stage['ranks']} rank(s) of stage {stage['stage']} (layers {first} to {end - 1}{tables}): "
            f"{stage['weights_bytes'] / 1e9:.2f} GB weights, {stage['kv_cache_bytes'] / 1e9:.2f} GB KV cache, "
            f"{stage['workspace_bytes'] / 1e9:.2f} GB workspace"
        )
    print(f"KV cache of all replicas: {kv_tokens} tokens")
    for step in steps:
        if step["exchange_s"]:
            print(
                f"a decode step of {step['requests']}: {1e3 * step['step_s']:.2f} ms, of which "
                f"{1e3 * step['exchange_s']:.2f} ms exchanges of {step['exchange_bytes'] / 1e3:.1f} kB over "
                f"{basis['interconnect']['name']}"
            )


def print_figures(found: dict[str, Any]) -> None:
    """The figures of one simulation."""
    print(
        f"{found['num_answered']} requests in {found['seconds']:.1f} s (simulated): {found['request_throughput']:.2f} "
        f"requests/s, {found['output_throughput']:.0f} output tokens/s"
    )
    if found["num_refused"]:
        print(f"rejected, can never run: {found['num_refused']}")
    print(f"SLO attainment: {found['good_share']:.1%}, goodput {found['goodput']:.2f} requests/s")
    print(f"{'':>6} {'mean':>10} {'p50':>10} {'p90':>10} {'p95':>10} {'p99':>10}  milliseconds")
    for name in ("ttft", "itl", "tpot", "e2e"):
        values = [found[f"{key}_{name}_ms"] for key in ("mean", "p50", "p90", "p95", "p99")]
        print(f"{name.upper():>6} " + " ".join("         -" if one is None else f"{one:10.1f}" for one in values))
    print(
        f"{found['num_steps']} steps of {found['mean_step_tokens']:.0f} tokens; "
        f"KV cache {found['mean_kv_cache_usage']:.0%} in use; "
        f"{found['num_preemptions']} preemptions; prefix hits {found['prefix_hit_rate']:.0%}"
    )


def print_trials(title: str, trials: Sequence[Trial]) -> None:
    """A table of simulations."""
    print(f"{title}\n{'good':>7} {'req/s':>8} {'p95 TTFT':>10} {'p95 ITL':>9} {'hits':>6}")
    for trial in trials:
        found = trial.figures
        ttft, itl = (found[name] or 0.0 for name in ("p95_ttft_ms", "p95_itl_ms"))
        print(
            f"{found['good_share']:7.1%} {found['request_throughput']:8.2f} {ttft:7.0f} ms {itl:6.1f} ms "
            f"{found['prefix_hit_rate']:6.0%}  {trial.name}"
        )


def picture(results: Results, title: str, trials: Sequence[Trial]) -> str:
    """An SVG document: times to first token over the run and by percentile, gaps by percentile, and what was tried."""
    done = ~np.isnan(results.ended_s)
    order = np.argsort(results.sent_s[done])
    sent, ttft = results.sent_s[done][order], 1e3 * results.ttft_s[order]
    step = -(-len(sent) // MAX_POINTS) or 1
    shares = [float(share) for share in range(101)]
    by_share = np.percentile(ttft, shares).tolist() if len(ttft) else []
    gaps = [(share, 1e3 * (results.gaps.percentile(max(share, 0.01)) or 0.0)) for share in shares]
    rows = [
        [
            Panel(
                title="Time to first token", x_label="sent at (seconds)", y_label="milliseconds",
                points=list(zip(sent[::step].tolist(), ttft[::step].tolist(), strict=True)), note=SIMULATED,
            ),
            Panel(
                title="Time to first token by percentile", x_label="percentile", y_label="milliseconds",
                line=list(zip(shares, by_share, strict=False)), x_range=(0.0, 100.0), note=SIMULATED,
            ),
        ],
        [
            Panel(
                title="Inter-token latency by percentile", x_label="percentile", y_label="milliseconds", line=gaps,
                x_range=(0.0, 100.0), note=SIMULATED,
            ),
        ],
    ]  # fmt: skip
    if trials:
        points = [(float(number), 100 * trial.figures["good_share"]) for number, trial in enumerate(trials, 1)]
        names = "; ".join(f"{number} = {trial.name}" for number, trial in enumerate(trials, 1))
        rows[1].append(
            Panel(
                title="SLO attainment", x_label="configuration", y_label="percent", points=points, line=points,
                note=names[:70],
            )
        )  # fmt: skip
    return figure(title, "simulated: the real scheduler under a virtual clock", rows)
