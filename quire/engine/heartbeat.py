"""Heartbeat: what an engine core shows of itself while it runs, in memory shared with its watcher.

Written by the core's process, read by `core_launcher`. Reading it needs nothing of the core: a core that hangs is seen
to hang.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from enum import IntEnum
from pathlib import Path

import numpy as np

from quire.core.memory_parts import MemoryPart

NUM_WORDS = 32


class HeartbeatField(IntEnum):
    """Places of the page, one int64 each."""

    PHASE = 0
    NUM_TICKS = 1  # steps begun and steps ended
    NUM_RECEIVED = 2  # messages taken in
    STEP_TOKENS = 3  # tokens of the step that runs
    NS_PER_TOKEN = 4  # of the slowest step so far, per token
    NS_LONGEST_STEP = 5
    MS_SILENCE = 6  # since something came from the ranks of other machines, the longest


FIRST_MEMORY_WORD = 8
"""From here on the bytes of each `MemoryPart`."""


class Phase(IntEnum):
    """What the core is doing."""

    STARTING = 0
    IDLE = 1
    BUSY = 2


class Heartbeat:
    """The page of one core.

    Args:
        path: an existing file of the page's size; it may be unlinked once both sides have opened it.
    """

    def __init__(self, path: str | Path) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self._memory = mmap.mmap(fd, 8 * NUM_WORDS)
        finally:
            os.close(fd)
        self.words = np.frombuffer(self._memory, dtype=np.int64)

    @staticmethod
    def create(path: str | Path) -> Heartbeat:
        """A new page at `path`, all zero."""
        Path(path).write_bytes(bytes(8 * NUM_WORDS))
        return Heartbeat(path)

    def close(self) -> None:
        """Give the memory and its file back; what was last seen stays readable. Harmless when repeated."""
        self.words = self.words.copy()
        self._memory.close()

    @property
    def phase(self) -> Phase:
        """What the core is doing."""
        return Phase(int(self.words[HeartbeatField.PHASE]))

    def enter(self, phase: Phase) -> None:
        """The core begins to do something else."""
        self.words[HeartbeatField.PHASE] = phase

    def begin_step(self, num_tokens: int) -> None:
        """A step of so many tokens begins."""
        self.words[HeartbeatField.STEP_TOKENS] = num_tokens
        self.words[HeartbeatField.NUM_TICKS] += 1

    def end_step(self, elapsed_ns: int) -> None:
        """The step has ended; it took `elapsed_ns` nanoseconds, on the clock by which hangs are detected."""
        per_token = elapsed_ns // max(1, int(self.words[HeartbeatField.STEP_TOKENS]))
        self.words[HeartbeatField.NS_PER_TOKEN] = max(per_token, int(self.words[HeartbeatField.NS_PER_TOKEN]))
        self.words[HeartbeatField.NS_LONGEST_STEP] = max(elapsed_ns, int(self.words[HeartbeatField.NS_LONGEST_STEP]))
        self.words[HeartbeatField.NUM_TICKS] += 1

    def show_memory(self, parts: Mapping[MemoryPart, int]) -> None:
        """What the memory of the process is used for, in bytes."""
        for part, num_bytes in parts.items():
            self.words[FIRST_MEMORY_WORD + part] = num_bytes

    @property
    def memory(self) -> dict[str, int]:
        """As it was shown last, by the names of parts; empty before."""
        shown = {part.label: int(self.words[FIRST_MEMORY_WORD + part]) for part in MemoryPart}
        return {name: num_bytes for name, num_bytes in shown.items() if num_bytes}

    def show_silence(self, silence_s: float) -> None:
        """For how long nothing has come from a rank of another machine."""
        self.words[HeartbeatField.MS_SILENCE] = int(1e3 * silence_s)

    @property
    def silence_s(self) -> float:
        """As it was shown last."""
        return int(self.words[HeartbeatField.MS_SILENCE]) * 1e-3

    def note_received(self) -> None:
        """A message was taken in."""
        self.words[HeartbeatField.NUM_RECEIVED] += 1
