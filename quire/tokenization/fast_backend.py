"""Vocabularies in tokenizer.json, through the `tokenizers` library.

Called by the tokenizer loader. Owns the loaded library object, and a second one that reads special tokens in a
text as plain text, made when first asked for.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers

from quire.errors import TokenizerError
from quire.tokenization.files import MIB, read_text
from quire.tokenization.post_processor import problem_of
from quire.tokenization.token_bytes import TokenTable, table_for_decoder

MAX_TOKENIZER_JSON_BYTES = 256 * MIB
LONG_CHARS = 1024
LONG_IDS = 1024
"""From here on the library works on batches of one: `encode` and `decode` hold the interpreter's lock for their whole
run, `encode_batch_fast` and `decode_batch` release it.
"""


class FastBackend:
    """A `tokenizers.Tokenizer` as a `TokenizerBackend`."""

    def __init__(self, library: tokenizers.Tokenizer) -> None:
        library.no_truncation()
        library.no_padding()
        self._library = library
        self._plain: tokenizers.Tokenizer | None = None
        self._table = table_for_decoder(_decoder_state(library), library.id_to_token)
        added = library.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._vocab_size = max([library.get_vocab_size() - 1, *added]) + 1

    @property
    def vocab_size(self) -> int:
        """As `TokenizerBackend.vocab_size`."""
        return self._vocab_size

    @property
    def base_vocab_size(self) -> int:
        """As `TokenizerBackend.base_vocab_size`."""
        return int(self._library.get_vocab_size(with_added_tokens=False))

    @property
    def special_ids(self) -> frozenset[int]:
        """As `TokenizerBackend.special_ids`."""
        return self._special_ids

    @property
    def table(self) -> TokenTable | None:
        """As `TokenizerBackend.table`."""
        return self._table

    def encode(self, text: str, *, add_special_tokens: bool, allow_special: bool) -> list[int]:
        """As `TokenizerBackend.encode`."""
        library = self._library if allow_special else self._plain_library()
        if len(text) < LONG_CHARS:
            encoded = library.encode(text, add_special_tokens=add_special_tokens)
        else:
            (encoded,) = library.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoded.ids
        return ids

    def encode_batch(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]]:
        """As `TokenizerBackend.encode_batch`."""
        encoded = self._library.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [one.ids for one in encoded]

    def decode(self, token_ids: Sequence[int]) -> str:
        """As `TokenizerBackend.decode`."""
        ids = list(token_ids)
        if len(ids) < LONG_IDS:
            text: str = self._library.decode(ids, skip_special_tokens=False)
        else:
            (text,) = self._library.decode_batch([ids], skip_special_tokens=False)
        return text

    def id_to_token(self, token_id: int) -> str | None:
        """As `TokenizerBackend.id_to_token`."""
        token: str | None = self._library.id_to_token(token_id)
        return token

    def token_to_id(self, token: str) -> int | None:
        """As `TokenizerBackend.token_to_id`."""
        token_id: int | None = self._library.token_to_id(token)
        return token_id

    def _plain_library(self) -> tokenizers.Tokenizer:
        if self._plain is None:
            self._plain = tokenizers.Tokenizer.from_str(self._library.to_str())
            self._plain.encode_special_tokens = True
        return self._plain


def load_fast_backend(path: Path, config: dict[str, Any], special_tokens: dict[str, str]) -> FastBackend:
    """The vocabulary in tokenizer.json `path`.

    Args:
        config: tokenizer_config.json; its `added_tokens_decoder` may name tokens that tokenizer.json lacks.
        special_tokens: role ("eos_token") -> text; those in the vocabulary become special.

    Raises:
        TokenizerError: the file is malformed, or an added token cannot have the id it is given.
    """
    content = read_text(path, MAX_TOKENIZER_JSON_BYTES)
    problem = problem_of(content)
    if problem is not None:
        raise TokenizerError(
            f"{path} is not a usable tokenizer.json: {problem}", hint="download the file again", field=path.name
        )
    library = _parse(path, content)
    _add_configured_tokens(library, config.get("added_tokens_decoder"), path)
    known = {token.content for token in library.get_added_tokens_decoder().values() if token.special}
    missing = [text for text in dict.fromkeys(special_tokens.values()) if text not in known]
    library.add_special_tokens([text for text in missing if library.token_to_id(text) is not None])
    return FastBackend(library)


def _parse(path: Path, content: str) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(content)
    except BaseException as error:  # a panic in the library is not an `Exception`
        if isinstance(error, (KeyboardInterrupt, SystemExit, MemoryError)):
            raise
        raise TokenizerError(
            f"{path} is not a usable tokenizer.json: {error}", hint="download the file again", field=path.name
        ) from error


def _add_configured_tokens(library: tokenizers.Tokenizer, entries: Any, path: Path) -> None:
    """Add the tokens of `added_tokens_decoder` that tokenizer.json does not hold, each at its own id."""
    if not isinstance(entries, dict):
        return
    present = library.get_added_tokens_decoder()
    for key, entry in sorted(entries.items(), key=lambda item: int(item[0]) if item[0].isdigit() else -1):
        if not key.isdigit() or not isinstance(entry, dict) or not isinstance(entry.get("content"), str):
            raise TokenizerError(
                f"added_tokens_decoder[{key!r}] is malformed", hint="download the tokenizer again", field=path.name
            )
        if int(key) in present:
            continue
        flags = {name: bool(entry.get(name, False)) for name in ("lstrip", "rstrip", "single_word", "normalized")}
        token = tokenizers.AddedToken(entry["content"], special=bool(entry.get("special", False)), **flags)
        library.add_tokens([token])
        if library.token_to_id(entry["content"]) != int(key):
            raise TokenizerError(
                f"added token {entry['content']!r} should have id {key}, "
                f"the vocabulary gives it {library.token_to_id(entry['content'])}",
                hint="tokenizer.json and tokenizer_config.json belong to different models; download both again",
                field=path.name,
            )


def _decoder_state(library: tokenizers.Tokenizer) -> dict[str, Any] | None:
    """The decoder's part of tokenizer.json."""
    if library.decoder is None:
        return None
    state: dict[str, Any] = json.loads(library.decoder.__getstate__())
    return state
