"""Run a flight recording again, without a model: the same schedule step by step, and why requests waited.

Reads a file or a directory that `--flight-recorder` wrote. Exits with 1 when the schedule differs; with --json the last
line is one JSON object.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from pathlib import Path
from typing import Any

from quire.errors import ValidationError, unknown_name
from quire.flight_recorder.perfetto import TraceEvents, write_trace
from quire.flight_recorder.reader import Recording, read_recording
from quire.flight_recorder.replay import Replay, ReplayResult
from quire.flight_recorder.waits import RUNNING, Timeline, WaitWatch
from quire.utils.checks import check_int

EXIT_DIFFERS = 1
MAX_TOP = 100_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's flags."""
    parser.add_argument("recording", type=Path, help="a recording file, or a directory (its newest run is read)")
    parser.add_argument(
        "--run-id", default=None, help="run to read from a directory: the common prefix of its file names"
    )
    parser.add_argument("--request", default=None, metavar="ID", help="show where the time of this request went")
    parser.add_argument("--top", type=int, default=5, help="number of longest-waiting requests to list")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument(
        "--perfetto", type=Path, default=None, metavar="FILE.json",
        help="write steps, requests and load as a trace for ui.perfetto.dev",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Replay and report."""
    check_int("top", args.top, 0, MAX_TOP)
    recording = read_recording(args.recording, args.run_id)
    trace = None if args.perfetto is None else TraceEvents()
    result = Replay(recording, None if trace is None else trace.note_step).run()
    if trace is not None:
        num_events = write_trace(args.perfetto, trace, result.watch)
        print(f"{args.perfetto}: {num_events} events; open it at https://ui.perfetto.dev", file=sys.stderr)
    watch = result.watch
    asked = None if args.request is None else _find(watch, args.request)
    if args.json:
        print(json.dumps(_report(recording, result, args.top, asked)))
    else:
        _print(recording, result, args.top, asked)
    return EXIT_DIFFERS if result.first_difference is not None else 0


def _find(watch: WaitWatch, request_id: str) -> list[Timeline]:
    """All parts of a request (the answers of `n` > 1 are named after it)."""
    timelines = list(watch.timelines.values())
    found = [one for one in timelines if one.request_id == request_id]
    found = found or [one for one in timelines if request_id in one.request_id]
    if not found:
        raise unknown_name("request", request_id, {one.request_id for one in timelines}, ValidationError)
    return found


def _longest(watch: WaitWatch, count: int) -> list[Timeline]:
    return sorted(watch.timelines.values(), key=lambda one: -one.waited_s)[:count]


def _summary(watch: WaitWatch) -> dict[str, Any]:
    seconds = watch.now_s - (watch.start_s or 0.0)
    mean = (lambda total: total / seconds) if seconds > 0 else (lambda total: 0.0)
    ended = [one for one in watch.timelines.values() if one.ended_s is not None]
    return {
        "seconds": seconds,
        "requests": len(watch.timelines),
        "ended": len(ended),
        "steps": watch.num_steps,
        "scheduled_tokens": watch.num_scheduled_tokens,
        "sampled_tokens": watch.num_sampled_tokens,
        "draft_tokens": watch.num_draft_tokens,
        "accepted_draft_tokens": watch.num_accepted_tokens,
        "mean_running": mean(watch.running_s),
        "max_running": watch.max_running,
        "mean_waiting": mean(watch.waiting_s),
        "max_waiting": watch.max_waiting,
        "mean_kv_cache_usage": mean(watch.usage_s),
        "preemptions": watch.num_preemptions,
        "prefix_hit_rate": watch.num_prefix_hits / watch.num_prefix_queries if watch.num_prefix_queries else 0.0,
        "waited_s_by_reason": watch.seconds_by_reason(),
    }


def _timeline(one: Timeline) -> dict[str, Any]:
    fields = dataclasses.asdict(one)
    fields["waited_s"] = one.waited_s
    return fields


def _report(recording: Recording, result: ReplayResult, top: int, asked: list[Timeline] | None) -> dict[str, Any]:
    difference = result.first_difference
    return {
        "run": recording.head.run,
        "files": [path.name for path in recording.files],
        "torn": {path.name: problem for path, problem in recording.torn.items()},
        "identical": difference is None,
        "first_difference": None if difference is None else {"step": difference[0], "what": difference[1]},
        "replayed_steps": result.num_steps,
        "replay_seconds": result.seconds,
        "summary": _summary(result.watch),
        "longest_waits": [_timeline(one) for one in _longest(result.watch, top)],
        "request": None if asked is None else [_timeline(one) for one in asked],
    }


def _print(recording: Recording, result: ReplayResult, top: int, asked: list[Timeline] | None) -> None:
    watch = result.watch
    for path, problem in recording.torn.items():
        print(f"{path.name}: read up to the damaged part: {problem}")
    if result.first_difference is None:
        print(f"identical schedule: {result.num_steps} steps, replayed in {result.seconds:.2f} s")
    else:
        step, what = result.first_difference
        print(f"the schedule differs at step {step}: {what}")
    if asked is not None:
        for one in asked:
            _print_request(one, watch)
        return
    one_summary = _summary(watch)
    print(
        f"{one_summary['seconds']:.1f} s, {one_summary['requests']} requests ({one_summary['ended']} ended), "
        f"{one_summary['sampled_tokens']} tokens\n"
        f"running: {one_summary['mean_running']:.1f} on average, {one_summary['max_running']} at most; "
        f"waiting: {one_summary['mean_waiting']:.1f}, {one_summary['max_waiting']}\n"
        f"KV cache in use: {one_summary['mean_kv_cache_usage']:.0%}; preemptions: {one_summary['preemptions']}; "
        f"prefix cache hits: {one_summary['prefix_hit_rate']:.0%} of prompt tokens"
    )
    if one_summary["draft_tokens"]:
        num_drafted, num_accepted = one_summary["draft_tokens"], one_summary["accepted_draft_tokens"]
        print(f"draft tokens: {num_drafted} verified, {num_accepted} accepted ({num_accepted / num_drafted:.0%})")
    if one_summary["waited_s_by_reason"]:
        print("waiting, summed over requests:")
        for reason, seconds in one_summary["waited_s_by_reason"].items():
            print(f"  {seconds:9.3f} s  {reason}")
    longest = [one for one in _longest(watch, top) if one.waited_s > 0]
    if longest:
        print("longest waits (details: --request ID):")
        for one in longest:
            print(f"  {one.waited_s:9.3f} s  {one.request_id}")


def _print_request(one: Timeline, watch: WaitWatch) -> None:
    origin = watch.start_s or 0.0
    arrived = "before the recording" if one.arrived_s is None else f"at {one.arrived_s - origin:.3f} s"
    ended = "not in the recording" if one.ended_s is None else f"at {one.ended_s - origin:.3f} s ({one.finish_reason})"
    cached = "" if not one.num_cached_tokens else f", {one.num_cached_tokens} of them cached"
    print(f"request {one.request_id}: came {arrived}, ended {ended}")
    print(f"  {one.num_prompt_tokens} prompt tokens{cached}, {one.num_output_tokens} output tokens", end="")
    if one.arrived_s is not None and one.first_token_s is not None:
        print(f", first token after {one.first_token_s - one.arrived_s:.3f} s", end="")
    print(f"; waited {one.waited_s:.3f} s")
    for span in one.spans:
        detail = f", behind {span.behind}" if span.behind else ""
        detail += f", {span.num_missing} lacking" if span.num_missing else ""
        kind = "runs " if span.reason in RUNNING else "waits"
        steps = f"{span.num_steps} step{'s' if span.num_steps != 1 else ''}"
        print(f"  {span.start_s - origin:9.3f} s  {kind} {span.seconds:8.3f} s, {steps}: {span.reason}{detail}")
    for moment, cause in one.preempted:
        if math.isfinite(moment):
            print(f"  {moment - origin:9.3f} s  preempted: {cause}")
