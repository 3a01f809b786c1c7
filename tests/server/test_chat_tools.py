"""`quire chat --tools demo`, with a server and with the engine in its own process."""

from __future__ import annotations

import io
from collections.abc import Iterator
from datetime import datetime
from functools import partial

import pytest

from quire.cli.chat import TOOLS
from quire.cli.demo_tools import demo_tools
from quire.cli.main import main
from tests.server.engines import WritingEngine
from tests.server.servers import RunningServer

SUM = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "(27 + 58) * 2"}}\n</tool_call>'
WRONG = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "27 plus 58"}}\n</tool_call>'


def write(prompt: str, seed: int) -> str:
    """First a call that fails, then one that does not, then the answer."""
    if '{"result": 170}' in prompt:
        return "It is 170."
    return f"Again.\n{SUM}" if '{"error": ' in prompt else WRONG


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with RunningServer(WritingEngine(write=write)) as running:
        yield running


def test_a_server_s_model_uses_the_tools_and_errors_go_back_to_it(server, capsys):
    assert main(["chat", "--url", server.url, "--tools", "demo", "-q", "(27 + 58) * 2?"]) == 0
    shown = capsys.readouterr()
    assert shown.out == (
        '-> calculate {"expression": "27 plus 58"}\n'
        '<- {"error": "\'plus 58\' is not a number, operator or parenthesis"}\n'
        "Again.\n"
        '-> calculate {"expression": "(27 + 58) * 2"}\n'
        '<- {"result": 170}\n'
        "It is 170.\n"
    )
    assert "tokens" in shown.err


def test_without_the_flag_no_tools_are_offered(server, capsys):
    assert main(["chat", "--url", server.url, "-q", "(27 + 58) * 2?"]) == 0
    assert capsys.readouterr().out == f"{WRONG}\n"


def test_a_model_of_the_server_may_be_named_and_no_other(server, capsys):
    name = server.engine.config.model.served_model_name
    for named in ([name], ["--model-name", name], ["--model", name]):
        assert main(["chat", *named, "--url", server.url, "-q", "(27 + 58) * 2?"]) == 0
    capsys.readouterr()
    for named in (["gpt-4"], ["--model-name", "gpt-4"]):
        assert main(["chat", *named, "--url", server.url, "-q", "Hello"]) == 2
        assert f"does not have the model 'gpt-4'\nhint: it has {name}" in capsys.readouterr().err


def test_a_server_that_reads_no_calls_says_what_to_do(capsys):
    with RunningServer(WritingEngine(), tool_call_parser="none") as server:
        assert main(["chat", "--url", server.url, "--tools", "demo", "-q", "Hello"]) == 1
    assert "--tool-call-parser" in capsys.readouterr().err


def test_leaf_finishes_tasks_with_the_tools_in_one_process(capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("What is 123 + 456?\nWhat time is it in Paris?\nThank you!\n"))
    at_half_past_nine = partial(demo_tools, lambda zone: datetime(2026, 3, 1, 9, 30, tzinfo=zone))
    monkeypatch.setitem(TOOLS, "demo", at_half_past_nine)  # leaf rounds some times of day
    flags = ["--temperature", "0", "--num-gpu-blocks-override", "256", "--no-stats"]
    assert main(["chat", "--tools", "demo", *flags]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[:3] == ['-> add {"a": 123, "b": 456}', '<- {"sum": 579}', "The sum of 123 and 456 is 579."]
    assert shown[3] == '-> get_time {"city": "Paris"}'
    assert shown[4] == '<- {"city": "Paris", "time": "09:30"}'
    assert "09:30" in shown[5] and len(shown) == 7, shown
