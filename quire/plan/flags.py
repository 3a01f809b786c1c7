"""Flags of `quire plan`, and what they describe: the engine, its costs, and the load. No state."""

from __future__ import annotations

import argparse
import dataclasses
import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from quire.config.cache import CacheConfig
from quire.config.model_arch import ModelArch
from quire.config.scheduler import SchedulerConfig
from quire.config.speculative import MAX_TOKENS
from quire.errors import ConfigError, unknown_name
from quire.flight_recorder.reader import read_recording
from quire.flight_recorder.records import SUFFIX
from quire.models.hub import resolve_model_path
from quire.models.model_dir import read_model_dir
from quire.scheduler.setup import SchedulerSetup
from quire.simulator.calibration import CalibratedCosts, load_calibration
from quire.simulator.costs import CostModel
from quire.simulator.divided import DividedCosts
from quire.simulator.division import Division, Exchanges
from quire.simulator.drafts import Speculation
from quire.simulator.fleet import ROUTERS, FleetSetup
from quire.simulator.hardware import HARDWARE
from quire.simulator.interconnect import INTERCONNECTS, Interconnect, find_interconnect
from quire.simulator.observed import requests_of
from quire.simulator.results import Slo
from quire.simulator.roofline import DTYPE_BYTES, Assumptions, Roofline
from quire.simulator.workload import Lengths, SimRequest, SyntheticLoad, read_trace
from quire.utils.checks import check_float, check_int
from quire.utils.sizes import parse_size

MAX_COUNT = 10_000_000
BIG_GPU_BYTES = 70e9


@dataclass(frozen=True, slots=True)
class Plan:
    """What is asked: the fleet, the load, the objectives, and what the costs rest on."""

    fleet: FleetSetup
    requests: list[SimRequest]
    slo: Slo
    basis: dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's flags."""
    what = parser.add_argument_group("deployment")
    what.add_argument("--model", default=None, help="model directory (its config.json is read), or a hub name")
    what.add_argument("--hardware", default=None, help=f"analytic costs of a device: {', '.join(HARDWARE)}")
    what.add_argument("--calibration", type=Path, default=None, help="costs measured with --calibrate")
    what.add_argument("--calibrate", type=Path, default=None, metavar="FILE", help="measure this machine; write FILE")
    what.add_argument("--calibrate-seconds", type=float, default=90.0, help="seconds of load for --calibrate")
    what.add_argument("-tp", "--tensor-parallel-size", type=int, default=1, help="ranks that compute each layer")
    what.add_argument("-pp", "--pipeline-parallel-size", type=int, default=1, help="pipeline stages")
    what.add_argument(
        "--enable-expert-parallel",
        action="store_true",
        help="experts are whole, shared out among all ranks",
    )
    known = f"{', '.join(INTERCONNECTS)}, or FILE of bench_communicator.py --out"
    what.add_argument("--interconnect", default=None, help=f"between ranks; default: the device's own. {known}")
    what.add_argument("--stage-interconnect", default=None, help="between pipeline stages; default: as between ranks")
    what.add_argument(
        "--num-threads", type=int, default=None, help="compute threads of each rank: with --calibrate and --calibration"
    )
    what.add_argument("-dp", "--replicas", "--data-parallel-size", type=int, default=None, help="engines; default: 1")
    routers = f"{', '.join(ROUTERS)} (data-parallel: as one server with --data-parallel-size)"
    what.add_argument("--routing", default="round-robin", help=f"routing between replicas: {routers}")
    what.add_argument("--dtype", default="bfloat16", choices=tuple(DTYPE_BYTES), help="dtype of weights and KV cache")
    what.add_argument("--max-model-len", type=parse_size, default=None, help="maximum tokens of one request")
    what.add_argument("--max-num-seqs", type=int, default=None, help="maximum number of running requests")
    what.add_argument("--max-num-batched-tokens", type=parse_size, default=None, help="maximum tokens per step")
    what.add_argument("--max-decode-slowdown", type=float, default=None, help="as for the server")
    what.add_argument("--scheduling-policy", default=None, help="as for the server")
    what.add_argument("--num-gpu-blocks-override", type=int, default=None, help="KV-cache blocks of each replica")
    what.add_argument("--block-size", type=int, default=16, help="tokens per block, with --hardware")
    what.add_argument("--speculative-tokens", type=int, default=0, help="draft tokens per decoding request and step")
    what.add_argument(
        "--acceptance-rate", type=float, default=None,
        help="with --speculative-tokens: assumed probability that a draft token is accepted if those before it are",
    )  # fmt: skip
    what.add_argument(
        "--speculative-model", default=None,
        help="with --hardware and --speculative-tokens: draft model, whose weights and pages are counted",
    )  # fmt: skip
    for one in dataclasses.fields(Assumptions):
        flag = "--assume-" + one.name.replace("_", "-")
        what.add_argument(flag, type=float, default=one.default, help="assumption of --hardware (docs)")
    load = parser.add_argument_group("workload")
    load.add_argument("--trace", type=Path, default=None, help="JSON lines, or a flight recording")
    load.add_argument("--rate", type=float, default=1.0, help="requests per second")
    load.add_argument("--num-requests", type=int, default=2000, help="requests to simulate")
    load.add_argument("--burstiness", type=float, default=1.0, help="1 = Poisson, less = more bursty")
    load.add_argument("--prompt-tokens", type=int, default=512, help="mean prompt tokens (per turn)")
    load.add_argument("--output-tokens", type=int, default=128, help="mean output tokens")
    load.add_argument("--length-spread", type=float, default=0.5, help="spread of lengths: see --lognormal")
    load.add_argument("--lognormal", action="store_true", help="log-normal instead of uniform lengths")
    load.add_argument(
        "--turns", type=int, default=1, help="turns of a conversation; each prompt includes the earlier turns"
    )
    load.add_argument("--think-seconds", type=float, default=5.0, help="seconds between a reply and the next turn")
    load.add_argument("--shared-prefixes", type=int, default=1, help="number of system prompts")
    load.add_argument("--prefix-tokens", type=int, default=0, help="tokens of each system prompt")
    load.add_argument("--seed", type=int, default=0, help="random seed")
    goal = parser.add_argument_group("objectives")
    goal.add_argument("--slo-ttft", type=float, default=math.inf, help="TTFT objective in milliseconds")
    goal.add_argument(
        "--slo-itl", type=float, default=math.inf, help="TPOT objective in milliseconds (mean per request)"
    )
    goal.add_argument("--slo-e2e", type=float, default=math.inf, help="end-to-end latency objective in milliseconds")
    goal.add_argument("--target", type=float, default=0.95, help="target SLO attainment (fraction of requests)")
    goal.add_argument("--find-replicas", action="store_true", help="find the number of replicas that the load needs")
    goal.add_argument("--sweep", action="store_true", help="try changes of settings")
    goal.add_argument("--compare-routing", action="store_true", help="compare routing policies")
    goal.add_argument("--plot", type=Path, default=None, metavar="FILE.svg", help="write an SVG plot")
    goal.add_argument("--json", action="store_true", help="print the JSON line alone")
    goal.add_argument("--processes", type=int, default=1, help="processes for independent replicas")


