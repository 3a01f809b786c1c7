"""What a running server does, live in the terminal: rows, queue with reasons, cache, latencies.

Reads /debug/state of a server; q or Ctrl-C ends it. Without a terminal it prints one look and ends, as with --once.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import Any
from urllib.parse import urlencode

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from quire import envs
from quire.errors import QuireClientError
from quire.utils.checks import check_float
from quire.utils.http_get import get
from quire.utils.memory import format_bytes

MIN_INTERVAL_S = 0.5
BARS = " ▁▂▃▄▅▆▇█"
MAX_POINTS = 600


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's flags."""
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="address of the server")
    parser.add_argument(
        "--api-key",
        default=None,
        help="an operator's key, where the server has keys; default: the first of QUIRE_API_KEY",
    )
    parser.add_argument("--interval", type=float, default=1.0, help="seconds between two looks")
    parser.add_argument("--once", action="store_true", help="print one look and end")
    parser.add_argument("--json", action="store_true", help="print one look as JSON and end")
    parser.add_argument("--rows", type=int, default=15, help="rows and waiting requests to show")


def run(args: argparse.Namespace) -> int:
    """Look until the user ends it."""
    check_float("interval", args.interval, MIN_INTERVAL_S, 3600.0)
    keys = envs.api_keys()
    source = StateSource(args.url, args.api_key or (keys[0] if keys else None))
    state = source.read()
    if args.json:
        print(json.dumps(state))
        return 0
    console, view = Console(), TopView(args.rows)
    if args.once or not console.is_terminal:
        console.print(view.draw(state))
        return 0
    with Live(view.draw(state), console=console, screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(args.interval)
            live.update(view.draw(source.read()), refresh=True)


class StateSource:
    """Asks a server for its state, each time for what is new in its series.

    Raises:
        ConfigError, QuireClientError: as `get`.
    """

    def __init__(self, url: str, api_key: str | None) -> None:
        self._url, self._api_key = url, api_key
        self._since = 0.0

    def read(self) -> dict[str, Any]:
        """The state of now."""
        content = get(self._url, f"/debug/state?{urlencode({'since': self._since})}", self._api_key)
        try:
            state: dict[str, Any] = json.loads(content)
            times = [model["series"]["time"] for model in state["models"]]
        except (ValueError, KeyError, TypeError):
            raise QuireClientError(f"{self._url} is not a Quire server, or one of another version") from None
        self._since = max([self._since, *(one[-1] for one in times if one)])
        return state


class TopView:
    """Draws states; owns the points of the series since the first.

    Args:
        max_rows: of each table.
    """

    def __init__(self, max_rows: int) -> None:
        self._max_rows = max_rows
        self._series: dict[str, dict[str, list[Any]]] = {}

    def draw(self, state: dict[str, Any]) -> RenderableType:
        """Everything, as far as it fits."""
        parts: list[RenderableType] = [
            Text(f"Quire {state['version']}, up {_seconds(state['uptime_s'])}", style="bold")
        ]
        for model in state["models"]:
            series = self._series.setdefault(model["names"][0], {})
            for name, column in model["series"].items():
                series[name] = [*series.get(name, ()), *column][-MAX_POINTS:]
            parts.append(self._figures(model, series))
            if model["problem"]:
                parts.append(Text(model["problem"], style="red"))
            for engine in model["engines"]:
                parts += [self._engine(engine), self._batch(engine), self._queue(engine)]
        if not state["models"]:
            parts.append(Text("no model is in memory", style="yellow"))
        return Group(*parts)

    def _figures(self, model: dict[str, Any], series: dict[str, list[Any]]) -> Table:
        def last(name: str) -> Any:
            column = series.get(name) or [None]
            return column[-1]

        table = Table.grid(padding=(0, 2))
        table.add_row(
            Text(model["names"][0], style="bold cyan"),
            f"{_number(last('generated_tps'))} tok/s {spark(series.get('generated_tps', []))}",
            f"computed {_number(last('computed_tps'))} tok/s",
            f"TTFT {_seconds(last('ttft_p50'))} / {_seconds(last('ttft_p95'))}",
            f"ITL {_seconds(last('itl_mean'))} / {_seconds(last('itl_p95'))}",
            f"hits {_share(last('prefix_hit_rate'))}",
            f"drafts {_share(last('acceptance_rate'))}" if model["speculation"] else "",
            "" if last("mfu") is None else f"MFU {_share(last('mfu'))} MBU {_share(last('mbu'))}",
            Text(f"restarts {model['restarts']}", style="red" if model["restarts"] else ""),
        )
        return table

    def _engine(self, engine: dict[str, Any]) -> Text:
        blocks = engine["blocks"][0]
        width = 30
        used = round(width * blocks["used"] / max(1, blocks["num_blocks"]))
        cached = min(width - used, round(width * blocks["cached"] / max(1, blocks["num_blocks"])))
        text = Text(f"engine {engine['index']}: running {engine['num_running']}/{engine['max_num_seqs']}, waiting ")
        text.append(str(engine["num_waiting"]), style="yellow" if engine["num_waiting"] else "")
        text.append(f", swapped {engine['num_swapped']}; KV ")
        text.append("█" * used, style="green").append("▒" * cached, style="blue").append("·" * (width - used - cached))
        text.append(f" {blocks['used']} used, {blocks['cached']} cached of {blocks['num_blocks']} blocks; ")
        text.append(format_bytes(engine["process"]["rss_bytes"]))
        return text

    def _batch(self, engine: dict[str, Any]) -> Table:
        table = _table("row", "request", "tenant", "phase", "prompt", "output", "cached", "blocks", "age")
        for one in engine["batch"][: self._max_rows]:
            done = f"{min(one['computed_tokens'], one['prompt_tokens'])}/{one['prompt_tokens']}"
            table.add_row(
                str(one["row"]), one["id"], one["tenant"], one["phase"], done, str(one["output_tokens"]),
                str(one["cached_tokens"]), str(one["num_blocks"]), _seconds(one["age_s"]),
            )  # fmt: skip
        _add_rest(table, engine["num_running"] - self._max_rows)
        return table

    def _queue(self, engine: dict[str, Any]) -> RenderableType:
        if not engine["queue"]:
            return Text("nothing waits", style="dim")
        table = _table("waiting", "tenant", "state", "prompt", "waited", "in about", "why", "behind")
        for one in engine["queue"][: self._max_rows]:
            table.add_row(
                one["id"], one["tenant"], one["phase"], str(one["prompt_tokens"]), _seconds(one["waited_s"]),
                _seconds(one["predicted_wait_s"]), one["why"], one["behind"],
            )  # fmt: skip
        _add_rest(table, engine["num_waiting"] + engine["num_swapped"] - self._max_rows)
        return table


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in columns:
        is_number = name in ("row", "prompt", "output", "cached", "blocks", "age", "waited", "in about")
        table.add_column(name, justify="right" if is_number else "left", no_wrap=True)
    return table


def _add_rest(table: Table, count: int) -> None:
    if count > 0:
        table.add_row(*([""] * (1 if table.columns[0].header == "row" else 0)), Text(f"{count} more", style="dim"))


def spark(values: list[float | None], width: int = 24) -> str:
    """The newest values as a line of bars; a value that is missing is a gap."""
    newest = values[-width:]
    top = max((one for one in newest if one is not None), default=0.0) or 1.0
    return "".join(" " if one is None else BARS[round(one / top * (len(BARS) - 1))] for one in newest)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    if value < 1:
        return f"{1e3 * value:.3g} ms"
    return f"{value:.3g} s" if value < 120 else f"{value / 60:.0f} min"
