"""The tokenizer that a GGUF file's metadata describes, as checked values: the boundary to what others wrote.

Read by `gguf_tokenizer` and by the modules that build its parts. Takes any mapping from key to value:
`GGUFFile.metadata` or a plain dict. Values only.

Source: the GGUF specification (ggml, docs/gguf.md, "Tokenizer"), and what llama.cpp writes and accepts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.errors import TokenizerError
from quire.tokenization.token_bytes import METASPACE

PREFIX = "tokenizer.ggml."
MAX_TOKENS = 1 << 21
MAX_MERGES = 1 << 22
MAX_TOKEN_CHARS = 4096
MAX_ADDED_TOKENS = 1 << 16
MAX_CHARSMAP_BYTES = 16 << 20
MAX_TEMPLATES = 64
CONVERT_AGAIN = "download the file again, convert it anew, or give the directory of the original model as --tokenizer"
# Metadata's name of a token with a part to play -> that part, as Hugging Face and llama.cpp call it.
ROLE_KEYS: Mapping[str, str] = {
    "bos_token_id": "bos", "eos_token_id": "eos", "eot_token_id": "eot", "eom_token_id": "eom",
    "unknown_token_id": "unk", "seperator_token_id": "sep", "padding_token_id": "pad", "cls_token_id": "cls",
    "mask_token_id": "mask",
}  # fmt: skip
UNUSED_PARTS = ("sep", "pad", "cls", "mask")
"""No text is encoded with these by the models that Quire runs."""
# Where the metadata does not say, and these are control tokens: the ids that vocabularies of the kind have.
USUAL_IDS: Mapping[str, Mapping[str, int]] = {
    "llama": {"bos": 1, "eos": 2, "unk": 0},
    "bert": {"bos": 101, "unk": 100, "sep": 102, "pad": 0, "mask": 103},
    "t5": {"eos": 1, "unk": 2, "pad": 0},
}
FLAGS = ("add_bos_token", "add_eos_token", "add_sep_token", "add_space_prefix", "remove_extra_whitespaces",
         "normalizer.lowercase", "normalizer.strip_accents")  # fmt: skip


class TokenType(IntEnum):
    """What an entry of the vocabulary is; numbers as SentencePiece's."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class GGUFVocabulary:
    """The fields of one tokenizer.

    Attributes:
        model: "gpt2", "llama", "bert", "t5" or "gemma4".
        pre: name of the pre-tokenizer; "" = none given.
        architecture: of the model; "" = none given.
        tokens: entry of each id, each once, spelled as in the tokenizer.json of the same model.
        types: [len(tokens)] a `TokenType` each.
        scores: [len(tokens)]; None = none given.
        merges: pairs, first to last; None = none given.
        ids: part ("bos", "eos", ...) -> id.
        flags: those of `FLAGS` that are given.
        charsmap: SentencePiece's compiled rules of normalisation.
        templates: name ("default", "tool_use") -> chat template.
    """

    model: str
    pre: str
    architecture: str
    tokens: list[str]
    types: list[int]
    scores: npt.NDArray[np.float64] | None
    merges: list[tuple[str, str]] | None
    ids: Mapping[str, int]
    flags: Mapping[str, bool]
    charsmap: bytes
    templates: Mapping[str, str]

    def ids_of(self, *types: TokenType) -> list[int]:
        """Ids of the entries of these types, rising."""
        wanted = frozenset(map(int, types))
        return [token_id for token_id, kind in enumerate(self.types) if kind in wanted]


def is_spaces(token: str) -> bool:
    """True for a run of SentencePiece's mark of a space."""
    return not token.strip(METASPACE)


def read_fields(metadata: Mapping[str, Any]) -> GGUFVocabulary:
    """The tokenizer that `metadata` describes.

    Raises:
        TokenizerError: there is none, or a field is missing, of the wrong type or length, or out of range; names it.
    """
    model = _text(metadata, PREFIX + "model")
    if not model:
        raise _wrong(
            PREFIX + "model", "is missing: the file has no tokenizer",
            "give the directory of the original model as --tokenizer, or use token ids only: skip_tokenizer_init",
        )  # fmt: skip
    tokens = _tokens(metadata)
    types = _types(metadata, len(tokens))
    merges = PREFIX + "merges"
    return GGUFVocabulary(
        model=model,
        pre=_text(metadata, PREFIX + "pre") or "",
        architecture=_text(metadata, "general.architecture") or "",
        tokens=_spelled(model, tokens, types),
        types=types,
        scores=_scores(metadata, len(tokens)),
        merges=_merges(_texts(metadata, merges, MAX_MERGES)) if merges in metadata else None,
        ids={**_usual_ids(model, types), **_ids(metadata, len(tokens))},
        flags=_flags(metadata),
        charsmap=_charsmap(metadata),
        templates=read_templates(metadata),
    )


