"""Agents' command lines against a server whose model writes what a script says, and what they must make of it.

Each case runs the program once, in a new directory, against a server of its own. Used by `run_codex.py` and
`run_claude_code.py`, which say how the program is started; npm installs it below `build/clients` once.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.server.engines import WritingEngine, scripted_config
from tests.server.servers import RunningServer

CLIENTS = Path("build/clients")
PAGE = Path(__file__).parents[3] / "docs/how-to/agents.md"
KEY = "a-key-of-the-server"
MADE, DONE = "made.txt", "The file is written."
LIMIT_S = 120.0


@dataclass(frozen=True)
class Case:
    """A task and its end.

    Attributes:
        name: what is shown.
        write: the model's answer to the text of a prompt.
        max_model_len: of the server, in tokens.
        shows: what the program must print.
        status: with which it must end.
        is_made: whether `made.txt` must be there.
        statuses: of the server's answers, as often as they must come; a count of 0 = at least one. Probes that
            were answered are not counted.
        model: its name.
        window: of which the program is told, in tokens; None = the server's.
    """

    name: str
    write: Callable[[str], str]
    max_model_len: int
    shows: Sequence[str]
    status: int = 0
    is_made: bool = True
    statuses: Mapping[int, int] = field(default_factory=lambda: {200: 0})
    model: str = "leaf"
    window: int | None = None


@dataclass(frozen=True)
class Start:
    """How a program is started.

    Attributes:
        files: below its home directory, by name.
    """

    arguments: Sequence[str]
    environment: Mapping[str, str]
    files: Mapping[str, str] = field(default_factory=dict)


class Statuses(logging.Handler):
    """Counts the answers that the access log tells, and those that were refused."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[int] = Counter()

    def emit(self, record: logging.LogRecord) -> None:
        """Count one."""
        self.counts[record.facts["status"]] += 1  # type: ignore[attr-defined]


def call(name: str, **arguments: object) -> str:
    """A call as the server's tool parser reads it, after some thinking."""
    text = json.dumps({"name": name, "arguments": arguments})
    return f"<think>I use {name}.</think><tool_call>\n{text}\n</tool_call>"


def documented(language: str, case: Case, url: str) -> str:
    """The page's block in this language, for the server at `url`."""
    block = PAGE.read_text().partition(f"```{language}\n")[2].partition("```")[0]
    window = str(case.window or case.max_model_len)
    for old, new in (
        ("http://127.0.0.1:8000", url),
        ("coder", case.model),
        ("any-key-of-the-server", KEY),
        ("131072", window),
    ):
        block = block.replace(old, new)
    return block


def npm_program(package: str, name: str) -> str:
    """The path of a program that an npm package has; installs the package's newest version once."""
    folder = CLIENTS / name
    program = (folder / "node_modules" / ".bin" / name).absolute()
    if not program.exists():
        folder.mkdir(parents=True, exist_ok=True)
        command = ["npm", "install", "--no-audit", "--no-fund", "--no-package-lock", "--prefix", str(folder), package]
        try:
            subprocess.run(command, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise SystemExit(f"npm cannot install {package} ({error}); it needs nodejs and npm") from None
    return str(program)


def version_of(program: str) -> str:
    """What it calls itself."""
    return subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout.strip()


def run_case(case: Case, program: str, start: Callable[[Case, str], Start]) -> tuple[int, list[str]]:
    """(number of requests, what is wrong).

    Args:
        start: how the program is started, from the case and the server's address.
    """
    engine = WritingEngine(config=scripted_config(max_model_len=case.max_model_len, served_model_name=case.model))
    engine.write = lambda prompt, seed: case.write(prompt)
    counted, logger = Statuses(), logging.getLogger("quire.access")
    logger.addHandler(counted)
    logger.setLevel(logging.INFO)
    try:
        with tempfile.TemporaryDirectory() as home, tempfile.TemporaryDirectory() as work:
            with RunningServer(engine, reasoning_parser="think", api_key=KEY) as server:
                started = start(case, server.url)
                for name, text in started.files.items():
                    path = Path(home) / name
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_text(text)
                environment = {"PATH": os.environ["PATH"], "HOME": home, **started.environment}
                done = subprocess.run(
                    [program, *started.arguments], cwd=work, env=environment, stdin=subprocess.DEVNULL, text=True,
                    capture_output=True, timeout=LIMIT_S, check=False,
                )  # fmt: skip
            made = Path(work) / MADE
            content = made.read_text() if made.exists() else None
    finally:
        logger.removeHandler(counted)
    wrong = _wrong(case, done, content, counted.counts)
    if wrong:
        print(done.stdout, done.stderr, sep="\n")
    return sum(counted.counts.values()), wrong


def run_all(cases: Sequence[Case], program: str, start: Callable[[Case, str], Start]) -> int:
    """Run every case; the last line is pass or fail with the version and the number of requests. 0 = passed."""
    num_requests = num_wrong = 0
    for case in cases:
        began = time.monotonic()
        count, wrong = run_case(case, program, start)
        num_requests += count
        num_wrong += bool(wrong)
        print(
            f"{case.name}: {'; '.join(wrong) or 'ok'} ({count} requests, {time.monotonic() - began:.1f} s)", flush=True
        )
    verdict = f"failed {num_wrong} of {len(cases)} cases" if num_wrong else f"passed {len(cases)} cases"
    print(f"{verdict}: {version_of(program)}, {num_requests} requests")
    return 1 if num_wrong else 0


def _wrong(
    case: Case, done: subprocess.CompletedProcess[str], made: str | None, statuses: Mapping[int, int]
) -> list[str]:
    wrong = []
    if done.returncode != case.status:
        wrong.append(f"it ended with {done.returncode}")
    if made != ("made here" if case.is_made else None):
        wrong.append(f"{MADE} holds {made!r}")
    wrong += [f"it does not show {text!r}" for text in case.shows if text not in done.stdout + done.stderr]
    if set(statuses) != set(case.statuses) or any(
        count and statuses[status] != count for status, count in case.statuses.items()
    ):
        wrong.append(f"the server answered {dict(statuses)}")
    return wrong
