"""Vocabularies in a SentencePiece tokenizer.model.

Called by the tokenizer loader when there is no tokenizer.json. `sentencepiece` is imported only then. Owns the
loaded processors. Special tokens are cut out of the text first: SentencePiece itself never recognises them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.errors import TokenizerError
from quire.tokenization.files import MIB, read_bytes
from quire.tokenization.token_bytes import METASPACE, Leading, TokenTable, metaspace_bytes

MAX_MODEL_BYTES = 64 * MIB
# A second `normalizer_spec` (field 3) with `add_dummy_prefix` (its field 3) false: protocol buffers merge a message
# that appears twice, and the later value of a field wins.
NO_DUMMY_PREFIX = b"\x1a\x02\x18\x00"


@dataclass(frozen=True, slots=True)
class SentencePieceOptions:
    """What tokenizer_config.json says about a SentencePiece vocabulary.

    Attributes:
        add_bos, add_eos: written around a text that is encoded with special tokens.
        prefix_after_special: a text that follows a special token begins with a space too (Llama's "legacy").
        added: text -> id of tokens beside the model's own.
        special: texts of special tokens.
    """

    add_bos: bool
    add_eos: bool
    prefix_after_special: bool
    added: dict[str, int]
    special: frozenset[str]


class SentencePieceBackend:
    """A `SentencePieceProcessor` as a `TokenizerBackend`."""

    def __init__(self, proto: bytes, options: SentencePieceOptions) -> None:
        self._library = _processor(proto)
        self._without_prefix = _processor(proto + NO_DUMMY_PREFIX)
        self._options = options
        self._num_pieces = int(self._library.get_piece_size())
        self._added_by_id = {token_id: text for text, token_id in options.added.items()}
        self._specials = self._special_tokens()
        self._special_ids = frozenset(self._specials.values())
        marked = {**options.added, **self._specials}
        self._splitter = _splitter(marked)
        self._plain_splitter = _splitter({text: i for text, i in marked.items() if i not in self._special_ids})
        self._marked = marked
        has_prefix = self._library.encode_as_pieces("x")[:1] != self._without_prefix.encode_as_pieces("x")[:1]
        self._table = TokenTable(self._bytes_of, Leading.ONE_SPACE if has_prefix else Leading.NOTHING)

    @property
    def vocab_size(self) -> int:
        """As `TokenizerBackend.vocab_size`."""
        return max([self._num_pieces - 1, *self._added_by_id]) + 1

    @property
    def base_vocab_size(self) -> int:
        """As `TokenizerBackend.base_vocab_size`."""
        return self._num_pieces

    @property
    def special_ids(self) -> frozenset[int]:
        """As `TokenizerBackend.special_ids`."""
        return self._special_ids

    @property
    def table(self) -> TokenTable:
        """As `TokenizerBackend.table`."""
        return self._table

    def encode(self, text: str, *, add_special_tokens: bool, allow_special: bool) -> list[int]:
        """As `TokenizerBackend.encode`."""
        bos, eos = int(self._library.bos_id()), int(self._library.eos_id())
        ids = [bos] if add_special_tokens and self._options.add_bos and bos >= 0 else []
        after_special = False
        for part in (self._splitter if allow_special else self._plain_splitter).split(text):
            if part in self._marked and (allow_special or part not in self._specials):
                ids.append(self._marked[part])
                after_special = True
            elif part:
                has_prefix = not after_special or self._options.prefix_after_special
                ids.extend((self._library if has_prefix else self._without_prefix).encode(part))
        if add_special_tokens and self._options.add_eos and eos >= 0:
            ids.append(eos)
        return ids

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        """As `TokenizerBackend.encode_batch`."""
        return [self.encode(text, add_special_tokens=add_special_tokens, allow_special=True) for text in texts]

    def decode(self, token_ids: Sequence[int]) -> str:
        """As `TokenizerBackend.decode`."""
        return self._table.decode(token_ids)

    def id_to_token(self, token_id: int) -> str | None:
        """As `TokenizerBackend.id_to_token`."""
        if token_id in self._added_by_id:
            return self._added_by_id[token_id]
        return str(self._library.id_to_piece(token_id)) if 0 <= token_id < self._num_pieces else None

    def token_to_id(self, token: str) -> int | None:
        """As `TokenizerBackend.token_to_id`."""
        if token in self._options.added:
            return self._options.added[token]
        token_id = int(self._library.piece_to_id(token))
        return token_id if self.id_to_token(token_id) == token else None

    def own_special_tokens(self) -> dict[str, str]:
        """Role -> text of the special tokens that the model file itself names."""
        ids = {"bos_token": int(self._library.bos_id()), "eos_token": int(self._library.eos_id())}
        return {role: str(self._library.id_to_piece(token_id)) for role, token_id in ids.items() if token_id >= 0}

    def _special_tokens(self) -> dict[str, int]:
        """Text -> id of control and unknown pieces, and of what the configuration calls special."""
        library = self._library
        ids = [i for i in range(self._num_pieces) if library.is_control(i) or library.is_unknown(i)]
        specials = {str(library.id_to_piece(token_id)): token_id for token_id in ids}
        for text in self._options.special:
            token_id = self.token_to_id(text)
            if token_id is not None:
                specials[text] = token_id
        return specials

    def _bytes_of(self, token_id: int) -> bytes:
        token = self.id_to_token(token_id)
        if token is None:
            return b""
        if token_id in self._added_by_id or token_id in self._special_ids:
            return token.encode("utf-8")
        return metaspace_bytes(token, METASPACE, byte_fallback=bool(self._library.is_byte(token_id)))


def load_sentencepiece_backend(
    path: Path, config: dict[str, Any], added: dict[str, Any], special_tokens: dict[str, str]
) -> SentencePieceBackend:
    """The vocabulary in tokenizer.model `path`.

    Args:
        config: tokenizer_config.json.
        added: added_tokens.json, text -> id.
        special_tokens: role ("eos_token") -> text.

    Raises:
        TokenizerError: the file is malformed, or the `sentencepiece` package is missing.
    """
    tokens = {text: token_id for text, token_id in added.items() if isinstance(token_id, int)}
    special = set(special_tokens.values())
    entries = config.get("added_tokens_decoder")
    for key, entry in (entries if isinstance(entries, dict) else {}).items():
        if key.isdigit() and isinstance(entry, dict) and isinstance(entry.get("content"), str):
            tokens[entry["content"]] = int(key)
            special |= {entry["content"]} if entry.get("special") else set()
    options = SentencePieceOptions(
        add_bos=config.get("add_bos_token", True) is not False,
        add_eos=config.get("add_eos_token", False) is True,
        prefix_after_special=config.get("legacy", True) is not False,
        added=tokens,
        special=frozenset(special),
    )
    return SentencePieceBackend(read_bytes(path, MAX_MODEL_BYTES), options)


def _processor(proto: bytes) -> Any:
    try:
        import sentencepiece  # an optional package, needed for this kind of file alone
    except ImportError as error:
        raise TokenizerError(
            "tokenizer.model needs the package 'sentencepiece'", hint="pip install sentencepiece", field="tokenizer"
        ) from error
    processor = sentencepiece.SentencePieceProcessor()
    try:
        processor.LoadFromSerializedProto(proto)
    except RuntimeError as error:
        raise TokenizerError(
            f"tokenizer.model is not a SentencePiece model: {error}", hint="download the file again", field="tokenizer"
        ) from error
    return processor


def _splitter(marked: dict[str, int]) -> re.Pattern[str]:
    """Cuts a text at marked tokens and keeps them; the longest wins."""
    texts = sorted((text for text in marked if text), key=len, reverse=True)
    pattern = "|".join(re.escape(text) for text in texts) or r"(?!)"
    return re.compile(f"({pattern})")