def read_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Name -> chat template; "default" is the one without a name.

    Raises:
        TokenizerError: one is not a text, or there are too many.
    """
    default = _text(metadata, "tokenizer.chat_template")
    found = {} if default is None else {"default": default}
    prefix = "tokenizer.chat_template."
    for key in metadata:
        if key.startswith(prefix):
            found[key.removeprefix(prefix)] = _text(metadata, key) or ""
    if len(found) > MAX_TEMPLATES:
        raise _wrong("tokenizer.chat_templates", f"names {len(found)} templates, at most {MAX_TEMPLATES} are read")
    return found


def _wrong(field: str, problem: str, hint: str = CONVERT_AGAIN) -> TokenizerError:
    return TokenizerError(f"{field} {problem}", hint=hint, field=field)


def _text(metadata: Mapping[str, Any], key: str) -> str | None:
    value = metadata.get(key)
    if value is not None and not isinstance(value, str):
        raise _wrong(key, f"is a {type(value).__name__}, a string is needed")
    return value


def _texts(metadata: Mapping[str, Any], key: str, most: int) -> list[str]:
    value = metadata.get(key)
    if value is None:
        raise _wrong(key, "is missing from the file's metadata")
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise _wrong(key, f"is a {type(value).__name__}, an array of strings is needed")
    if len(value) > most:
        raise _wrong(key, f"has {len(value)} strings, at most {most} are read")
    found = list(value)
    if not all(isinstance(one, str) for one in found):
        raise _wrong(key, "holds something that is not a string")
    return found


def _tokens(metadata: Mapping[str, Any]) -> list[str]:
    key = PREFIX + "tokens"
    tokens = _texts(metadata, key, MAX_TOKENS)
    if not tokens:
        raise _wrong(key, "is empty")
    if not all(tokens):  # as llama.cpp reads them: an entry that no text gives
        tokens = [token or f"[EMPTY_{token_id}]" for token_id, token in enumerate(tokens)]
    if len(set(tokens)) != len(tokens):
        seen: dict[str, int] = {}
        for token_id, token in enumerate(tokens):
            if token in seen:
                raise _wrong(key, f"has {token[:80]!r} twice, as {seen[token]} and as {token_id}")
            seen[token] = token_id
    longest = max(map(len, tokens))
    if longest > MAX_TOKEN_CHARS:
        raise _wrong(key, f"has a token of {longest} characters, at most {MAX_TOKEN_CHARS} are read")
    return tokens


def _spelled(model: str, tokens: list[str], types: list[int]) -> list[str]:
    """The entries as Hugging Face spells them. llama.cpp writes Llama's runs of spaces as such."""
    if model == "bert":
        return [_word_piece(token, kind) for token, kind in zip(tokens, types, strict=True)]
    if model == "llama":
        runs = [i for i, kind in enumerate(types) if kind == TokenType.USER_DEFINED and not tokens[i].strip(" ")]
        taken = set(tokens) if runs else set()
        for token_id in runs:
            spelled = METASPACE * len(tokens[token_id])
            if spelled not in taken:
                tokens[token_id] = spelled
    return tokens


def _word_piece(token: str, kind: int) -> str:
    """llama.cpp marks what begins a word; Hugging Face marks what continues one."""
    if kind in (TokenType.CONTROL, TokenType.UNKNOWN):
        return token
    return token[1:] if token.startswith(METASPACE) else f"##{token}"