def check(args: argparse.Namespace) -> None:
    """Refuse what is out of range.

    Raises:
        QuireError: names the flag.
    """
    for name in ("num_requests", "turns", "shared_prefixes", "prompt_tokens", "output_tokens", "processes"):
        check_int(name, getattr(args, name), 1, MAX_COUNT)
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "block_size"):
        check_int(name, getattr(args, name), 1, 4096)
    if args.num_threads is not None:
        check_int("num_threads", args.num_threads, 1, 4096)
    check_int("replicas", 1 if args.replicas is None else args.replicas, 1, 1024)
    check_int("prefix_tokens", args.prefix_tokens, 0, MAX_COUNT)
    check_int("seed", args.seed, 0)
    for name in ("rate", "burstiness", "calibrate_seconds"):
        check_float(name, getattr(args, name), 0.0, 1e6, above=0.0)
    check_float("length_spread", args.length_spread, 0.0, 5.0 if args.lognormal else 1.0)
    check_float("think_seconds", args.think_seconds, 0.0, 1e6)
    check_float("target", args.target, 0.0, 1.0, above=0.0)
    for name in ("slo_ttft", "slo_itl", "slo_e2e"):
        if not getattr(args, name) > 0:
            raise ConfigError(f"--{name.replace('_', '-')} must be above 0", hint="milliseconds", field=name)
    check_int("speculative_tokens", args.speculative_tokens, 0, MAX_TOKENS)
    if (args.acceptance_rate is None) != (args.speculative_tokens == 0):
        raise ConfigError(
            "--speculative-tokens and --acceptance-rate need each other", hint="give both, or neither",
            field="acceptance_rate",
        )  # fmt: skip
    if args.speculative_model is not None and (args.hardware is None or not args.speculative_tokens):
        raise ConfigError(
            "--speculative-model needs --hardware and --speculative-tokens", hint="add them, or leave it out",
            field="speculative_model",
        )  # fmt: skip
    if args.acceptance_rate is not None:
        check_float("acceptance_rate", args.acceptance_rate, 0.0, 1.0)
    if args.routing not in ROUTERS:
        raise unknown_name("routing", args.routing, ROUTERS)
    if args.calibrate is not None:
        _check_calibrate(args)
    if args.calibrate is None and (args.hardware is None) == (args.calibration is None):
        raise ConfigError(
            "no cost model given", hint="give either --hardware NAME or --calibration FILE",
            field="hardware",
        )  # fmt: skip


