"""What a replay's trace for ui.perfetto.dev has to hold."""

from __future__ import annotations

import json
from pathlib import Path

from quire.cli.main import main


def check_trace(recording: Path, file: Path) -> None:
    """The same as a trace: every step once, every request with spans that do not overlap, all counters."""
    assert main(["replay", str(recording), "--perfetto", str(file), "--json"]) == 0
    events = json.loads(file.read_text())["traceEvents"]
    steps = [one for one in events if one["ph"] == "X" and one["pid"] == 1]
    assert steps and len({one["args"]["step"] for one in steps}) == len(steps)
    assert {one["name"] for one in events if one["ph"] == "C"} == {"requests", "tokens of a step", "KV cache in use"}
    names = {one["tid"]: one["args"]["name"] for one in events if one["ph"] == "M" and one["name"] == "thread_name"}
    spans: dict[int, list[tuple[float, float]]] = {}
    for one in events:
        if one["ph"] == "X" and one["pid"] == 2:
            spans.setdefault(one["tid"], []).append((one["ts"], one["ts"] + one["dur"]))
    assert "r3" in names.values() and spans
    for of_one in spans.values():
        of_one.sort()
        assert all(end <= start + 0.01 for (_, end), (start, _) in zip(of_one, of_one[1:], strict=False))
    assert any(one["ph"] == "i" and one["name"].startswith("ended") for one in events)
    assert main(["replay", str(recording), "--perfetto", str(recording / "no" / "x.json")]) == 2
