"""Plots as SVG: panels with axes, points, lines and marked levels. Writes text; no state."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from xml.sax.saxutils import escape

Point = tuple[float, float]

PANEL_WIDTH, PANEL_HEIGHT = 460, 250
LEFT, RIGHT, TOP, BOTTOM = 62, 16, 34, 44
NUM_TICKS = 5
STYLE = (
    "text{font:12px sans-serif;fill:#333}.title{font-weight:bold}.small{font-size:11px;fill:#666}"
    ".axis{stroke:#888;fill:none}.grid{stroke:#e4e4e4}.point{fill:#2a6fbb;fill-opacity:.45}"
    ".line{stroke:#2a6fbb;fill:none;stroke-width:1.6}.level{stroke:#c4472b;stroke-dasharray:5 4}"
    ".level-name{fill:#c4472b;font-size:11px;paint-order:stroke;stroke:#fff;stroke-width:3px}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One plot.

    Attributes:
        points: shown as dots.
        line: shown joined.
        levels: (name, y): dashed lines across.
        note: below the title.
    """

    title: str
    x_label: str
    y_label: str
    points: Sequence[Point] = ()
    line: Sequence[Point] = ()
    levels: Sequence[tuple[str, float]] = ()
    note: str = ""
    x_range: tuple[float, float] | None = field(default=None)


def ticks(low: float, high: float) -> list[float]:
    """Round numbers that span [low, high] in about five equal steps."""
    span = high - low if high > low else 1.0
    power = 10.0 ** math.floor(math.log10(span / NUM_TICKS))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power * NUM_TICKS >= span * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [number * step for number in range(first, max(last, first + 1) + 1)]


def figure(title: str, subtitle: str, rows: Sequence[Sequence[Panel]]) -> str:
    """A whole SVG document of panels in rows."""
    width = max(len(row) for row in rows) * PANEL_WIDTH
    height = len(rows) * PANEL_HEIGHT + 56
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">',
        f"<style>{STYLE}</style>",
        '<rect width="100%" height="100%" fill="#fff"/>',
        _text(16, 24, title, "title"),
        _text(16, 42, subtitle, "small"),
    ]
    for row_number, row in enumerate(rows):
        for column, panel in enumerate(row):
            parts.append(f'<g transform="translate({column * PANEL_WIDTH},{56 + row_number * PANEL_HEIGHT})">')
            parts += _panel(panel)
            parts.append("</g>")
    return "\n".join([*parts, "</svg>", ""])


def _panel(panel: Panel) -> list[str]:
    everything = [*panel.points, *panel.line]
    ys = [y for _, y in everything] + [level for _, level in panel.levels]
    x_ticks = ticks(*(panel.x_range or (0.0, max((x for x, _ in everything), default=1.0))))
    y_ticks = ticks(0.0, max(ys, default=1.0) or 1.0)
    right, bottom = PANEL_WIDTH - RIGHT, PANEL_HEIGHT - BOTTOM

    def at(x: float, y: float) -> tuple[str, str]:
        across = (x - x_ticks[0]) / (x_ticks[-1] - x_ticks[0])
        up = (y - y_ticks[0]) / (y_ticks[-1] - y_ticks[0])
        return f"{LEFT + across * (right - LEFT):.1f}", f"{bottom - up * (bottom - TOP):.1f}"

    parts = [_text(LEFT, 14, panel.title, "title"), _text(LEFT, 28, panel.note, "small")]
    for tick in y_ticks:
        _, height = at(x_ticks[0], tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{height}" y2="{height}"/>')
        parts.append(_text(LEFT - 6, float(height) + 4, f"{tick:g}", "small", "end"))
    for tick in x_ticks:
        across, _ = at(tick, y_ticks[0])
        parts.append(f'<line class="axis" x1="{across}" x2="{across}" y1="{bottom}" y2="{bottom + 4}"/>')
        parts.append(_text(float(across), bottom + 17, f"{tick:g}", "small", "middle"))
    parts.append(f'<path class="axis" d="M{LEFT} {TOP}V{bottom}H{right}"/>')
    parts.append(_text((LEFT + right) / 2, bottom + 34, panel.x_label, "small", "middle"))
    middle = (TOP + bottom) / 2
    parts.append(
        f'<text class="small" text-anchor="middle" transform="translate(14,{middle}) rotate(-90)">'
        f"{escape(panel.y_label)}</text>"
    )
    for x, y in panel.points:
        shown_x, shown_y = at(x, y)
        parts.append(f'<circle class="point" cx="{shown_x}" cy="{shown_y}" r="2"/>')
    if panel.line:
        joined = " ".join(",".join(at(x, y)) for x, y in panel.line)
        parts.append(f'<polyline class="line" points="{joined}"/>')
    for name, level in panel.levels:
        _, shown_y = at(x_ticks[0], level)
        parts.append(f'<line class="level" x1="{LEFT}" x2="{right}" y1="{shown_y}" y2="{shown_y}"/>')
        parts.append(_text(right - 2, float(shown_y) - 3, f"{name} {level:.4g}", "level-name", "end"))
    return parts


def _text(x: float, y: float, text: str, style: str, anchor: str = "start") -> str:
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
