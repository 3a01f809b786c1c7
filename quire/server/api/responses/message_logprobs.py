"""MessageLogprobs: which of an answer's tokens are text of its messages, with their log-probabilities.

Used by the writer where they are asked for. The answer is read token by token, however it is cut into outputs; a token
belongs to what its text is returned as: a message, or thinking or a call, which have no log-probabilities. Owns how
far one answer is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.parsers.events import Content
from quire.server.chat.answer_events import AnswerEvent, AnswerReader
from quire.server.chat.logprobs import Line, LogprobsFormat
from quire.tokenization.incremental import IncrementalDetokenizer

Entries = list[dict[str, Any]]


class MessageLogprobs:
    """Reads an answer token by token.

    A token that completes no character is returned with the one that does.

    Args:
        form: writes log-probabilities.
        reader: of the answer, fed here; None = all of it is one message.
        text: makes text of tokens.
    """

    def __init__(
        self, form: LogprobsFormat, reader: AnswerReader | None = None, text: IncrementalDetokenizer | None = None
    ) -> None:
        self._form = form
        self._reader = reader
        self._text = text
        self._messages: list[Entries] = []
        self._num_reported: dict[int, int] = {}
        self._undecided: list[tuple[int, Entries]] = []
        self._silent: Entries = []
        self._is_message = False

    def push(self, token_ids: Sequence[int], lines: Sequence[Line], *, is_end: bool) -> None:
        """More tokens of the answer."""
        entries: Entries = self._form.chat(token_ids, lines)["content"]
        if self._reader is None or self._text is None:
            self._messages = self._messages or [[]]
            self._messages[0] += entries
            return
        for token_id, entry in zip(token_ids, entries, strict=False):
            text = self._text.push((token_id,))
            self._silent.append(entry)
            if text:
                self._undecided.append((len(text), self._silent))
                self._silent = []
            self._decide(self._reader.push(text, (token_id,), is_end=False))
        if is_end:
            self._decide(self._reader.push("", (), is_end=True))
            if self._is_message:
                self._messages[-1] += self._silent

    def new(self, number: int) -> Entries:
        """Of message `number`, what was not given before."""
        entries = self.all(number)
        first, self._num_reported[number] = self._num_reported.get(number, 0), len(entries)
        return entries[first:]

    def all(self, number: int) -> Entries:
        """Of message `number`, everything so far."""
        return list(self._messages[number]) if number < len(self._messages) else []

    def _decide(self, events: Sequence[AnswerEvent]) -> None:
        """Tokens whose text is known by now go where it went."""
        for event in events:
            if not isinstance(event, Content):
                self._is_message = False
            else:
                self._messages += [] if self._is_message else [[]]
                self._messages[-1] += self._last(len(event.text))
                self._is_message = True
            self._undecided = []

    def _last(self, num_chars: int) -> Entries:
        """Of the undecided tokens those at the end that have so many characters; in a message all of them."""
        first = len(self._undecided)
        while first and (num_chars > 0 or self._is_message):
            first -= 1
            num_chars -= self._undecided[first][0]
        return [entry for _, entries in self._undecided[first:] for entry in entries]
