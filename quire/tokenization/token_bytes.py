"""What bytes each token id stands for: the one view of a vocabulary that decoding needs.

Made by the tokenizer backends for the decoders that work token by token (byte-level BPE, SentencePiece,
Metaspace); read by `Tokenizer.decode` and `IncrementalDetokenizer`. Owns a cache of pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from enum import Enum
from functools import lru_cache
from typing import Any

METASPACE = "\u2581"
NOTHING_HIDDEN: frozenset[int] = frozenset()


class Leading(Enum):
    """What a decoder takes away at the very beginning of a text."""

    NOTHING = "nothing"
    ONE_SPACE = "one space"
    FIRST_TOKEN_SPACES = "every space of the first token"


class TokenTable:
    """Bytes by token id; a text is the lossy UTF-8 decoding of its tokens' bytes.

    An invalid byte sequence becomes U+FFFD, one for each maximal part of a character (Unicode 16, section 3.9,
    table 3-8), so text that was emitted never changes when more tokens follow.

    Args:
        to_bytes: bytes of a token id; b"" for an unknown one.
        leading: rule for the beginning of a text.
    """

    def __init__(self, to_bytes: Callable[[int], bytes], leading: Leading) -> None:
        self._to_bytes = to_bytes
        self._pieces: dict[int, bytes] = {}
        self.leading = leading

    def piece(self, token_id: int) -> bytes:
        """Bytes of `token_id` inside a text."""
        found = self._pieces.get(token_id)
        if found is None:
            found = self._pieces[token_id] = self._to_bytes(token_id)
        return found

    def first_piece(self, token_id: int) -> bytes:
        """Bytes of `token_id` at the beginning of a text."""
        piece = self.piece(token_id)
        if self.leading is Leading.ONE_SPACE:
            return piece.removeprefix(b" ")
        if self.leading is Leading.FIRST_TOKEN_SPACES:
            return piece.replace(b" ", b"")
        return piece

    def decode(self, token_ids: Iterable[int], hidden: Collection[int] = NOTHING_HIDDEN) -> str:
        """Text of `token_ids`, those in `hidden` left out."""
        return join_pieces(self, token_ids, hidden).decode("utf-8", "replace")


def join_pieces(table: TokenTable, token_ids: Iterable[int], hidden: Collection[int]) -> bytes:
    """Bytes of a whole text."""
    shown = (token_id for token_id in token_ids if token_id not in hidden) if hidden else iter(token_ids)
    first = b""
    for token_id in shown:
        first = table.first_piece(token_id)
        if table.piece(token_id):
            break
    return first + b"".join(map(table.piece, shown))


@lru_cache(maxsize=1)
def byte_level_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level BPE.

    Printable Latin-1 characters stand for themselves; the other bytes, in rising order, are given the characters
    from U+0100 on. Source: Radford et al. 2019 (GPT-2), section 2.2.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + position): byte for position, byte in enumerate(others)})
    return alphabet


def byte_level_bytes(token: str) -> bytes:
    """Bytes of a byte-level token; a token with a foreign character stands for its own UTF-8."""
    alphabet = byte_level_alphabet()
    try:
        return bytes([alphabet[character] for character in token])
    except KeyError:
        return token.encode("utf-8")


def metaspace_bytes(token: str, marker: str = METASPACE, *, byte_fallback: bool = True) -> bytes:
    """Bytes of a SentencePiece-like token: the marker is a space, "<0x41>" is the byte 0x41."""
    byte = fallback_byte(token) if byte_fallback else None
    return token.replace(marker, " ").encode("utf-8") if byte is None else bytes([byte])


def fallback_byte(token: str) -> int | None:
    """The byte that a token such as "<0x0A>" stands for; None for any other token."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        digits = token[3:5]
        if all(digit in "0123456789ABCDEFabcdef" for digit in digits):
            return int(digits, 16)
    return None


def table_for_decoder(state: dict[str, Any] | None, id_to_token: Callable[[int], str | None]) -> TokenTable | None:
    """The table that does what decoder `state` (its part of a tokenizer.json) does; None when none can.

    Known: ByteLevel; Metaspace; the Llama sequence Replace, ByteFallback, Fuse[, Strip].
    """
    if state is None:
        return None
    decoders = state["decoders"] if state.get("type") == "Sequence" else [state]
    kinds = [decoder.get("type") for decoder in decoders]
    if kinds == ["ByteLevel"]:
        return _table(id_to_token, byte_level_bytes, Leading.NOTHING)
    if kinds == ["Metaspace"]:
        return _metaspace_table(decoders[0], id_to_token)
    if kinds[:3] == ["Replace", "ByteFallback", "Fuse"] and len(kinds) <= 4:
        return _llama_table(decoders, id_to_token)
    return None


def _table(id_to_token: Callable[[int], str | None], to_bytes: Callable[[str], bytes], leading: Leading) -> TokenTable:
    def piece(token_id: int) -> bytes:
        token = id_to_token(token_id)
        return b"" if token is None else to_bytes(token)

    return TokenTable(piece, leading)


def _metaspace_table(decoder: dict[str, Any], id_to_token: Callable[[int], str | None]) -> TokenTable:
    marker = str(decoder.get("replacement", METASPACE))
    keeps = decoder.get("prepend_scheme") == "never" or decoder.get("add_prefix_space") is False
    leading = Leading.NOTHING if keeps else Leading.FIRST_TOKEN_SPACES
    return _table(id_to_token, lambda token: metaspace_bytes(token, marker, byte_fallback=False), leading)


def _llama_table(decoders: list[dict[str, Any]], id_to_token: Callable[[int], str | None]) -> TokenTable | None:
    if decoders[0].get("pattern") != {"String": METASPACE} or decoders[0].get("content") != " ":
        return None
    if len(decoders) == 3:
        return _table(id_to_token, metaspace_bytes, Leading.NOTHING)
    strip = decoders[3]
    if (strip.get("type"), strip.get("content"), strip.get("start"), strip.get("stop")) != ("Strip", " ", 1, 0):
        return None
    return _table(id_to_token, metaspace_bytes, Leading.ONE_SPACE)
