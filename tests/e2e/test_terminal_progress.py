"""What a terminal shows while weights load and a long prompt is computed."""

from __future__ import annotations

import io
import re

from quire.cli.main import main
from quire.utils import progress_line
from quire.utils.progress_line import ERASE, ProgressLine


class Terminal(io.StringIO):
    """Standard error of somebody who looks at it."""

    def isatty(self) -> bool:
        """As of a terminal."""
        return True


def test_a_chat_shows_how_far_weights_and_a_long_prompt_are(monkeypatch, capsys):
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    monkeypatch.setattr(progress_line, "SHOW_AFTER_S", 0.0)
    monkeypatch.setattr(progress_line, "REFRESH_S", 0.0)
    limits = ["--max-num-batched-tokens", "256", "--max-num-seqs", "8", "--num-gpu-blocks-override", "64"]
    assert main(["chat", "-q", "What is 2 + 3? " * 80, "--max-tokens", "2", "--no-stats", *limits]) == 0
    shown = terminal.getvalue()
    for what in ("loading weights", "computing the prompt"):
        shares = [int(share) for share in re.findall(rf"{what} (\d+)%", shown)]
        assert shares and shares == sorted(shares), what
    assert shown.endswith(ERASE), "nothing is left of it"
    assert "%" not in capsys.readouterr().out


def test_quick_work_and_a_file_show_nothing(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    line = ProgressLine("working", clock=lambda: now[0])
    line.show(1, 4)
    line.end()
    assert not terminal.getvalue()
    now[0] = 1.5
    line.show(3, 4)
    assert terminal.getvalue() == f"{ERASE}working 75%"
    monkeypatch.setattr("sys.stderr", file := io.StringIO())
    hidden = ProgressLine("working", clock=lambda: now[0])
    now[0] = 9.0
    hidden.show(1, 2)
    assert not file.getvalue()
