"""A page's commands, as somebody runs them who follows it: one after another, in a directory of their own.

A server (`quire serve`) stays until the page ends or starts another on its port; it gets a free port of the loopback,
and addresses in later blocks are those of the page's servers.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.docs.blocks import ROOT, Block, commands

ADDRESS = re.compile(r"(https?://)?(127\.0\.0\.1|localhost|0\.0\.0\.0|one|other):(\d{4,5})\b")
SERVE = re.compile(r"^((?:[A-Z_]+=\S+ )*)quire serve\b(?!.*--(?:print-config|help))")
LISTENING = re.compile(r"listening on (https?)://127\.0\.0\.1:(\d+); ready in")
START_S = 180
COMMAND_S = 600


class Failure(AssertionError):
    """A command did something else than its page says."""


class Session:
    """What a page has started.

    Attributes:
        home: where its commands run.
    """

    def __init__(self, home: Path) -> None:
        self.home = home
        self._servers: dict[str, tuple[subprocess.Popen[bytes], str, str]] = {}  # by the page's port
        programs = home / ".bin"
        programs.mkdir()
        for name, arguments in (("quire", "-m quire"), ("python", "")):  # a link to Python would lose its environment
            program = programs / name
            program.write_text(f'#!/bin/sh\nexec "{sys.executable}" {arguments} "$@"\n')
            program.chmod(0o755)
        self.environment = {
            **os.environ, "PATH": f"{programs}:{os.environ['PATH']}", "HOME": str(home), "HF_HOME": str(home / ".hf"),
            "QUIRE_CACHE_DIR": str(home / ".cache"), "PYTHONPATH": f"{home}:{ROOT}", "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1", "COLUMNS": "120",
        }  # fmt: skip

    def close(self) -> None:
        """End the servers; each must end cleanly."""
        for port in list(self._servers):
            self._stop(port)

    def run(self, block: Block) -> None:
        """Run a console block or a script.

        Raises:
            Failure: a status or an output that the page does not show.
        """
        self.prepare(block)
        text = block.replaced()
        found = commands(text) if block.language == "console" else [(one, "") for one in split_script(text)]
        for command, printed in found:
            self._run_command(command.rstrip("\n"), printed)

    def prepare(self, block: Block) -> None:
        """Run what `before` says, and start a server where the block asks for one that no block has started."""
        for kind, command in block.notes:
            if kind == "before":
                self._run_command(command, "")
        asked = ADDRESS.search(block.replaced())
        is_client = block.language in ("py", "python") or re.search(r"\bcurl\b|--url|--base-url", block.text)
        if asked and is_client and not self._servers and not SERVE.search(re.sub(r"^\$ ", "", block.text)):
            self._serve(f"quire serve leaf --port {asked[3]}")

    def addressed(self, text: str) -> str:
        """The text with the ports of the servers that run."""

        def replaced(found: re.Match[str]) -> str:
            if found[3] not in self._servers:
                return found[0]
            _, scheme, port = self._servers[found[3]]
            return f"{scheme + '://' if found[1] else ''}127.0.0.1:{port}"

        return ADDRESS.sub(replaced, text)

    def _run_command(self, command: str, printed: str) -> None:
        if SERVE.match(command):
            self._serve(command)
            return
        script = f"test -f .state && . ./.state\n{self.addressed(command)}\nstatus=$?\nexport -p >.state\nexit $status"
        done = subprocess.run(
            ["bash", "-c", script], cwd=self.home, env=self.environment, stdin=subprocess.DEVNULL, timeout=COMMAND_S,
            capture_output=True, check=False,
        )  # fmt: skip
        out, error = done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")
        if done.returncode and "Error" not in printed:
            raise Failure(f"$ {command}\nstatus {done.returncode}\n{out[-1500:]}{error[-1500:]}")
        if printed.strip() and not any(matches(printed, one) for one in (out, error, out + error)):
            raise Failure(f"$ {command}\nshown:\n{printed}\nprinted:\n{out[-2000:]}{error[-1000:]}")

    def _serve(self, command: str) -> None:
        words = re.sub(r"\s+(#.*|&)$", "", command)
        port = (re.search(r"--port (\d+)", words) or [None, "8000"])[1]
        self._stop(str(port))
        words = re.sub(r"--port \d+", "", words).replace("--host 0.0.0.0", "--host 127.0.0.1")
        words = SERVE.sub(r"\1exec quire serve", self.addressed(words))
        log = self.home / f".server-{port}.log"
        with log.open("wb") as file:
            server = subprocess.Popen(
                ["bash", "-c", f"test -f .state && . ./.state\n{words} --port 0"], cwd=self.home, env=self.environment,
                stdin=subprocess.DEVNULL, stdout=file, stderr=file,
            )  # fmt: skip
        end = time.monotonic() + START_S
        while not (found := LISTENING.search(log.read_text())):
            if server.poll() is not None or time.monotonic() > end:
                server.kill()
                raise Failure(f"$ {command}\n{log.read_text()[-3000:]}")
            time.sleep(0.05)
        self._servers[str(port)] = (server, found[1], found[2])

    def _stop(self, port: str) -> None:
        server, *_ = self._servers.pop(port, (None,))
        if server is None:
            return
        server.send_signal(signal.SIGTERM)
        try:
            status: Any = server.wait(120)
        except subprocess.TimeoutExpired:
            server.kill()
            status = "none after 120 s"
        if status:
            log = (self.home / f".server-{port}.log").read_text()
            raise Failure(f"the server on {port} ended with status {status}\n{log[-3000:]}")


def split_script(text: str) -> list[str]:
    """A script as commands: its servers one by one, and all else together."""
    found: list[str] = []
    is_whole = True
    for line in text.splitlines():
        if not is_whole:
            found[-1] += f"\n{line}"
        elif SERVE.match(line) or not found or SERVE.match(found[-1]):
            found.append(line)
        else:
            found[-1] += f"\n{line}"
        is_whole = not line.endswith("\\") and found[-1].count("'") % 2 == 0
    return found


def matches(shown: str, printed: str) -> bool:
    """Whether something prints what a page shows; `...` is anything, and blanks at the ends of lines do not count."""
    clean = [re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE).strip() for text in (shown, printed)]
    return bool(re.fullmatch(".*".join(map(re.escape, clean[0].split("..."))), clean[1], re.DOTALL))
