"""A replayed recording as a trace that ui.perfetto.dev and chrome://tracing open.

Written by `quire replay --perfetto`. One track has the steps, one each request: why it waited, prefill, decode.
Counters show the load. The form is Chrome's Trace Event Format (JSON); times are microseconds from the start.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from quire.core.engine_messages import EngineCoreOutputs
from quire.core.scheduler_output import SchedulerOutput
from quire.errors import ConfigError
from quire.flight_recorder.records import Update
from quire.flight_recorder.waits import RUNNING, Timeline, WaitWatch

ENGINE, REQUESTS = 1, 2
"""Process ids of the trace: of the steps, and of the requests."""
Event = dict[str, Any]


class TraceEvents:
    """Events of one replay; `note_step` is its `on_step`."""

    def __init__(self) -> None:
        self._steps: list[tuple[float, float, Event, Event]] = []

    def note_step(self, scheduled: SchedulerOutput, update: Update, outputs: EngineCoreOutputs) -> None:
        """A step was taken in."""
        num_prompt = int(scheduled.num_scheduled_tokens[scheduled.is_prefill].sum())
        about = {
            "step": scheduled.step, "requests": len(scheduled.rows), "tokens": scheduled.total_num_scheduled_tokens,
            "prompt_tokens": num_prompt, "new_tokens": len(outputs.new_token_ids),
        }  # fmt: skip
        stats = outputs.stats
        load = {
            "running": stats.num_running, "waiting": stats.num_waiting, "swapped": stats.num_swapped,
            "kv_cache": round(stats.kv_cache_usage, 4), "tokens": scheduled.total_num_scheduled_tokens,
        }  # fmt: skip
        self._steps.append((outputs.timestamp, update.seconds or 0.0, about, load))

    def events(self, watch: WaitWatch) -> Iterator[Event]:
        """All events, the names of tracks first."""
        origin = watch.start_s or 0.0
        yield _name("process_name", ENGINE, 0, "engine")
        yield _name("thread_name", ENGINE, 1, "steps")
        yield _name("process_name", REQUESTS, 0, "requests")
        for end_s, seconds, about, load in self._steps:
            kind = "prefill and decode" if about["prompt_tokens"] else "decode"
            yield _span(ENGINE, 1, kind, end_s - seconds - origin, seconds, about)
            at = _microseconds(end_s - origin)
            yield {"ph": "C", "pid": ENGINE, "name": "requests", "ts": at,
                   "args": {name: load[name] for name in ("running", "waiting", "swapped")}}  # fmt: skip
            yield {"ph": "C", "pid": ENGINE, "name": "tokens of a step", "ts": at, "args": {"tokens": load["tokens"]}}
            yield {"ph": "C", "pid": ENGINE, "name": "KV cache in use", "ts": at, "args": {"share": load["kv_cache"]}}
        for number, one in enumerate(watch.timelines.values(), 1):
            yield from _request(number, one, origin)


def write_trace(path: Path, trace: TraceEvents, watch: WaitWatch) -> int:
    """Write the trace; returns the number of its events.

    Raises:
        ConfigError: the file cannot be written.
    """
    count = 0
    try:
        with path.open("w", encoding="utf-8") as file:
            file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
            for count, event in enumerate(trace.events(watch), 1):
                file.write(("" if count == 1 else ",\n") + json.dumps(event, separators=(",", ":")))
            file.write("\n]}\n")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}", field="perfetto") from None
    return count


def _request(track: int, one: Timeline, origin: float) -> Iterator[Event]:
    yield _name("thread_name", REQUESTS, track, one.request_id)
    yield {
        "ph": "M", "pid": REQUESTS, "tid": track, "name": "thread_sort_index", "args": {"sort_index": track}
    }  # fmt: skip
    for span in one.spans:
        about: Event = {"steps": span.num_steps}
        if span.behind:
            about["behind"] = span.behind
        if span.num_missing:
            about["missing_blocks"] = span.num_missing
        name = span.reason if span.reason in RUNNING else f"waits: {span.reason}"
        yield _span(REQUESTS, track, name, span.start_s - origin, span.seconds, about)
    moments = [(moment, f"preempted: {cause}") for moment, cause in one.preempted]
    if one.first_token_s is not None:
        moments.append((one.first_token_s, "first token"))
    if one.ended_s is not None:
        moments.append((one.ended_s, f"ended: {one.finish_reason}"))
    for moment, words in moments:
        if math.isfinite(moment):
            at = _microseconds(moment - origin)
            yield {"ph": "i", "s": "t", "pid": REQUESTS, "tid": track, "name": words, "ts": at}


def _span(pid: int, tid: int, name: str, start_s: float, seconds: float, about: Event) -> Event:
    return {
        "ph": "X", "pid": pid, "tid": tid, "name": name, "ts": _microseconds(start_s), "dur": _microseconds(seconds),
        "args": about,
    }  # fmt: skip


def _name(kind: str, pid: int, tid: int, name: str) -> Event:
    return {"ph": "M", "pid": pid, "tid": tid, "name": kind, "args": {"name": name}}


def _microseconds(seconds: float) -> float:
    return round(1e6 * seconds, 3)
