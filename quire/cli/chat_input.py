"""ChatInput: where the messages of `quire chat` come from: a terminal with editing and a history, or lines of stdin.

Owns the history file. A message of several lines stands between lines of three quotation marks, as in Python.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from quire import envs

FENCE = '"""'
MAX_HISTORY = 1000
PROMPT, CONTINUED = "> ", "... "


class ChatInput:
    """Reads messages.

    Args:
        history: file that keeps what was typed, for its owner only; None = nothing is kept.
    """

    def __init__(self, history: Path | None = None) -> None:
        self.is_terminal = sys.stdin.isatty()
        self._readline = _readline() if self.is_terminal else None
        self._history = history if self._readline is not None else None

    def __enter__(self) -> ChatInput:
        if self._readline is not None and self._history is not None:
            self._readline.set_history_length(MAX_HISTORY)
            with contextlib.suppress(OSError):
                self._readline.read_history_file(self._history)
        return self

    def __exit__(self, *_: object) -> None:
        if self._readline is not None and self._history is not None:
            with contextlib.suppress(OSError):  # a history that cannot be kept is no reason to fail
                self._history.parent.mkdir(parents=True, exist_ok=True)
                os.close(os.open(self._history, os.O_CREAT | os.O_WRONLY, 0o600))
                self._readline.write_history_file(self._history)

    def messages(self) -> Iterator[str]:
        """Messages until the end of the input; empty ones are left out."""
        while (line := self._line(PROMPT)) is not None:
            text = line.strip()
            if text.startswith(FENCE):
                text = self._fenced(text.removeprefix(FENCE))
            if text:
                yield text

    def _fenced(self, first: str) -> str:
        """The lines up to the closing marks, or to the end of the input."""
        lines = [first]
        while not lines[-1].rstrip().endswith(FENCE):
            line = self._line(CONTINUED)
            if line is None:
                break
            lines.append(line)
        lines[-1] = lines[-1].rstrip().removesuffix(FENCE)
        return "\n".join(lines).strip("\n")

    def _line(self, prompt: str) -> str | None:
        """The next line; None = there is none, or Ctrl-C."""
        try:
            return input(prompt if self.is_terminal else "")
        except (EOFError, KeyboardInterrupt):
            return None


def history_file() -> Path | None:
    """Where the history is kept: `quire/chat_history` below XDG_STATE_HOME, or QUIRE_CACHE_DIR; None = nowhere."""
    state = os.environ.get("XDG_STATE_HOME", "")
    if os.path.isabs(state):
        return Path(state) / "quire" / "chat_history"
    folder = envs.cache_dir()
    return None if folder is None else folder / "chat_history"


def _readline() -> ModuleType | None:
    """Line editing for `input`, where the platform has it."""
    try:
        import readline
    except ImportError:
        return None
    return readline
