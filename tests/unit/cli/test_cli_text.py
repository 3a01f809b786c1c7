"""`quire generate`, `quire chat` and the demo over a pretended engine core."""

from __future__ import annotations

import io
import json
import signal

import pytest

from quire.cli import chat, demo, generate
from quire.cli.chat_input import ChatInput
from quire.entrypoints.args import QuireParser
from quire.entrypoints.interrupts import DeferredInterrupt
from quire.errors import ConfigError, ValidationError
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


def test_a_chat_is_edited_saved_and_continued(client, capsys, monkeypatch, tmp_path):
    path = tmp_path / "chat.json"
    typed = f"""/set temperature 0.5
/set top_k many
/set colour 1
/set
/system be kind
\"\"\"two
lines\"\"\"
/regen
/save {path}
/clear
/load {path}
three
/exit
four
"""
    run(chat, "--no-stats", stdin=typed, monkeypatch=monkeypatch)
    decode = make_engine(client).tokenizer.decode
    prompts = [decode(request.prompt_token_ids.tolist()) for request in client.requests]
    assert len(prompts) == 3 and prompts[0] == prompts[1]
    assert "two\nlines" in prompts[0] and prompts[2].startswith("system\nbe kind") and "two\nlines" in prompts[2]
    assert [request.sampling_params.temperature for request in client.requests] == [0.5] * 3
    err = capsys.readouterr().err
    assert "'many' is not a valid top_k" in err and "colour" in err and "  temperature 0.5" in err
    assert [one["role"] for one in json.loads(path.read_text())["messages"]] == ["system", "user", "assistant"]


@pytest.mark.parametrize(
    ("content", "word"),
    [("[]", "messages"), ("{", "line 1"), ('{"messages": [1]}', "role"), ('{"messages": "x"}', "list")],
)
def test_a_file_that_is_not_a_chat_is_refused_and_the_chat_goes_on(
    client, capsys, monkeypatch, tmp_path, content, word
):
    (tmp_path / "chat.json").write_text(content)
    run(chat, stdin=f"/load {tmp_path}/chat.json\n/load\n/regen\nhi\n", monkeypatch=monkeypatch)
    captured = capsys.readouterr()
    assert "not a saved chat" in captured.err and word in captured.err and "no file given" in captured.err
    assert "no message to regenerate" in captured.err and captured.out.startswith("user\nhi")


def test_chat_takes_the_model_in_front_and_refuses_two_and_an_empty_message(client):
    assert run(chat, "leaf", "-q", "hi") == 0
    with pytest.raises(ConfigError, match="two models"):
        run(chat, "leaf", "--model", "other", "-q", "hi")
    with pytest.raises(ValidationError, match="empty"):
        run(chat, "-q", " ")


def test_what_is_typed_at_a_terminal_has_a_history_for_its_owner(monkeypatch, tmp_path):
    monkeypatch.setattr("sys.stdin", io.StringIO())
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    typed = iter(["one", '"""two', 'three"""'])

    def answer(prompt):
        prompts.append(prompt)
        if (line := next(typed, None)) is None:
            raise EOFError
        readline.add_history(line)
        return line

    readline = pytest.importorskip("readline")
    prompts: list[str] = []
    monkeypatch.setattr("builtins.input", answer)
    path = tmp_path / "state" / "history"
    with ChatInput(path) as chat_input:
        assert list(chat_input.messages()) == ["one", "two\nthree"]
    assert prompts == ["> ", "> ", "... ", "> "]
    assert path.stat().st_mode & 0o777 == 0o600 and "three" in path.read_text()
    readline.clear_history()


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
