"""What the engine asks of a grammar library. Implemented by the files of `backends`, which do not import each other.

A grammar is compiled in a process that can be killed (`compile.worker`): `compile` runs there, and its bytes are what
crosses; `load` makes the grammar of them in the engine core.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import msgspec
import numpy as np

from quire.structured_output.capabilities import Capabilities

MAX_ROLLBACK = 32
"""Tokens that every `Matcher` can be taken back by, at least."""


class GrammarSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A grammar to be made; equal specs are the same grammar.

    Attributes:
        kind: "json", "regex", "choice", "grammar" or "structural_tag".
        text: the schema, pattern, grammar or tag; of choices the JSON list.
        backend: name of the library.
        any_whitespace: optional whitespace in JSON is allowed.
        whitespace_pattern: a regex for it, where the library supports it.
        max_whitespace_cnt: optional whitespace characters in a row, in JSON without a `whitespace_pattern`; None = any
            number.
        may_fall_back: when the library refuses it, the next one that honours it is asked.
    """

    kind: str
    text: str
    backend: str
    any_whitespace: bool = True
    whitespace_pattern: str | None = None
    max_whitespace_cnt: int | None = None
    may_fall_back: bool = False


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Tokens as grammars see them.

    Attributes:
        pieces: bytes of each id below `vocab_size`; b"" for those that no text contains (special and unused ids).
        eos_token_id: the id that ends an answer.
        special_pieces: special id -> its bytes in a text that shows special tokens.
    """

    pieces: tuple[bytes, ...]
    eos_token_id: int
    special_pieces: Mapping[int, bytes] = field(default_factory=dict)

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return len(self.pieces)

    @property
    def bitmask_size(self) -> int:
        """Words of a mask."""
        return -(-len(self.pieces) // 32)


class Matcher(ABC):
    """Follows one answer through its grammar.

    Attributes:
        is_free: every token may come next, so that no mask is needed.
    """

    @property
    def is_free(self) -> bool:
        """As the class says."""
        return False

    @abstractmethod
    def accept(self, token_id: int) -> bool:
        """Advance by a token; False, and nothing changed that matters, when the grammar does not allow it."""

    @abstractmethod
    def rollback(self, num_tokens: int) -> None:
        """Take back the last tokens that were accepted, at most `MAX_ROLLBACK`: as if they had not come."""

    @abstractmethod
    def fill_bitmask(self, bitmask: np.ndarray, row: int) -> None:
        """Write the allowed tokens, the end of the answer where it may end.

        Args:
            bitmask: [n, bitmask_size] int32, contiguous; only line `row` is written.
        """

    @abstractmethod
    def is_terminated(self) -> bool:
        """Whether the end of the answer was accepted."""


class CompiledGrammar(ABC):
    """A grammar at its beginning, shared by the requests that have it; not changed by them.

    Attributes:
        is_expensive: to follow it takes more than a step can wait for; the compile worker's probe found it, or the
            first answer that did.
        spec: what it was made of, by the library that took it; None before a pool has made it.
    """

    is_expensive = False
    spec: GrammarSpec | None = None

    @abstractmethod
    def start(self) -> Matcher:
        """A matcher at the beginning of a new answer."""


class StructuredOutputBackend(ABC):
    """A grammar library with a vocabulary.

    Args:
        vocabulary: of the model.

    Attributes:
        capabilities: what the library honours, which is known without loading it.
    """

    capabilities: ClassVar[Capabilities]

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary

    @abstractmethod
    def compile(self, spec: GrammarSpec) -> bytes:
        """Make the grammar, at whatever cost, and put it into a form that `load` takes.

        Raises:
            GrammarError: the library refuses it.
        """

    @abstractmethod
    def load(self, spec: GrammarSpec, compiled: bytes) -> CompiledGrammar:
        """The grammar that `compile`, in another process, made of `spec`."""


class GrammarError(Exception):
    """A grammar that a library refuses; says why, in words for who wrote it.

    Args:
        reason: the library's words; its files, times, checks and options are left out.
    """

    def __init__(self, reason: str) -> None:
        for pattern in _INTERNAL:
            reason = pattern.sub("", reason)
        super().__init__(" ".join(reason.split())[:500] or "it cannot be compiled")


_INTERNAL = tuple(map(re.compile, (
    r"\[\d\d:\d\d:\d\d\] ", r"(/?[\w.-]+/)*[\w-]+\.(cc|h|cpp|rs|py):\d+(:\d+)?:? ?",
    r"Check failed: \(.*?\) is (false|true): ?", r"\.? ?Enable '[^']*' option[^.;]*", r"json-schema://+",
    r" ?For further information visit \S+", r" ?\[type=[^\]]*\]",
    r" ?Make sure it is valid to the JSON Schema specification.*", r"^[A-Za-z]*(Error|Exception): ",
)))  # fmt: skip
"""What a library says of itself."""
