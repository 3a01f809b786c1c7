"""What a deployment can serve, by simulation: the real scheduler and page manager under a virtual clock.

What steps cost is measured on this machine (`--calibrate FILE`, then `--calibration FILE`) or computed for a named
accelerator (`--hardware`). The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
from pathlib import Path
from typing import Any

from quire.errors import ConfigError
from quire.kv_cache.planning import describe_pools
from quire.plan.flags import Plan, add_arguments, check, read_plan
from quire.plan.report import (
    capacity_tokens,
    decode_steps,
    picture,
    print_division,
    print_figures,
    print_trials,
)
from quire.simulator.fleet import simulate
from quire.simulator.results import figures
from quire.simulator.search import Trial, compare_routing, replicas_needed, sweep

__all__ = ["add_arguments", "run"]


def run(args: argparse.Namespace) -> int:
    """Calibrate, or simulate and report."""
    check(args)
    if args.calibrate is not None:
        return _calibrate(args)
    plan = read_plan(args)
    if not args.json:
        return _answer(args, plan)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        code = _answer(args, plan)
    print(said.getvalue().splitlines()[-1])
    return code


def _answer(args: argparse.Namespace, plan: Plan) -> int:
    """Simulate and print; the last line is JSON."""
    answer: dict[str, Any] = {
        "simulated": True, "basis": plan.basis, "pages": plan.fleet.scheduler.kv_cache.num_blocks,
        "steps": decode_steps(plan.fleet, args.prompt_tokens + args.output_tokens // 2),
    }  # fmt: skip
    trials: list[Trial] = []
    if args.find_replicas:
        needed, trials = replicas_needed(plan.fleet, plan.requests, plan.slo, args.target)
        answer["replicas_needed"] = needed
        print_trials(f"replicas for which {args.target:.0%} of the requests meet the objectives", trials)
        print(f"replicas needed: {'more replicas do not help' if needed is None else needed}")
        plan = dataclasses.replace(plan, fleet=dataclasses.replace(plan.fleet, num_replicas=needed or 1))
    if args.compare_routing:
        found = compare_routing(plan.fleet, plan.requests, plan.slo)
        answer["routing"] = {trial.name: trial.figures for trial in found}
        print_trials(f"routing between {plan.fleet.num_replicas} replicas", found)
        trials = trials or found
    if args.sweep:
        found = sweep(plan.fleet, plan.requests, plan.slo)
        answer["sweep"] = {trial.name: trial.figures for trial in found}
        answer["best_setting"] = found[0].name
        print_trials("settings, best first", found)
        trials = trials or found
    results = simulate(plan.fleet, plan.requests)
    answer["replicas"] = plan.fleet.num_replicas
    answer["kv_tokens"] = capacity_tokens(plan.fleet)
    answer["figures"] = figures(results, plan.slo)
    _print_basis(plan)
    print_division(plan.basis, answer["steps"], answer["kv_tokens"])
    print_figures(answer["figures"])
    if args.plot is not None:
        _write(args.plot, picture(results, _title(plan), trials))
    print(json.dumps(answer))
    return 0


def _calibrate(args: argparse.Namespace) -> int:
    # Late: only this runs an engine.
    from quire.config.build import build_config
    from quire.plan.calibrate import calibrate
    from quire.simulator.calibration import save_calibration, verdict

    names = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "max_decode_slowdown", "scheduling_policy")
    given = {name: getattr(args, name) for name in (*names, "num_gpu_blocks_override", "num_threads")}
    config = build_config(model=args.model, data_parallel_size=args.replicas or 1, **given)
    calibration = calibrate(config, args.calibrate_seconds, print)
    save_calibration(calibration, args.calibrate)
    summary = {
        "calibration": str(args.calibrate), "machine": calibration.machine, "num_steps": calibration.num_steps,
        "num_threads": calibration.num_threads, "num_replicas": calibration.num_replicas,
        "median_error": calibration.median_error, "verdict": verdict(calibration.median_error),
    }  # fmt: skip
    print(f"{calibration.num_steps} steps fitted, median error {calibration.median_error:.1%}: {args.calibrate}")
    print(summary["verdict"])
    print(json.dumps(summary))
    return 0


def _title(plan: Plan) -> str:
    basis = plan.basis
    where = basis["machine"] if basis["kind"] == "measured" else basis["hardware"]["name"]
    return f"{basis['model']} on {plan.fleet.num_replicas} x {where}: {len(plan.requests)} requests"


def _print_basis(plan: Plan) -> None:
    basis, setup = plan.basis, plan.fleet.scheduler
    if basis["kind"] == "measured":
        print(f"costs measured on {basis['machine']} with {basis['model']} ({basis['num_steps']} steps)")
        if plan.fleet.num_replicas > 1 and basis["replicas_beside"] != plan.fleet.num_replicas:
            print(
                f"measured with {basis['replicas_beside']} engine(s) at once: what {plan.fleet.num_replicas} on one "
                "machine take from each other is not in it (quire plan --calibrate FILE --replicas N measures it)"
            )
    else:
        devices = basis["tensor_parallel"] * basis["pipeline_parallel"]
        print(
            f"simulated: costs computed for {devices} x {basis['hardware']['name']} each, not measured; "
            "assumptions: see JSON"
        )
    scheduler, speculation = setup.scheduler, plan.fleet.speculation
    if speculation is not None:
        print(
            f"{speculation.num_tokens} drafts per request and step, each accepted with a probability of "
            f"{speculation.acceptance_rate:g} if those before it are: assumed; what proposing costs is left out"
        )
    print(
        f"{plan.fleet.num_replicas} replica(s), {plan.fleet.routing}; max_num_seqs={scheduler.max_num_seqs}, "
        f"max_num_batched_tokens={scheduler.max_num_batched_tokens}, "
        f"max_decode_slowdown={scheduler.max_decode_slowdown}, "
        f"{describe_pools(setup.kv_cache)} each"
    )


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}", field="plot") from None
