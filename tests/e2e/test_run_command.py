"""`quire run` as it is typed: one answer, a chat on a terminal beside other clients, a server; each ends cleanly."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from tests.robustness.server_process import children_of, wait_until

ROOT = Path(__file__).parents[2]
QUIRE_RUN = [sys.executable, "-m", "quire", "run", "leaf", "--temperature", "0", "--num-threads", "1"]
SUM = "What is 17 plus 25?"


class Typed:
    """A `quire run` at a terminal; what it writes is read as it comes."""

    def __init__(self, *flags: str) -> None:
        self._terminal, end = pty.openpty()
        self.process = subprocess.Popen(
            [*QUIRE_RUN, *flags], cwd=ROOT, stdin=end, stdout=end, stderr=end, start_new_session=True
        )
        os.close(end)
        self._seen = ""

    def type(self, text: str) -> None:
        os.write(self._terminal, text.encode())

    def see(self, pattern: str) -> re.Match[str]:
        """Read until `pattern` has been written."""
        while (found := re.search(pattern, self._seen)) is None:
            try:
                self._seen += os.read(self._terminal, 4096).decode(errors="replace")
            except OSError:  # the other end is closed
                raise AssertionError(f"{pattern} is not in\n{self._seen}") from None
        self._seen = self._seen[found.end() :]
        return found

    def close(self) -> None:
        os.close(self._terminal)


def is_asleep(pid: int) -> bool:
    """Whether the main thread of a process waits in the kernel."""
    return Path(f"/proc/{pid}/task/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"


@contextmanager
def typed(*flags: str) -> Iterator[Typed]:
    one = Typed(*flags)
    try:
        yield one
    finally:
        if one.process.poll() is None:
            one.process.kill()
            one.process.wait()
        one.close()


def test_a_prompt_on_stdin_is_answered_and_the_program_ends():
    done = subprocess.run(QUIRE_RUN, cwd=ROOT, input=f"{SUM}\n", capture_output=True, text=True, check=True)
    assert done.stdout == "17 + 25 = 42\n" and "tokens" in done.stderr


def test_a_chat_on_a_terminal_shares_its_server_and_ends_with_ctrl_d():
    with typed("--max-tokens", "400") as chat:
        address = chat.see(r"leaf at (http://127\.0\.0\.1:\d+)/v1")[1]
        chat.see("> ")
        chat.type(f"{SUM}\n")
        chat.see("17 \\+ 25 = 42")
        body = {"model": "leaf", "messages": [{"role": "user", "content": SUM}], "temperature": 0}
        other = httpx.post(f"{address}/v1/chat/completions", json=body, timeout=60)
        assert other.json()["choices"][0]["message"]["content"] == "17 + 25 = 42"
        chat.see("> ")
        children = children_of(chat.process.pid)
        assert children
        chat.type("\x04")
        assert chat.process.wait(60) == 0
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children), "no process is left")


def test_ctrl_c_at_the_prompt_ends_chat_and_server():
    with typed() as chat:
        chat.see("> ")
        children = children_of(chat.process.pid)
        wait_until(lambda: is_asleep(chat.process.pid), "it waits for input: what comes before cannot interrupt a read")
        os.killpg(chat.process.pid, signal.SIGINT)
        assert chat.process.wait(60) == 0
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children), "no process is left")


def test_without_a_chat_it_serves_until_a_signal():
    command = [*QUIRE_RUN, "--no-chat"]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        address = next(found[1] for line in server.stderr if (found := re.search(r"listening on (http://\S+);", line)))
        assert httpx.get(f"{address}/health").status_code == 200
        server.send_signal(signal.SIGINT)
        server.stderr.read()
        assert server.wait(60) == 0
