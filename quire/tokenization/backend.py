"""What `Tokenizer` asks of the library that splits text: `tokenizers` or `sentencepiece`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from quire.tokenization.token_bytes import TokenTable


class TokenizerBackend(Protocol):
    """One loaded vocabulary."""

    @property
    def vocab_size(self) -> int:
        """Highest token id plus one."""

    @property
    def base_vocab_size(self) -> int:
        """Number of entries without added tokens."""

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of special tokens."""

    @property
    def table(self) -> TokenTable | None:
        """Bytes by token id; None when the vocabulary has no such view."""

    def encode(self, text: str, *, add_special_tokens: bool, allow_special: bool) -> list[int]:
        """Token ids of `text`."""

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        """Token ids of each of `texts`, special tokens' names in them read as these."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of `token_ids`, special tokens included. Asked only when there is no `table`."""

    def id_to_token(self, token_id: int) -> str | None:
        """The vocabulary's entry; None when there is none."""

    def token_to_id(self, token: str) -> int | None:
        """The id of vocabulary entry `token`; None when there is none."""
