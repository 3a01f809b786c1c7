"""Finds grammars that are expensive to follow before the engine core follows them: a few tokens under a limit.

Used by compile workers, whose child the kernel ends when the limit is met. Tokens are the longest that the grammar
allows, as a grammar's cost grows with the characters that it has read.
"""

from __future__ import annotations

import signal

import numpy as np

from quire.core.grammar_bitmask import unpack_mask
from quire.structured_output.interface import CompiledGrammar, Vocabulary

NUM_TOKENS = 12
FAST_CPU_S, CPU_S = 0.05, 0.25
"""CPU time of all tokens, masks included. What takes more than the first is tried again in the background; what
takes more than the second is expensive."""


class Probe:
    """Takes grammars through tokens of a vocabulary.

    Args:
        cpu_s: CPU time for that.
    """

    def __init__(self, vocabulary: Vocabulary, cpu_s: float) -> None:
        self._cpu_s = cpu_s
        self._size, self._bitmask_size = vocabulary.vocab_size, vocabulary.bitmask_size
        self._lengths = np.fromiter(map(len, vocabulary.pieces), dtype=np.int32, count=self._size)

    def follow(self, compiled: CompiledGrammar) -> None:
        """Take a new answer through some tokens; SIGPROF ends the process when that takes too long."""
        bitmask = np.empty((1, self._bitmask_size), dtype=np.int32)
        signal.setitimer(signal.ITIMER_PROF, self._cpu_s)
        matcher = compiled.start()
        for _ in range(NUM_TOKENS):
            matcher.fill_bitmask(bitmask, 0)
            is_allowed = unpack_mask(bitmask, self._size)[0]
            longest = int((self._lengths * is_allowed).argmax())
            if not is_allowed[longest] or not self._lengths[longest] or not matcher.accept(longest):
                break
        signal.setitimer(signal.ITIMER_PROF, 0)