def _numbers(metadata: Mapping[str, Any], key: str, kinds: str, count: int | None) -> npt.NDArray[Any] | None:
    """An array of numbers of the given NumPy kinds."""
    value = metadata.get(key)
    if value is None:
        return None
    if isinstance(value, (str, bytes)) or not isinstance(value, (Sequence, np.ndarray)):
        raise _wrong(key, f"is a {type(value).__name__}, an array of numbers is needed")
    try:
        found = np.asarray(value)
    except (ValueError, OverflowError) as error:
        raise _wrong(key, "is not an array of numbers") from error
    if found.ndim != 1 or (found.size and found.dtype.kind not in kinds):
        raise _wrong(key, f"is an array of {found.dtype}, another type of number is needed")
    if count is not None and found.size != count:
        raise _wrong(key, f"has {found.size} numbers for the {count} strings of {PREFIX}tokens")
    return found


def _types(metadata: Mapping[str, Any], count: int) -> list[int]:
    key = PREFIX + "token_type"
    found = _numbers(metadata, key, "iu", count)
    if found is None:
        return [int(TokenType.NORMAL)] * count
    if int(found.min()) < TokenType.UNDEFINED or int(found.max()) > TokenType.BYTE:
        wrong = next(one for one in found.tolist() if not TokenType.UNDEFINED <= one <= TokenType.BYTE)
        raise _wrong(key, f"has a token of type {wrong}; types are 1 to 6")
    types: list[int] = found.tolist()
    return types


def _scores(metadata: Mapping[str, Any], count: int) -> npt.NDArray[np.float64] | None:
    key = PREFIX + "scores"
    found = _numbers(metadata, key, "fiu", count)
    if found is None:
        return None
    if not np.isfinite(found).all():
        raise _wrong(key, "holds a number that is not finite")
    return found.astype(np.float64)


def _merges(merges: list[str]) -> list[tuple[str, str]]:
    """The pairs, each "left right" in the file."""
    pairs = [(left, right) for left, _, right in [merge.partition(" ") for merge in merges]]
    for number, (left, right) in enumerate(pairs):
        if not left or not right or " " in right:
            shown = merges[number][:80]
            raise _wrong(PREFIX + "merges", f"has {shown!r} as number {number}; two tokens and a space are needed")
    return pairs


def _ids(metadata: Mapping[str, Any], count: int) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, part in ROLE_KEYS.items():
        value = metadata.get(PREFIX + name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
            raise _wrong(PREFIX + name, f"is a {type(value).__name__}, an integer is needed")
        # Converters write "there is none" as the largest number, or as -1, and padding beyond the vocabulary.
        if int(value) in (-1, 0xFFFFFFFF) or (part in UNUSED_PARTS and not 0 <= int(value) < count):
            continue
        if not 0 <= int(value) < count:
            raise _wrong(PREFIX + name, f"is {value}, the vocabulary has ids 0 to {count - 1}")
        found[part] = int(value)
    return found


def _usual_ids(model: str, types: list[int]) -> dict[str, int]:
    usual = USUAL_IDS.get(model, {}).items()
    control = (TokenType.CONTROL, TokenType.UNKNOWN)
    return {part: token_id for part, token_id in usual if token_id < len(types) and types[token_id] in control}


def _flags(metadata: Mapping[str, Any]) -> dict[str, bool]:
    found: dict[str, bool] = {}
    for name in FLAGS:
        value = metadata.get(PREFIX + name)
        if value is None:
            continue
        if not isinstance(value, (bool, np.bool_)):
            raise _wrong(PREFIX + name, f"is a {type(value).__name__}, a truth value is needed")
        found[name] = bool(value)
    return found


def _charsmap(metadata: Mapping[str, Any]) -> bytes:
    """The rules, whose first four bytes are the length of a table that is followed by texts."""
    key = PREFIX + "precompiled_charsmap"
    found = _numbers(metadata, key, "iu", None)
    if found is None or not found.size:
        return b""
    if found.dtype.itemsize != 1 and (int(found.min()) < -128 or int(found.max()) > 255):
        raise _wrong(key, "is not an array of bytes")
    data = (found & 0xFF).astype(np.uint8).tobytes()
    if len(data) > MAX_CHARSMAP_BYTES:
        raise _wrong(key, f"has {len(data)} bytes, at most {MAX_CHARSMAP_BYTES} are read")
    table_bytes = int.from_bytes(data[:4], "little")
    if len(data) < 8 or table_bytes % 4 or 4 + table_bytes >= len(data):
        raise _wrong(key, f"says that its table has {table_bytes} bytes, of {len(data)} in all")
    return data
