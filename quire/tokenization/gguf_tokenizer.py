"""The tokenizer and the chat templates in a GGUF file's metadata, as those of a model directory.

Called by `tokenizer.tokenizer_from_metadata`. What comes out is a `tokenizers.Tokenizer` behind the same backend as
that of a tokenizer.json, so that encoding, decoding and control tokens are one code. No state.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import processors

from quire.errors import TokenizerError
from quire.tokenization.fast_backend import FastBackend
from quire.tokenization.gguf_fields import (
    CONVERT_AGAIN,
    MAX_ADDED_TOKENS,
    PREFIX,
    GGUFVocabulary,
    TokenType,
    is_spaces,
    read_fields,
)
from quire.tokenization.gguf_models import build_model, kind_of, unknown_id
from quire.tokenization.gguf_pre_tokenizers import pre_tokenization

ADDED = (TokenType.CONTROL, TokenType.UNKNOWN, TokenType.USER_DEFINED)
# What fills a vocabulary up to the rows of the embedding: no text gives it and it has no text.
FILLER = re.compile(r"\[PAD\d+\]")
# Converters call these control tokens; Hugging Face does not.
RESERVED = re.compile(r"<unused\d+>")
# Gemma's and Phi 3's files do not say everything that their tokenizers do.
GEMMA_4_CONTROL = frozenset((
    "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", "<|tool_response>", "<tool_response|>", '<|"|>',
))  # fmt: skip
PHI_3_KEEPS_SPACES = frozenset(("<unk>", "<s>", "<|endoftext|>"))
# Control tokens that end a turn, in whatever model has them. Few files name more than one in their metadata.
TURN_ENDS = frozenset((
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>",
    "<end_of_turn>", "<turn|>", "<|tool_response>", "<|endoftext|>", "<|end_of_text|>", "<EOT>", "_<EOT>", "[EOT]",
    "[EOS]", "<end_of_utterance>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "[e~[", "</s>", "<eos>",
))  # fmt: skip
# Where a message ends with <|end|> and a turn with these, <|end|> ends none.
MESSAGE_END, TURN_ENDS_BESIDE_IT = "<|end|>", ({"<|return|>", "<|call|>"}, {"<|calls|>", "<|flush|>"})


@dataclass(frozen=True, slots=True)
class GGUFTokenizer:
    """What a `Tokenizer` is made of.

    Attributes:
        special_tokens: role ("eos_token") -> text.
        config: what tokenizer_config.json would say of chat templates.
        turn_end_ids: ids that end an answer, the end of text first.
    """

    backend: FastBackend
    special_tokens: dict[str, str]
    config: dict[str, Any]
    turn_end_ids: tuple[int, ...]


def read_gguf_tokenizer(metadata: Mapping[str, Any]) -> GGUFTokenizer:
    """The tokenizer that `metadata` (key -> value, as `GGUFFile.metadata`) describes.

    Raises:
        TokenizerError: a field is missing, malformed or of a kind that Quire does not know; names it.
    """
    fields = read_fields(metadata)
    size = _model_size(fields)
    library = build_model(fields, size)
    special = _special_ids(fields)
    _add_tokens(library, fields, size, special)
    _set_ends(library, fields)
    tokens = fields.tokens
    roles = {
        f"{part}_token": tokens[i] for part, i in fields.ids.items() if part not in ("eot", "eom") and i in special
    }
    templates = [{"name": name, "template": source} for name, source in fields.templates.items()]
    config = {"chat_template": templates} if templates else {}
    return GGUFTokenizer(FastBackend(library), roles, config, _turn_ends(fields, special))


def _model_size(fields: GGUFVocabulary) -> int:
    """Entries of the model itself: those before the added tokens at the end, which are followed by filler alone."""
    end = len(fields.tokens)
    while end and _is_filler(fields, end - 1):
        end -= 1
    while end and _is_added(fields, end - 1) and not is_spaces(fields.tokens[end - 1]):
        end -= 1
    unknown = unknown_id(fields)
    return end if unknown is None or kind_of(fields) == "gpt2" else max(end, unknown + 1)


def _is_filler(fields: GGUFVocabulary, token_id: int) -> bool:
    return fields.types[token_id] == TokenType.UNUSED and FILLER.fullmatch(fields.tokens[token_id]) is not None


def _is_added(fields: GGUFVocabulary, token_id: int) -> bool:
    """True for an entry that is found in a text before the text is split."""
    return fields.types[token_id] in ADDED


def _special_ids(fields: GGUFVocabulary) -> frozenset[int]:
    """Ids that a user's text never becomes, and that have no text in an answer."""
    control = fields.ids_of(TokenType.CONTROL, TokenType.UNKNOWN)
    found = {token_id for token_id in control if not RESERVED.fullmatch(fields.tokens[token_id])}
    if kind_of(fields) == "gemma4":
        found |= {i for i in fields.ids_of(TokenType.USER_DEFINED) if fields.tokens[i] in GEMMA_4_CONTROL}
    # Old files call every entry normal, and some name an ordinary one, such as "!", as padding or beginning.
    found |= {
        i for part, i in fields.ids.items() if part in ("eos", "eot", "eom") or fields.tokens[i].startswith(("<", "["))
    }
    return frozenset(found)


