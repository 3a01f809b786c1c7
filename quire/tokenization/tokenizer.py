"""Tokenizer: text to token ids and back, whatever kind of vocabulary a model directory holds.

Made by the engine factory with `load_tokenizer`; used by the input processor, the detokenizer and users
(`LLM.get_tokenizer`). Owns the loaded vocabulary, which never changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from quire.errors import TokenizerError, ValidationError
from quire.formats.gguf_file import GGUFFile, is_gguf
from quire.tokenization.backend import TokenizerBackend
from quire.tokenization.fast_backend import load_fast_backend
from quire.tokenization.files import no_tokenizer, read_json_object
from quire.tokenization.gguf_tokenizer import read_gguf_tokenizer
from quire.tokenization.sentencepiece_model import load_sentencepiece_backend
from quire.tokenization.token_bytes import NOTHING_HIDDEN, TokenTable, metaspace_bytes

ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """A vocabulary with its special tokens.

    Args:
        backend: the loaded vocabulary.
        special_tokens: role ("eos_token") -> text.
        config: tokenizer_config.json as read.
        directory: where it was loaded from; None = not from a directory.
        turn_end_ids: ids that end an answer, where the vocabulary itself says so (GGUF).
    """

    def __init__(
        self,
        backend: TokenizerBackend,
        special_tokens: dict[str, str],
        config: dict[str, Any] | None = None,
        directory: Path | None = None,
        *,
        turn_end_ids: Sequence[int] = (),
    ) -> None:
        self._backend = backend
        self.turn_end_ids = tuple(turn_end_ids)
        self.special_tokens = dict(special_tokens)
        self.config = config or {}
        self.directory = directory

    @property
    def vocab_size(self) -> int:
        """Highest token id plus one."""
        return self._backend.vocab_size

    @property
    def base_vocab_size(self) -> int:
        """Number of entries without added tokens."""
        return self._backend.base_vocab_size

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that `skip_special_tokens` leaves out."""
        return self._backend.special_ids

    @property
    def table(self) -> TokenTable | None:
        """Bytes by token id; None when this vocabulary's decoder does not work token by token."""
        return self._backend.table

    @property
    def bos_token_id(self) -> int | None:
        """Id of the token that begins a text, if there is one."""
        return self._id_of_role("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        """Id of the token that ends a text, if there is one."""
        return self._id_of_role("eos_token")

    def encode(self, text: str, add_special_tokens: bool = True, *, allow_special: bool = True) -> list[int]:
        """Token ids of `text`.

        Args:
            text: any valid Unicode.
            add_special_tokens: write what the vocabulary puts around a text (usually BOS in front).
            allow_special: a special token's name in `text` is that token; False reads it as plain text.

        Raises:
            ValidationError: `text` is not a string or holds lone surrogates.
        """
        _check_text(text)
        return self._backend.encode(text, add_special_tokens=add_special_tokens, allow_special=allow_special)

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of each of `texts`, as `encode` but all at once; raises as that does."""
        for text in texts:
            _check_text(text)
        return self._backend.encode_batch(texts, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: int | Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of `token_ids`; ids outside the vocabulary have none."""
        ids = [token_ids] if isinstance(token_ids, int) else token_ids
        hidden = self.special_ids if skip_special_tokens else NOTHING_HIDDEN
        if self.table is not None:
            return self.table.decode(ids, hidden)
        return self._backend.decode([token_id for token_id in ids if token_id not in hidden])

    def token_text(self, token_id: int) -> str:
        """What one token looks like inside a text: its leading space kept, special tokens shown."""
        if self.table is not None:
            return self.table.piece(token_id).decode("utf-8", "replace")
        token = self._backend.id_to_token(token_id)
        return "" if token is None else metaspace_bytes(token).decode("utf-8", "replace")

    def convert_ids_to_tokens(self, token_ids: Iterable[int]) -> list[str]:
        """The vocabulary's entries; "" for ids it does not have."""
        return [self._backend.id_to_token(token_id) or "" for token_id in token_ids]

    def convert_tokens_to_ids(self, tokens: Iterable[str]) -> list[int | None]:
        """The ids of vocabulary entries; None for those it does not have."""
        return [self._backend.token_to_id(token) for token in tokens]

    def vocabulary(self) -> dict[str, int]:
        """Entry -> id, added tokens included."""
        entries = ((self._backend.id_to_token(token_id), token_id) for token_id in range(self.vocab_size))
        return {token: token_id for token, token_id in entries if token is not None}

    def _id_of_role(self, role: str) -> int | None:
        text = self.special_tokens.get(role)
        return None if text is None else self._backend.token_to_id(text)


def _check_text(text: Any) -> None:
    """Refuse what is no text, or not valid Unicode."""
    if not isinstance(text, str):
        raise ValidationError(f"text must be a str, not {type(text).__name__}", field="prompt")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValidationError(
            f"the input is not valid Unicode: half of a surrogate pair at character {error.start}",
            hint="decode the text as UTF-8 before sending it",
            field="prompt",
        ) from error


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer in a model directory (tokenizer.json, else SentencePiece's tokenizer.model) or a GGUF file.

    Raises:
        TokenizerError: there is none, or it is malformed; nothing in the directory is executed.
        WeightsError: the GGUF file is malformed.
    """
    root = Path(path)
    if is_gguf(root) and not root.is_dir():
        return tokenizer_of_file(GGUFFile(root))
    config = read_json_object(root / "tokenizer_config.json")
    special_tokens = _special_tokens(read_json_object(root / "special_tokens_map.json"), config)
    if (root / "tokenizer.json").exists():
        backend: TokenizerBackend = load_fast_backend(root / "tokenizer.json", config, special_tokens)
    elif (root / "tokenizer.model").exists():
        added = read_json_object(root / "added_tokens.json")
        pieces = load_sentencepiece_backend(root / "tokenizer.model", config, added, special_tokens)
        special_tokens = {**pieces.own_special_tokens(), **special_tokens}
        backend = pieces
    else:
        raise no_tokenizer(root)
    return Tokenizer(backend, special_tokens, config, root)


def tokenizer_of_file(file: GGUFFile) -> Tokenizer:
    """The tokenizer in an open GGUF file; raises as `tokenizer_from_metadata`, with the file's name."""
    try:
        return tokenizer_from_metadata(file.metadata)
    except TokenizerError as error:
        raise TokenizerError(f"{file.path}: {error.message}", hint=error.hint, field=error.field) from error


def tokenizer_from_metadata(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer in a GGUF file's metadata (key -> value).

    Raises:
        TokenizerError: there is none, or it is malformed or of a kind that Quire does not know.
    """
    found = read_gguf_tokenizer(metadata)
    return Tokenizer(found.backend, found.special_tokens, found.config, turn_end_ids=found.turn_end_ids)


def _special_tokens(*sources: dict[str, Any]) -> dict[str, str]:
    """Role -> text; a later source wins."""
    found: dict[str, str] = {}
    for source in sources:
        for role in ROLES:
            text = _token_text(source.get(role))
            if text:
                found[role] = text
        extra = source.get("additional_special_tokens")
        for position, entry in enumerate(extra if isinstance(extra, list) else []):
            text = _token_text(entry)
            if text:
                found[f"additional_special_tokens[{position}]"] = text
    return found


def _token_text(entry: Any) -> str | None:
    """The text of a special token, written as a string or as an object with `content`."""
    content = entry.get("content") if isinstance(entry, dict) else entry
    return content if isinstance(content, str) else None
