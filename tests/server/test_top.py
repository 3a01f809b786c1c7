"""`quire top` shows a server's state in the terminal."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from quire.cli.main import main
from quire.cli.top import StateSource, TopView, spark
from tests.server.engines import ScriptedEngine
from tests.server.servers import RunningServer
from tests.server.test_debug import engine_state


@pytest.fixture(scope="module")
def busy():
    with RunningServer(ScriptedEngine(states=[engine_state()])) as server:
        yield server


def test_one_look_shows_rows_queue_and_cache(busy, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["top", "--url", busy.url]) == 0
    shown = capsys.readouterr().out
    assert "running 1/1, waiting 2" in shown and "max_num_seqs reached" in shown
    assert "r0" in shown and "r1" in shown and "decode" in shown and "63 blocks" in shown


def test_json_is_the_state_as_the_server_has_it(busy, capsys):
    assert main(["top", "--url", f"{busy.url}/v1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["models"][0]["names"] == ["leaf"]


def test_later_looks_ask_for_new_points_alone_and_the_view_keeps_them(busy):
    source, view = StateSource(busy.url, None), TopView(max_rows=0)
    for _ in range(2):
        busy.wait_until(lambda: source.read()["models"][0]["series"]["time"])
    state = source.read()
    state["models"][0]["series"].update(time=[1.0, 2.0], generated_tps=[10.0, 20.0])
    state["models"].append({**state["models"][0], "names": ["other"], "problem": "it restarts", "engines": []})
    text = io.StringIO()
    Console(width=200, file=text).print(view.draw(state))
    shown = text.getvalue()
    assert "20 tok/s" in shown and "it restarts" in shown and "1 more" in shown and "2 more" in shown


def test_a_line_of_bars_has_gaps_where_nothing_happened():
    assert spark([0.0, None, 4.0, 8.0]) == "  ▄█" and spark([]) == ""


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--url", "http://127.0.0.1:1"], "no server responds"),
        (["--url", "nonsense"], "is not a valid address"),
        (["--interval", "0.1"], "interval"),
    ],
)
def test_wrong_addresses_are_named(argv, words, capsys):
    assert main(["top", *argv]) == 2
    assert words in capsys.readouterr().err


def test_a_key_is_shown_and_its_lack_named(capsys, monkeypatch):
    with RunningServer(ScriptedEngine(), api_key="top-key-1234") as server:
        assert main(["top", "--url", server.url]) == 2
        assert "API key" in capsys.readouterr().err
        monkeypatch.setenv("QUIRE_API_KEY", "top-key-1234")
        assert main(["top", "--url", server.url]) == 0
