"""`--help` by topic."""

from __future__ import annotations

import pytest

from quire.cli import collect_env, serve
from quire.entrypoints.args import QuireParser, add_engine_arguments
from quire.entrypoints.help import help_text
from quire.errors import ConfigError


@pytest.fixture(scope="module")
def parser() -> QuireParser:
    parser = QuireParser("quire serve", "A server.")
    serve.add_arguments(parser)
    return parser


def test_a_command_with_many_flags_lists_its_topics(parser: QuireParser):
    text = help_text(parser)
    assert text == help_text(parser, "listgroup")
    assert text.startswith("usage: quire serve [MODEL]") and "A server." in text
    for topic in ("http", "limits", "model", "scheduler", "supervision"):
        assert f"\n  {topic} " in text
    assert "--port" not in text


def test_a_topic_shows_its_flags_and_no_others(parser: QuireParser):
    for name in ("scheduler", "Scheduler", "SchedulerConfig"):
        text = help_text(parser, name)
        assert "--max-num-seqs" in text and "--port" not in text


@pytest.mark.parametrize("word", ["keep-alive", "keep_alive", "--timeout-keep-alive", "idle connection"])
def test_a_word_finds_flags_by_name_and_by_text(parser: QuireParser, word: str):
    text = help_text(parser, word)
    assert "--timeout-keep-alive" in text and "--port" not in text


def test_all_shows_every_flag(parser: QuireParser):
    text = help_text(parser, "all")
    assert [flag for flag in parser.visible_flags() if flag not in text] == []


def test_a_word_that_finds_nothing_is_refused_with_the_nearest_topic(parser: QuireParser):
    with pytest.raises(ConfigError, match="did you mean 'scheduler'"):
        help_text(parser, "schedulr")


def test_a_command_with_few_flags_shows_them_at_once(capsys: pytest.CaptureFixture[str]):
    parser = QuireParser("quire collect-env")
    collect_env.add_arguments(parser)
    with pytest.raises(SystemExit) as ended:
        parser.parse_args(["--help"])
    assert ended.value.code == 0 and "--json" in capsys.readouterr().out


def test_help_may_be_asked_for_on_the_command_line(capsys: pytest.CaptureFixture[str]):
    parser = QuireParser("quire generate")
    add_engine_arguments(parser)
    for argv, expected in (
        (["-h"], "topics:"),
        (["--help=cache"], "--block-size"),
        (["--help", "cache"], "--block-size"),
    ):
        with pytest.raises(SystemExit) as ended:
            parser.parse_args(argv)
        assert ended.value.code == 0 and expected in capsys.readouterr().out
