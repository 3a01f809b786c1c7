"""`quire generate`, `quire chat` and the demo over a pretended engine core."""

from __future__ import annotations

import io
import json
import signal

import pytest

from quire.entrypoints.args import QuireParser
from quire.entrypoints.cli import chat, demo, generate
from quire.entrypoints.interrupts import DeferredInterrupt
from quire.errors import ValidationError
from tests.unit.engine.fakes import FakeClient, make_engine


@pytest.fixture
def client(monkeypatch):
    client = FakeClient()
    for module in (chat, demo, generate):
        monkeypatch.setattr(module, "start_engine", lambda args, **defaults: make_engine(client))
    return client


def run(module, *argv, stdin=None, monkeypatch=None):
    if stdin is not None:
        monkeypatch.setattr("sys.stdin", io.StringIO(stdin))
    parser = QuireParser(prog="test")
    module.add_arguments(parser)
    return module.run(parser.parse_args(list(argv)))


def test_generate_prints_the_answer(client, capsys):
    assert run(generate, "--raw", "the fox") == 0
    assert capsys.readouterr().out == "the fox\n"


def test_generate_uses_the_chat_template_of_a_model_that_has_one(client, capsys, monkeypatch):
    run(generate, "hi")
    run(generate, "--chat", "hi")
    assert capsys.readouterr().out.count("user\nhi") == 2
    engine = make_engine(client)
    engine.chat_template = None
    monkeypatch.setattr(generate, "start_engine", lambda args, **defaults: engine)
    run(generate, "hi")
    assert capsys.readouterr().out == "hi\n"


def test_generate_numbers_several_answers(client, capsys):
    run(generate, "--raw", "fox", "--prompt", "a", "--max-tokens", "9")
    assert capsys.readouterr().out == "[0] fox\n[1] a\n"


def test_generate_prints_json_lines(client, capsys, tmp_path):
    (tmp_path / "prompts.txt").write_text("fox\n\nthe dog\n")
    run(generate, "--raw", "--prompts-file", str(tmp_path / "prompts.txt"), "--json")
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [record["prompt"] for record in records] == ["fox", "the dog"]
    assert records[1]["outputs"][0]["text"] == "the dog"
    assert records[1]["outputs"][0]["finish_reason"] == "stop"


def test_generate_reads_stdin(client, capsys, monkeypatch):
    run(generate, "--raw", stdin="the fox\n", monkeypatch=monkeypatch)
    assert capsys.readouterr().out == "the fox\n"


def test_generate_without_a_prompt_is_refused(client, monkeypatch):
    with pytest.raises(ValidationError, match="no prompt"):
        run(generate, stdin="", monkeypatch=monkeypatch)


def test_chat_answers_one_message(client, capsys):
    assert run(chat, "-q", "hi") == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("user\nhi")
    assert "tokens" in captured.err
    assert "TTFT" in captured.err


def test_chat_answers_each_line_and_remembers(client, capsys, monkeypatch):
    run(
        chat,
        "--no-stats",
        stdin="one\ntwo\n/clear\nthree\n/system be kind\nfour\n/exit\nfive\n",
        monkeypatch=monkeypatch,
    )
    decode = make_engine(client).tokenizer.decode
    prompts = [decode(request.prompt_token_ids.tolist()) for request in client.requests]
    assert len(prompts) == 4
    assert "one" in prompts[1]
    assert "one" not in prompts[2]
    assert prompts[3].startswith("system\nbe kind")


def test_chat_explains_unknown_commands(client, capsys, monkeypatch):
    run(chat, stdin="/nope\n", monkeypatch=monkeypatch)
    assert "unknown command /nope" in capsys.readouterr().err


def test_chat_survives_a_conversation_that_is_too_long(client, capsys, monkeypatch):
    run(chat, stdin="x " * 300 + "\nhi\n", monkeypatch=monkeypatch)
    captured = capsys.readouterr()
    assert "/clear" in captured.err
    assert captured.out.startswith("user\nhi")


def test_an_interrupt_ends_the_answer_and_not_the_program(client, capsys, monkeypatch):
    client.answer = lambda request: [20] * 40
    step = FakeClient.get_output

    def interrupted(self):
        signal.raise_signal(signal.SIGINT)
        return step(self)

    monkeypatch.setattr(FakeClient, "get_output", interrupted)
    assert run(chat, "-q", "hi") == 0
    assert "(stopped)" in capsys.readouterr().err
    assert not client.live


def test_the_second_interrupt_is_not_deferred():
    with DeferredInterrupt() as interrupt:
        signal.raise_signal(signal.SIGINT)
        assert interrupt.is_pending
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_demo_answers_eight_prompts_and_prints_the_figures(client, capsys):
    assert run(demo) == 0
    out = capsys.readouterr().out
    assert out.count("\n> ") == len(demo.PROMPTS) == 8
    assert "8 prompts at once" in out
    assert "tokens/s" in out
    assert "TTFT median" in out
