"""Grammars of libraries to which the end of an answer is no token: whether it was accepted is kept here."""

from __future__ import annotations

from abc import abstractmethod

from quire.structured_output.interface import Matcher


class EosTrackingMatcher(Matcher):
    """What `accept`, `rollback` and `is_terminated` are, given how a library takes tokens that have bytes.

    Args:
        eos_token_id: ends the answer.
    """

    def __init__(self, eos_token_id: int) -> None:
        self._eos_token_id = eos_token_id
        self._is_terminated = False

    def accept(self, token_id: int) -> bool:
        """Advance; the end is accepted where the library's text is complete, and nothing after it."""
        if self._is_terminated:
            return False
        if token_id == self._eos_token_id:
            self._is_terminated = self._is_complete()
            return self._is_terminated
        return self._advance(token_id)

    def rollback(self, num_tokens: int) -> None:
        """Take back; the end, which the library knows nothing of, is the first."""
        if num_tokens and self._is_terminated:
            self._is_terminated = False
            num_tokens -= 1
        if num_tokens:
            self._take_back(num_tokens)

    def is_terminated(self) -> bool:
        """Whether the end was accepted."""
        return self._is_terminated

    @abstractmethod
    def _is_complete(self) -> bool:
        """Whether the answer may end here."""

    @abstractmethod
    def _advance(self, token_id: int) -> bool:
        """`accept` of a token that is not the end."""

    @abstractmethod
    def _take_back(self, num_tokens: int) -> None:
        """`rollback` of at least one token that is not the end."""
