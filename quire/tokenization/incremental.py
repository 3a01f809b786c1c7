"""IncrementalDetokenizer: token ids in, finished text out, one step at a time.

Made by the engine's detokenizer, one for each answer. Owns the bytes (or ids) whose text is not decided yet.
The concatenation of everything `push` and `finish` return is the text that the tokens have after their prompt.
"""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence

from quire.tokenization.token_bytes import NOTHING_HIDDEN, TokenTable
from quire.tokenization.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
LONGEST_CHARACTER_BYTES = 4
PROMPT_TAIL_TOKENS = 6
MAX_UNDECIDED_TOKENS = 16


class IncrementalDetokenizer(ABC):
    """Text of a growing list of token ids, never half of a character. O(1) amortised per token."""

    @staticmethod
    def create(
        tokenizer: Tokenizer, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool = True
    ) -> IncrementalDetokenizer:
        """A detokenizer for what follows `prompt_token_ids`."""
        hidden = tokenizer.special_ids if skip_special_tokens else NOTHING_HIDDEN
        if tokenizer.table is not None:
            return ByteDetokenizer(tokenizer.table, prompt_token_ids, hidden)
        return WindowDetokenizer(tokenizer, prompt_token_ids, hidden)

    @abstractmethod
    def push(self, token_ids: Sequence[int]) -> str:
        """Take in tokens; return the text that is decided by now and was not returned before."""

    @abstractmethod
    def finish(self) -> str:
        """The rest of the text: a character that stayed incomplete becomes U+FFFD."""


class ByteDetokenizer(IncrementalDetokenizer):
    """For vocabularies whose tokens stand for bytes: a UTF-8 decoder that keeps the incomplete tail."""

    def __init__(self, table: TokenTable, prompt_token_ids: Sequence[int], hidden: Collection[int]) -> None:
        self._table = table
        self._hidden = hidden
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        tail = self._prompt_tail(prompt_token_ids)
        self._at_start = not tail
        self._decoder.decode(tail)

    def push(self, token_ids: Sequence[int]) -> str:
        """As `IncrementalDetokenizer.push`."""
        if len(token_ids) == 1 and not self._at_start:  # nearly always
            token_id = token_ids[0]
            return "" if token_id in self._hidden else self._decoder.decode(self._table.piece(token_id))
        visible = [token_id for token_id in token_ids if token_id not in self._hidden]
        if self._at_start:
            return self._decoder.decode(self._pieces_at_start(visible))
        piece = self._table.piece
        return self._decoder.decode(b"".join([piece(token_id) for token_id in visible]))

    def finish(self) -> str:
        """As `IncrementalDetokenizer.finish`."""
        return self._decoder.decode(b"", final=True)

    def _pieces_at_start(self, visible: Sequence[int]) -> bytes:
        parts: list[bytes] = []
        for token_id in visible:
            parts.append(self._table.first_piece(token_id) if self._at_start else self._table.piece(token_id))
            self._at_start = self._at_start and not self._table.piece(token_id)
        return b"".join(parts)

    def _prompt_tail(self, prompt_token_ids: Sequence[int]) -> bytes:
        """The prompt's last bytes, enough to know whether it ends inside a character."""
        tail = b""
        for token_id in reversed(prompt_token_ids):
            if token_id not in self._hidden:
                tail = self._table.piece(token_id) + tail
            if len(tail) >= LONGEST_CHARACTER_BYTES:
                break
        return tail


class WindowDetokenizer(IncrementalDetokenizer):
    """For any other decoder: decodes a short window twice, without and with the new tokens, and returns the difference.

    The window holds `_context` ids whose text was returned, then the ids whose text was not.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], hidden: Collection[int]) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._window = self._prompt_tail(prompt_token_ids)
        self._context = len(self._window)
        self._known = self._decode()

    def push(self, token_ids: Sequence[int]) -> str:
        """As `IncrementalDetokenizer.push`."""
        return "".join([self._push_one(token_id) for token_id in token_ids if token_id not in self._hidden])

    def finish(self) -> str:
        """As `IncrementalDetokenizer.finish`."""
        text = self._decode()[len(self._known) :]
        self._known += text
        return text

    def _push_one(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode()
        is_undecided = text.endswith(REPLACEMENT) and len(self._window) - self._context < MAX_UNDECIDED_TOKENS
        if is_undecided or len(text) <= len(self._known):
            return ""
        new = text[len(self._known) :]
        self._window = self._window[self._context :]
        self._context = len(self._window)
        self._known = self._decode()
        return new

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=False)

    def _prompt_tail(self, prompt_token_ids: Sequence[int]) -> list[int]:
        tail: list[int] = []
        for token_id in reversed(prompt_token_ids):
            if token_id not in self._hidden:
                tail.append(token_id)
            if len(tail) == PROMPT_TAIL_TOKENS:
                break
        return tail[::-1]
