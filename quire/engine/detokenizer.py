"""Detokenizer: the text of one answer as its tokens arrive, stop texts found and held back.

Owned by a `RequestState`. Owns the text so far and how much of it was shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from quire.core.sampling_params import SamplingParams
from quire.engine.stop_strings import StopMatch, StopSearch
from quire.tokenization.incremental import IncrementalDetokenizer
from quire.tokenization.tokenizer import Tokenizer


class Stopped(NamedTuple):
    """The answer ended at stop text `stop`, which was complete after `num_tokens` of the tokens just pushed."""

    stop: str
    num_tokens: int


class Detokenizer:
    """Text of one answer.

    Args:
        tokenizer: None when text is not wanted; the text is then always empty.
        params: stop texts, min_tokens, and what the text leaves out.
        prompt_token_ids: what the answer follows.
    """

    __slots__ = (
        "_include_stop", "_is_complete", "_min_tokens", "_num_shown", "_num_tokens", "_search", "_stream", "_text",
    )  # fmt: skip

    def __init__(self, tokenizer: Tokenizer | None, params: SamplingParams, prompt_token_ids: Sequence[int]) -> None:
        self._stream: IncrementalDetokenizer | None = None
        if tokenizer is not None and params.detokenize:
            self._stream = IncrementalDetokenizer.create(
                tokenizer, prompt_token_ids, skip_special_tokens=params.skip_special_tokens
            )
        self._search = StopSearch(params.stop_strings) if params.stop_strings else None
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._text = ""
        self._num_shown = 0
        self._is_complete = False

    @property
    def has_stop_strings(self) -> bool:
        """True when every token must be looked at as it comes."""
        return self._search is not None

    def push(self, token_ids: Sequence[int], *, is_last_hidden: bool = False) -> Stopped | None:
        """Take in new tokens.

        Args:
            token_ids: in order.
            is_last_hidden: the last one ended the answer and is no part of its text.

        Returns:
            Where a stop text was completed; the text then ends there, and later tokens are not taken in.
        """
        if self._stream is None:
            return None
        visible = token_ids[:-1] if is_last_hidden else token_ids
        if self._search is None:
            self._text += self._stream.push(visible)
            return None
        for position, token_id in enumerate(visible):
            self._num_tokens += 1
            match = self._extend(self._stream.push([token_id]))
            if match is not None:
                self._cut(match)
                return Stopped(match.stop, position + 1)
        return None

    def finish(self) -> str | None:
        """The answer has ended: nothing is held back any longer. A stop text that only now became complete."""
        if self._stream is None or self._is_complete:
            return None
        match = self._extend(self._stream.finish())
        if match is not None:
            self._cut(match)
        self._is_complete = True
        return match.stop if match else None

    def take(self, *, delta: bool) -> str:
        """The text to show: all of it, or what was not shown before."""
        end = len(self._text) - self._num_held_back()
        start = self._num_shown if delta else 0
        self._num_shown = max(self._num_shown, end)
        return self._text[start:end]

    def _extend(self, new_text: str) -> StopMatch | None:
        self._text += new_text
        if self._search is None:
            return None
        if self._num_tokens <= self._min_tokens:
            self._search.skip(new_text)
            return None
        return self._search.push(new_text)

    def _cut(self, match: StopMatch) -> None:
        self._text = self._text[: match.end if self._include_stop else match.start]
        self._is_complete = True

    def _num_held_back(self) -> int:
        if self._search is None or self._is_complete or self._include_stop:
            return 0
        return self._search.num_undecided()
