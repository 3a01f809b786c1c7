"""Log-probabilities in the forms of the two APIs. No state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.core.outputs import Logprob
from quire.tokenization.tokenizer import Tokenizer

Line = dict[int, Logprob]
LOWEST = -9999.0


class LogprobsFormat:
    """Writes log-probabilities.

    Args:
        tokenizer: gives the bytes of a token; None = its text's.
        num_top: tokens besides the sampled one; -1 = all there are.
        named: the tokens to show besides the sampled one, in place of the likeliest.
        as_ids: write "token_id:N" for a token's text.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, num_top: int, *, as_ids: bool, named: Sequence[int] | None = None
    ) -> None:
        self._table = None if tokenizer is None else tokenizer.table
        self._num_top = num_top
        self._as_ids = as_ids
        self._named = named

    def chat(self, token_ids: Sequence[int], lines: Sequence[Line]) -> dict[str, Any]:
        """`choices[].logprobs` of a chat."""
        return {"content": [self._chat_token(one, line) for one, line in zip(token_ids, lines, strict=False)]}

    def completion(
        self, token_ids: Sequence[int], lines: Sequence[Line | None], first_offset: int
    ) -> tuple[dict[str, Any], int]:
        """`choices[].logprobs` of a completion, and the offset that follows.

        Args:
            lines: None for a token without one: the first of a prompt.
            first_offset: characters before the first token.
        """
        tokens, values, tops, offsets = [], [], [], []
        offset = first_offset
        for token_id, line in zip(token_ids, lines, strict=False):
            own = None if line is None else line.get(token_id)
            text = self._text(token_id, own)
            tokens.append(text)
            offsets.append(offset)
            offset += len(text)
            values.append(None if own is None else finite(own.logprob))
            tops.append(None if line is None else self._completion_top(token_id, line))
        return {"text_offset": offsets, "token_logprobs": values, "tokens": tokens, "top_logprobs": tops}, offset

    def _completion_top(self, token_id: int, line: Line) -> dict[str, float]:
        chosen = {one: line[one] for one in (token_id, *self._top(line)) if one in line}
        return {self._text(one, entry): finite(entry.logprob) for one, entry in chosen.items()}

    def _chat_token(self, token_id: int, line: Line) -> dict[str, Any]:
        return {
            **self._entry(token_id, line[token_id]),
            "top_logprobs": [self._entry(one, line[one]) for one in self._top(line)],
        }

    def _entry(self, token_id: int, entry: Logprob) -> dict[str, Any]:
        return {
            "token": self._text(token_id, entry),
            "logprob": finite(entry.logprob),
            "bytes": list(self._bytes(token_id, entry)),
        }

    def _top(self, line: Line) -> list[int]:
        """The likeliest ids, best first, or those that were named."""
        if self._named is not None:
            return [one for one in self._named if one in line]
        ids = sorted(line, key=lambda one: line[one].rank or 0)
        return ids if self._num_top == -1 else ids[: self._num_top]

    def _text(self, token_id: int, entry: Logprob | None) -> str:
        if self._as_ids:
            return f"token_id:{token_id}"
        if entry is not None:
            return entry.decoded_token or ""
        return "" if self._table is None else self._table.piece(token_id).decode("utf-8", "replace")

    def _bytes(self, token_id: int, entry: Logprob) -> bytes:
        return (entry.decoded_token or "").encode() if self._table is None else self._table.piece(token_id)


def prompt_logprobs(lines: Sequence[Line | None] | None) -> list[dict[str, dict[str, Any]] | None] | None:
    """`prompt_logprobs`: per prompt token, id -> value, rank and text."""
    if lines is None:
        return None
    return [
        None
        if line is None
        else {
            str(token_id): {"logprob": finite(one.logprob), "rank": one.rank, "decoded_token": one.decoded_token}
            for token_id, one in line.items()
        }
        for line in lines
    ]


def finite(logprob: float) -> float:
    """`logprob`, as JSON can say it."""
    return logprob if logprob > LOWEST else LOWEST
