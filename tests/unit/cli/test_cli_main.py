from __future__ import annotations

import argparse
import json
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import pytest

from quire.cli import main as cli
from quire.entrypoints.args import add_engine_arguments
from quire.errors import NotEnoughMemoryError
from quire.version import __version__

ROOT = Path(__file__).parents[3]
HEAVY = ("torch", "numpy", "transformers", "tokenizers", "jinja2")


def modules_after(*argv: str) -> set[str]:
    code = f"import sys\nfrom quire.cli.main import main\nmain({list(argv)!r})\nprint('|' + ','.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.rsplit("|", 1)[1].strip().split(","))


@pytest.mark.parametrize("argv", [["--help"], ["--version"], ["bench"]], ids=["help", "version", "bench"])
def test_help_and_version_import_nothing_heavy(argv: list[str]) -> None:
    assert not modules_after(*argv) & set(HEAVY)


def test_importing_the_package_and_building_a_config_imports_nothing_heavy() -> None:
    code = (
        "import sys, quire\nfrom quire.entrypoints.args import build_config\nbuild_config(max_model_len=5)\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_python_dash_m_quire_answers() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "quire", "--version"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == f"quire {__version__}"


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(name in text for name in cli.COMMANDS)
    assert cli.main(["bench"]) == 0
    assert "bench scheduler" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "hint"),
    [
        (["genrate"], "did you mean 'generate'"),
        (["--hepl"], "did you mean '--help'"),
        (["bench", "latancy"], "did you mean 'latency'"),
        (["collect-env", "--jsn"], "did you mean '--json'"),
        (["collect-env", "extra"], "collect-env --help"),
    ],
)
def test_a_mistake_is_answered_with_the_nearest_and_status_2(
    argv: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(argv) == cli.EXIT_ERROR
    error = capsys.readouterr().err
    assert hint in error and "Traceback" not in error


def add_x(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--x")


def fake_command(
    monkeypatch: pytest.MonkeyPatch, run: object, add: Callable[[argparse.ArgumentParser], None] = add_x
) -> None:
    module = types.ModuleType("quire_fake_command", "A fake.")
    module.add_arguments = add  # type: ignore[attr-defined]
    module.run = run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(cli.COMMANDS, "fake", (module.__name__, "for the test"))


def test_an_error_of_a_command_is_its_message_and_hint_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(args: object) -> int:
        raise NotEnoughMemoryError("too big", hint="make it smaller")

    fake_command(monkeypatch, fail)
    assert cli.main(["fake"]) == 2
    assert capsys.readouterr().err == "error: too big\nhint: make it smaller\n"


def test_the_status_of_a_command_is_the_status_of_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_command(monkeypatch, lambda args: 7 if args.x == "y" else 0)
    assert cli.main(["fake", "--x", "y"]) == 7


def test_print_config_shows_what_every_auto_became_without_running_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 16, "intermediate_size": 32,
        "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 77, "torch_dtype": "float32",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    fake_command(monkeypatch, lambda args: 1 // 0, add_engine_arguments)
    assert cli.main(["fake", "--print-config", "--model", str(tmp_path), "--max-num-seqs", "3"]) == 0
    lines = {line.split()[0]: line for line in capsys.readouterr().out.splitlines()}
    assert lines["max_model_len"].split()[1] == "77" and "max_position_embeddings" in lines["max_model_len"]
    assert lines["max_num_seqs"].split() == ["max_num_seqs", "3"]
    assert cli.main(["fake", "--print-config", "--model", str(tmp_path), "--max-model-len", "78"]) == 2
    assert "max_model_len <= 77" in capsys.readouterr().err


def test_an_interrupt_ends_quietly(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(args: object) -> int:
        raise KeyboardInterrupt

    fake_command(monkeypatch, interrupt)
    assert cli.main(["fake"]) == cli.EXIT_INTERRUPTED
    assert capsys.readouterr().err == ""


def test_collect_env_describes_the_machine_without_secrets(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret_value")
    assert cli.main(["collect-env", "--json"]) == 0
    text = capsys.readouterr().out
    report = json.loads(text)
    assert report["quire"] == __version__ and report["packages"]["torch"] and report["cores_usable"] >= 1
    assert report["kernel_tier"] == report["kernel_tiers"][0] and "cores" in report["cpu_topology"]
    assert "hf_secret_value" not in text
    assert cli.main(["collect-env"]) == 0
    assert "memory_available" in capsys.readouterr().out


def test_bash_completes_commands_flags_and_values(capsys, tmp_path):
    assert cli.main(["completion", "bash"]) == 0
    (tmp_path / "quire.bash").write_text(capsys.readouterr().out)
    asked = [("bench", "se"), ("serve", "--max-num-s"), ("serve", "--scheduling-policy", "f"), ("", "gen")]
    script = "source quire.bash\n"
    for words in asked:
        line = " ".join(["quire", *filter(None, words)])
        script += f"COMP_WORDS=({line}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); _shtab_quire\n"
        script += 'echo "${COMPREPLY[@]}"\n'
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["serve", "--max-num-seqs", "fcfs fair", "generate"]