def _add_tokens(library: tokenizers.Tokenizer, fields: GGUFVocabulary, size: int, special: frozenset[int]) -> None:
    """The tokens that are found in a text before it is split: special ones, and those that users' text may hold."""
    tokens = fields.tokens
    ids = special.union(fields.ids_of(*ADDED))
    if kind_of(fields) == "gemma4":
        ids = ids.union(_added_by_gemma(fields, size))
    if len(ids) > MAX_ADDED_TOKENS:
        raise TokenizerError(
            f"{PREFIX}token_type has {len(ids)} control and user-defined tokens, at most {MAX_ADDED_TOKENS} are read",
            hint=CONVERT_AGAIN, field=PREFIX + "token_type",
        )  # fmt: skip
    strips = fields.architecture == "phi3" and fields.model == "llama"
    ordered = sorted(ids)
    library.add_tokens([
        tokenizers.AddedToken(
            tokens[i], special=i in special, normalized=False, rstrip=strips and tokens[i] not in PHI_3_KEEPS_SPACES
        )
        for i in ordered
    ])  # fmt: skip
    for token_id in ordered:
        if library.token_to_id(tokens[token_id]) != token_id:
            raise TokenizerError(
                f"{PREFIX}tokens cannot be read: {tokens[token_id][:80]!r} should have id {token_id}, "
                f"and gets {library.token_to_id(tokens[token_id])}",
                hint=CONVERT_AGAIN, field=PREFIX + "tokens",
            )  # fmt: skip


def _added_by_gemma(fields: GGUFVocabulary, size: int) -> set[int]:
    """What Gemma adds to its vocabulary, which files call ordinary: entries that no merge makes (newlines, tags of
    HTML), and runs of its mark of a space.
    """
    made = {left + right for left, right in fields.merges or ()}
    entries = zip(fields.tokens[:size], fields.types[:size], strict=True)
    return {
        token_id
        for token_id, (token, kind) in enumerate(entries)
        if kind == TokenType.NORMAL and len(token) > 1 and (token not in made or is_spaces(token))
    }


def _set_ends(library: tokenizers.Tokenizer, fields: GGUFVocabulary) -> None:
    """What is written around a text that is encoded with special tokens."""
    first = _end(fields, "add_bos_token", ("bos", "cls"), _adds_bos(fields))
    last = _end(fields, "add_eos_token", ("eos",), fields.model == "t5")
    if fields.model == "bert":
        last = _end(fields, "add_sep_token", ("sep", "eos"), True)
    ends = {name: token_id for name, token_id in (("first", first), ("last", last)) if token_id is not None}
    if not ends:
        return
    single = [name for name in ("first", "$A", "last") if name == "$A" or name in ends]
    special = [{"id": name, "ids": [i], "tokens": [fields.tokens[i]]} for name, i in ends.items()]
    library.post_processor = processors.TemplateProcessing(single=single, special_tokens=special)


def _adds_bos(fields: GGUFVocabulary) -> bool:
    """Whether BOS is written where the file does not say."""
    if kind_of(fields) == "gpt2":
        return pre_tokenization(fields.pre or "default").add_bos
    return fields.model != "t5"


def _end(fields: GGUFVocabulary, flag: str, names: tuple[str, ...], default: bool) -> int | None:
    """The id that is written at one end of a text; None = none is."""
    if not fields.flags.get(flag, default):
        return None
    found = next((fields.ids[name] for name in names if name in fields.ids), None)
    if found is None and flag in fields.flags:
        raise TokenizerError(
            f"{PREFIX}{flag} is set, but {PREFIX}{names[0]}_token_id is missing", hint=CONVERT_AGAIN,
            field=f"{PREFIX}{names[0]}_token_id",
        )  # fmt: skip
    return found


def _turn_ends(fields: GGUFVocabulary, special: frozenset[int]) -> tuple[int, ...]:
    """Ids that end an answer, the end of text first: those that the file names, and those whose name says so."""
    named = [fields.ids[part] for part in ("eos", "eot", "eom") if part in fields.ids]
    by_name = [token_id for token_id in sorted(special) if fields.tokens[token_id] in TURN_ENDS]
    texts = {fields.tokens[token_id] for token_id in by_name}
    if any(ends <= texts for ends in TURN_ENDS_BESIDE_IT):
        by_name = [token_id for token_id in by_name if fields.tokens[token_id] != MESSAGE_END]
    return tuple(dict.fromkeys([*named, *by_name]))