def _check_calibrate(args: argparse.Namespace) -> None:
    if args.model is None:
        raise ConfigError("--calibrate needs a model", hint="add --model DIR", field="model")
    if args.tensor_parallel_size * args.pipeline_parallel_size > 1:
        raise ConfigError(
            "--calibrate measures one process for each engine; several ranks are computed from that",
            hint="leave out -tp and -pp here, and give them with --calibration", field="tensor_parallel_size",
        )  # fmt: skip


def read_plan(args: argparse.Namespace) -> Plan:
    """What the flags describe.

    Raises:
        QuireError: a file is unusable, the model does not fit, or a setting is not allowed.
    """
    if args.calibration is not None:
        setup, make_costs, basis = _calibrated(args)
    else:
        setup, make_costs, basis = _analytic(args)
    requests = _requests(args, setup.max_model_len)
    # Prompts that share nothing cannot be found in the cache: the schedule is the same without it, and is made faster.
    shares = args.turns > 1 or args.prefix_tokens or args.trace is not None
    cache = dataclasses.replace(setup.cache, enable_prefix_caching=bool(shares) and setup.cache.enable_prefix_caching)
    speculation = None
    if args.speculative_tokens:
        speculation = Speculation(args.speculative_tokens, args.acceptance_rate)
        basis["speculation"] = {**dataclasses.asdict(speculation), "source": "assumed"}
    fleet = FleetSetup(
        scheduler=dataclasses.replace(setup, cache=cache), costs=make_costs, num_replicas=args.replicas or 1,
        routing=args.routing, num_processes=args.processes, speculation=speculation,
    )  # fmt: skip
    return Plan(fleet, requests, Slo(args.slo_ttft / 1e3, args.slo_itl / 1e3, args.slo_e2e / 1e3), basis)


def _scheduler_changes(args: argparse.Namespace) -> dict[str, Any]:
    names = ("max_num_seqs", "max_num_batched_tokens", "max_decode_slowdown", "scheduling_policy")
    return {name: getattr(args, name) for name in names if getattr(args, name) is not None}


def division_of(args: argparse.Namespace) -> Division:
    """How the flags divide the model."""
    return Division(
        num_ranks=args.tensor_parallel_size, num_stages=args.pipeline_parallel_size, num_replicas=args.replicas or 1,
        divides_experts=args.enable_expert_parallel,
    )  # fmt: skip


def _interconnects(args: argparse.Namespace) -> tuple[Interconnect | None, Interconnect | None]:
    names = (args.interconnect, args.stage_interconnect)
    between_ranks, between_stages = (None if name is None else find_interconnect(name) for name in names)
    return between_ranks, between_stages


def _calibrated(args: argparse.Namespace) -> tuple[SchedulerSetup, Any, dict[str, Any]]:
    calibration = load_calibration(args.calibration)
    setup = calibration.setup
    kv_cache = setup.kv_cache
    if args.num_gpu_blocks_override is not None:
        kv_cache = kv_cache.with_num_blocks(args.num_gpu_blocks_override)
    setup = dataclasses.replace(
        setup, kv_cache=kv_cache, max_model_len=args.max_model_len or setup.max_model_len,
        scheduler=dataclasses.replace(setup.scheduler, **_scheduler_changes(args)),
    )  # fmt: skip
    basis = {
        "kind": "measured", "model": calibration.model, "machine": calibration.machine,
        "num_steps": calibration.num_steps, "median_error": calibration.median_error,
        "num_threads": calibration.num_threads, "replicas_beside": calibration.num_replicas,
        "tensor_parallel": args.tensor_parallel_size, "pipeline_parallel": args.pipeline_parallel_size,
    }  # fmt: skip
    num_threads = args.num_threads or calibration.num_threads
    speedup = 1.0
    if calibration.num_threads:
        speedup = num_threads * args.tensor_parallel_size / calibration.num_threads
    division = division_of(args)
    if division.num_devices == 1 and speedup == 1.0 and not division.divides_experts:
        return setup, partial(CalibratedCosts, calibration, args.seed), basis
    between_ranks, between_stages = _interconnects(args)
    if args.model is None or between_ranks is None:
        raise ConfigError(
            "several ranks need the model's shape, and what connects them",
            hint="add --model DIR and --interconnect shared-memory (or another, or a measured FILE)",
            field="interconnect",
        )  # fmt: skip
    arch = read_model_dir(resolve_model_path(args.model, None, None)).arch()
    division.check(arch)
    links = between_ranks, between_stages or between_ranks
    exchanges = Exchanges(arch, division, DTYPE_BYTES[args.dtype], *links)
    basis["speedup"] = speedup
    for name, one in zip(("interconnect", "stage_interconnect"), links, strict=True):
        basis[name] = dataclasses.asdict(one)
    return setup, partial(DividedCosts, calibration, args.seed, speedup, exchanges), basis


