"""The picture of a run: TTFT and ITL over time, and how each is distributed. No state."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire.bench.records import RequestRecord
from quire.bench.summary import TITLES, answered, itls_ms, ttft_ms
from quire.bench.svg import Panel, Point, figure

MAX_POINTS = 4000
LEVELS = (50, 99)


def plot(records: Sequence[RequestRecord], start_s: float, title: str) -> str:
    """An SVG document."""
    done = answered(records)
    ttfts = [(record.started_s - start_s, ttft_ms(record)) for record in done]
    itls = [
        (time_s - start_s, itl)
        for record in done
        for time_s, itl in zip(record.event_times[1:], itls_ms(record), strict=True)
    ]
    subtitle = f"{len(done)} requests answered, {len(records) - len(done)} failed"
    return figure(title, subtitle, [_row("ttft", ttfts, "sent at"), _row("itl", sorted(itls), "arrived at")])


def _row(metric: str, points: list[Point], moment: str) -> list[Panel]:
    shown, note = _thinned(points)
    values = [value for _, value in points]
    levels = [(f"p{level}", float(np.percentile(values, level))) for level in LEVELS] if values else []
    shares = np.linspace(0, 100, 101)
    line = list(zip(shares.tolist(), np.percentile(values, shares).tolist(), strict=True)) if values else []
    return [
        Panel(
            title=f"{TITLES[metric]} ({metric.upper()}) over the run",
            x_label=f"{moment} (seconds from the start)",
            y_label="milliseconds", points=shown, levels=levels, note=note,
        ),
        Panel(
            title=f"{metric.upper()} by percentile", x_label="percentile", y_label="milliseconds", line=line,
            note=f"of all {len(points)}", x_range=(0.0, 100.0),
        ),
    ]  # fmt: skip


def _thinned(points: list[Point]) -> tuple[list[Point], str]:
    """At most `MAX_POINTS` of them, and what to say about it. The largest is always among them."""
    if len(points) <= MAX_POINTS:
        return points, f"{len(points)} points; dashed: percentiles"
    step = -(-len(points) // MAX_POINTS)
    groups = [points[first : first + step] for first in range(0, len(points), step)]
    shown = [group[0] for group in groups]
    largest = max(points, key=lambda point: point[1])
    if largest not in shown:
        shown[points.index(largest) // step] = largest
    return shown, f"{len(shown)} of {len(points)} points; dashed: percentiles of all"
