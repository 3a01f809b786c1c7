"""The commands of the pages that people copy from run as they stand, and print what the pages say.

A line of a `console` block that begins with `$` is a command, what follows it is what it prints; `...` stands for
anything. A `py` block asks the server of its page. One server on a free port stands for all that are started with
settings that do not matter here; where they matter, `--print-config` says whether they are taken.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.cli.main import main
from quire.config.build import build_config
from quire.engine.llm_engine import LLMEngine
from tests.e2e.test_docs import PAGES
from tests.server.engines import SteppedEngine
from tests.server.servers import RunningServer

BLOCK = re.compile(r"^```(console|py)\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.DOTALL | re.MULTILINE)
SERVERS = ("quire serve", "quire serve &", "quire serve leaf")
NOT_RUN = {
    "make ": "makes an environment, or is the suite that this test is of",
    "quire serve path/or/hub-id": "stands for a model of the reader's own",
    "export ": "names that model",
    "quire serve --models": "needs the file that its page shows; see test_many_models",
    "quire run --models": "needs that file; see test_many_models",
    "curl -s http://127.0.0.1:8000/v1/models | jq '.data[] | {id, state": "needs a server of several models",
    "curl http://127.0.0.1:8000/models/": "needs that server, too",
    "quire bench serve --base-url http://other": "asks another machine",
    "quire plan --model leaf --calibrate": "takes a minute and a half; see test_plan",
    "quire plan --calibration": "needs what the command before it writes",
    "quire plan --model MODEL": "needs a model's config.json; see test_plan",
    "quire replay": "needs the recording of a server under load; see test_flight_recorder",
    "curl -X POST -H": "needs a server with an operator's key; see test_prefix_cache",
    "vllm-router": "another program; see make test-router",
    "codex ": "another program; see make test-codex",
    "claude ": "another program; see make test-claude-code",
}
ADDED = {
    "quire chat": "--temperature 0",
    "quire generate": "--temperature 0",
    "quire bench latency": "--num-iters 1 --output-len 8",
    "quire bench serve": "--num-prompts 8 --allow-client-limited --base-url http://127.0.0.1:8000",
}
SHELL = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
TYPED = "What is 27 + 58?\n"
NOT_SHOWN = {
    "quire chat --tools demo": "...The sum of 27 and 58 is 85.\n",
    "quire chat": "27 + 58 = 85\n",
    "quire bench latency": '...{"benchmark": "latency", "model": "leaf", ...}\n',
    "quire bench serve": '...{..."completed": 8...}\n',
    "quire collect-env": "quire ...kernel_tier ...",
    "openssl": "",
}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    """The embedded model."""
    engine = SteppedEngine(LLMEngine.from_config(build_config(model="leaf", num_gpu_blocks_override=256)))
    with RunningServer(engine) as running:
        yield running
    engine.shutdown()


@pytest.fixture
def reader(server: RunningServer, capsys, monkeypatch, tmp_path: Path) -> Reader:
    """Somebody who copies from a page, in an empty directory."""
    monkeypatch.chdir(tmp_path)
    return Reader(server.port, capsys, monkeypatch)


class Reader:
    """Runs what a page shows, and looks at what it prints."""

    def __init__(self, port: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        self._port, self._capsys, self._monkeypatch = port, capsys, monkeypatch

    def type(self, command: str, shown: str) -> None:
        """Run one command."""
        name = " ".join(command.split("#")[0].split())
        if name in SERVERS or _found(NOT_RUN, name):
            return
        expected = shown or _found(NOT_SHOWN, name)
        if name.startswith("quire serve"):
            name, expected = f"{name} --print-config", "model ... leaf\nserved_model_name ..."
        assert expected is not None, f"neither the page nor NOT_SHOWN says what {name!r} prints"
        printed = self._run(f"{name} {_found(ADDED, name) or ''}" if name.startswith("quire") else command)
        assert matches(printed, expected), f"{name} printed {printed!r}"

    def execute(self, block: str, shown: str) -> None:
        """Run a program."""
        assert shown, "a page shows what its blocks print, in a text block after them"
        exec(compile(self._here(block), "block", "exec"), {"__name__": "block"})
        printed = self._capsys.readouterr().out
        assert matches(printed, shown), f"the block printed {printed!r}"

    def _run(self, command: str) -> str:
        """What a command prints, or the error it ends with; those of `quire` run in this process, to import once."""
        words = shlex.split(self._here(command), comments=True)
        if words[0] == "quire":
            self._monkeypatch.setattr("sys.stdin", io.StringIO(TYPED))
            self._capsys.readouterr()
            status = main(words[1:])
            out, err = self._capsys.readouterr()
        else:
            shell = subprocess.run(
                ["bash", "-c", self._here(command)], capture_output=True, text=True, timeout=60, env=SHELL
            )
            status, out, err = shell.returncode, shell.stdout, shell.stderr
        return out if status == 0 else err

    def _here(self, text: str) -> str:
        return text.replace("127.0.0.1:8000", f"127.0.0.1:{self._port}")


@pytest.mark.parametrize("page", PAGES, ids=[page.stem for page in PAGES])
def test_what_a_page_shows_is_what_its_reader_gets(page: Path, reader: Reader):
    text = page.read_text()
    for line in re.findall(r'^(\{"custom_id".*"method".*\})$', text, re.MULTILINE):
        Path("requests.jsonl").write_text(f"{line}\n")
    Path("server.yaml").write_text("port: 8000\n")
    for language, block, shown in BLOCK.findall(text):
        if language == "py":
            reader.execute(block, shown)
        for command, printed in commands_of(block) if language == "console" else ():
            reader.type(command, printed)


def commands_of(block: str) -> list[tuple[str, str]]:
    """(command, what the page says that it prints) of a console block."""
    found = re.split(r"^\$ ", block.replace("\\\n", ""), flags=re.MULTILINE)
    return [(command, printed) for command, _, printed in (one.partition("\n") for one in found if one)]


def matches(printed: str, shown: str) -> bool:
    """Whether a page shows what was printed; `...` stands for anything, also at the end."""
    pattern = ".*".join(map(re.escape, shown.rstrip("\n").split("...")))
    return re.fullmatch(f"{pattern}\n*", printed, re.DOTALL) is not None


def _found(table: dict[str, str], command: str) -> str | None:
    """What a table has for the beginning of a command."""
    return next((said for beginning, said in table.items() if command.startswith(beginning)), None)
