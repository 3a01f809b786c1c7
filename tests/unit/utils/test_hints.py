"""Hints by spelling are given for slips, not for words that merely look alike."""

from __future__ import annotations

import pytest

from quire.cli.main import COMMANDS
from quire.config.build import SERVER_SECTIONS
from quire.entrypoints.args import QuireParser, add_engine_arguments
from quire.errors import nearest, unknown_name
from quire.utils.other_names import COMMANDS as COMMANDS_ELSEWHERE
from quire.utils.other_names import FLAGS, PARAMETERS

PARSER = QuireParser(prog="quire serve")
add_engine_arguments(PARSER, also=SERVER_SECTIONS)
FIRST_WORDS = sorted({name.split()[0] for name in COMMANDS})

NEAR = {
    "--prot": "--port", "--hots": "--host", "--max-modle-len": "--max-model-len", "--max-model": "--max-model-len",
    "--quant": "--quantization", "--gpu-memory": "--gpu-memory-utilization", "--apikey": "--api-key",
    "--disable-prefix-cachin": "--no-enable-prefix-caching", "--ssl-cert": "--ssl-certfile",
    "--Max-Model-Len": "--max-model-len",
}  # fmt: skip
FAR = [
    "--log-levels-of-all", "--task", "--lora-modules", "--middleware", "--ctx-size", "--batch-size", "--mlock",
    "--temp", "--cpu", "-x", "--", "--x" * 200,
]  # fmt: skip


@pytest.mark.parametrize(("name", "valid"), NEAR.items())
def test_a_slip_is_answered_with_the_name_meant(name: str, valid: str) -> None:
    assert nearest(name, PARSER.visible_flags()) == valid


@pytest.mark.parametrize("name", FAR)
def test_a_word_that_only_looks_alike_is_not(name: str) -> None:
    assert nearest(name, PARSER.visible_flags()) is None


def test_the_opposite_is_never_near() -> None:
    assert nearest("disable_thing", ["enable_thing"]) is None
    assert nearest("no_store", ["store"]) is None


def test_words_of_other_programs_are_not_words_of_this_one() -> None:
    assert not set(FLAGS) & set(PARSER._option_string_actions)
    assert not set(COMMANDS_ELSEWHERE) & set(FIRST_WORDS)
    for table in (FLAGS, COMMANDS_ELSEWHERE, PARAMETERS):
        assert all(len(hint) > 4 and not hint.endswith(".") for hint in table.values())


def test_there_is_one_hint() -> None:
    assert unknown_name("flag", "--ctx-size", ["--port"], elsewhere=FLAGS).hint == "use --max-model-len"
    assert unknown_name("flag", "--prot", ["--port"], elsewhere=FLAGS).hint == "did you mean '--port'?"
    assert unknown_name("flag", "--xyz", ["--port"], otherwise="see --help").hint == "see --help"
    assert unknown_name("flag", "--xyz", ["--port", "--host"]).hint == "valid: --host, --port"