def _analytic(args: argparse.Namespace) -> tuple[SchedulerSetup, Any, dict[str, Any]]:
    if args.model is None:
        raise ConfigError("--hardware needs a model", hint="add --model DIR", field="model")
    if args.hardware.lower() not in HARDWARE:
        raise unknown_name("hardware", args.hardware, [one.name for one in HARDWARE.values()])
    arch = read_model_dir(resolve_model_path(args.model, None, None)).arch()
    draft_arch = None
    if args.speculative_model is not None:
        draft_arch = read_model_dir(resolve_model_path(args.speculative_model, None, None)).arch()
    make_costs = partial(make_roofline, arch, args.hardware.lower(), args, draft_arch)
    roofline = make_costs()
    is_big = HARDWARE[args.hardware.lower()].capacity >= BIG_GPU_BYTES
    defaults = {
        "max_num_batched_tokens": 8192 if is_big else 2048, "max_num_seqs": 1024 if is_big else 256,
        "max_decode_slowdown": 2.0,
    }  # fmt: skip
    scheduler = SchedulerConfig(**{**defaults, **_scheduler_changes(args)})
    cache = CacheConfig(
        block_size=args.block_size, num_blocks=args.num_gpu_blocks_override,
        num_state_checkpoints=scheduler.max_num_seqs if arch.has_states else None,
    )  # fmt: skip
    max_model_len = args.max_model_len or arch.max_position_embeddings
    kv_cache = roofline.kv_cache(cache, scheduler, max_model_len, args.speculative_tokens)
    setup = SchedulerSetup(scheduler=scheduler, cache=cache, kv_cache=kv_cache, max_model_len=max_model_len)
    basis = {
        "kind": "analytic", "model": args.model, "draft_model": args.speculative_model, **roofline.facts(),
        "memory": roofline.memory(kv_cache),
    }  # fmt: skip
    return setup, make_costs, basis


def make_roofline(
    arch: ModelArch, hardware: str, args: argparse.Namespace, draft_arch: ModelArch | None = None
) -> Roofline:
    """The analytic costs of one replica."""
    names = [one.name for one in dataclasses.fields(Assumptions)]
    between_ranks, between_stages = _interconnects(args)
    return Roofline(
        arch, HARDWARE[hardware], division=division_of(args), dtype=args.dtype, between_ranks=between_ranks,
        between_stages=between_stages,
        assumptions=Assumptions(**{name: getattr(args, f"assume_{name}") for name in names}),
        draft_arch=draft_arch,
    )  # fmt: skip


def _requests(args: argparse.Namespace, max_model_len: int) -> list[SimRequest]:
    if args.trace is not None:
        is_recording = args.trace.is_dir() or args.trace.suffix == SUFFIX
        return requests_of(read_recording(args.trace)) if is_recording else read_trace(args.trace)
    return SyntheticLoad(
        num_requests=args.num_requests, rate=args.rate, burstiness=args.burstiness, turns=args.turns,
        prompts=Lengths(mean=args.prompt_tokens, spread=args.length_spread, is_lognormal=args.lognormal),
        outputs=Lengths(mean=args.output_tokens, spread=args.length_spread, is_lognormal=args.lognormal),
        think_s=args.think_seconds, num_prefixes=args.shared_prefixes, prefix_len=args.prefix_tokens,
        max_model_len=max_model_len, seed=args.seed,
    ).make()  # fmt: skip


__all__ = ["CostModel", "Plan", "add_arguments", "check", "read_plan"]
