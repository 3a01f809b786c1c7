"""A `tokenizers.Tokenizer` for each kind of vocabulary that GGUF files hold, without its added tokens.

Called by `gguf_tokenizer`. Each builder gives what the tokenizer.json of the same model holds: normalizer,
pre-tokenizer, model and decoder. No state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from quire.errors import TokenizerError
from quire.logger import get_logger
from quire.tokenization.gguf_fields import CONVERT_AGAIN, PREFIX, GGUFVocabulary, TokenType, is_spaces
from quire.tokenization.gguf_pre_tokenizers import pre_tokenization
from quire.tokenization.token_bytes import METASPACE

logger = get_logger(__name__)

MAX_PIECE_CHARS = 8 << 20
"""Of a SentencePiece vocabulary in all; Gemma's 262,144 entries have 1.9 million."""
# Pre-tokenizers of `model: gpt2` whose merges are of characters, not of bytes.
CHARACTER_MERGES = frozenset(("gemma4", "granite-embed-multi-311m", "sarvam-moe"))


def build_model(vocabulary: GGUFVocabulary, size: int) -> tokenizers.Tokenizer:
    """The library's tokenizer over the first `size` entries.

    Raises:
        TokenizerError: the kind of vocabulary or its pre-tokenizer is not known, or fields contradict each other.
    """
    builder = _BUILDERS.get(kind_of(vocabulary))
    if builder is None:
        raise TokenizerError(
            f"{PREFIX}model is {vocabulary.model[:80]!r}, a kind of tokenizer that Quire does not know",
            hint=f"known are {', '.join(_BUILDERS)}; give the directory of the original model as --tokenizer",
            field=PREFIX + "model",
        )
    try:
        return builder(vocabulary, size)
    except TokenizerError:
        raise
    except BaseException as error:  # a panic in the library is not an `Exception`
        if isinstance(error, (KeyboardInterrupt, SystemExit, MemoryError)):
            raise
        raise _contradiction(vocabulary, error) from error


def kind_of(vocabulary: GGUFVocabulary) -> str:
    """Which builder makes it; "gpt2" files with merges of characters are of Gemma 4's kind."""
    return "gemma4" if vocabulary.model == "gpt2" and vocabulary.pre in CHARACTER_MERGES else vocabulary.model


def _byte_level(vocabulary: GGUFVocabulary, size: int) -> tokenizers.Tokenizer:
    """GPT-2's kind: merges of bytes that are written as characters."""
    if vocabulary.merges is None:
        raise _no_merges()
    if not vocabulary.pre:
        logger.warning("the file does not name its pre-tokenizer (%spre); texts may be split wrongly", PREFIX)
    before = pre_tokenization(vocabulary.pre or "default")
    library = tokenizers.Tokenizer(
        models.BPE(_entries(vocabulary, size), vocabulary.merges, ignore_merges=before.ignore_merges)
    )
    normalizer = before.normalizer()
    if normalizer is not None:
        library.normalizer = normalizer
    library.pre_tokenizer = before.pre_tokenizer()
    library.decoder = decoders.ByteLevel()
    return library


def _sentencepiece(vocabulary: GGUFVocabulary, size: int) -> tokenizers.Tokenizer:
    """Llama's kind: merges of characters, the pair with the best score first; bytes for unknown ones."""
    merges = vocabulary.merges or _merges_by_score(vocabulary, size)
    library = _character_merges(vocabulary, size, merges)
    spaces = normalizers.Replace(" ", METASPACE)
    decoder = [decoders.Replace(METASPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if vocabulary.flags.get("add_space_prefix", True):
        library.normalizer = normalizers.Sequence([normalizers.Prepend(METASPACE), spaces])
        library.decoder = decoders.Sequence([*decoder, decoders.Strip(" ", 1, 0)])
    else:
        library.normalizer = spaces
        library.decoder = decoders.Sequence(decoder)
    return library


def _gemma4(vocabulary: GGUFVocabulary, size: int) -> tokenizers.Tokenizer:
    """Gemma 4's kind: Llama's with the merges in the file."""
    if vocabulary.merges is None:
        raise _no_merges()
    library = _character_merges(vocabulary, size, vocabulary.merges)
    library.normalizer = normalizers.Replace(" ", METASPACE)
    library.decoder = decoders.Sequence([decoders.Replace(METASPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return library


def _unigram(vocabulary: GGUFVocabulary, size: int) -> tokenizers.Tokenizer:
    """T5's kind: the segmentation with the best sum of scores."""
    if vocabulary.scores is None:
        raise TokenizerError(
            f"{PREFIX}scores is missing from the file's metadata", hint=CONVERT_AGAIN, field=PREFIX + "scores"
        )
    pieces = list(zip(vocabulary.tokens[:size], vocabulary.scores[:size].tolist(), strict=True))
    has_bytes = TokenType.BYTE in vocabulary.types
    library = tokenizers.Tokenizer(models.Unigram(pieces, _needed_unknown_id(vocabulary), has_bytes))
    if vocabulary.charsmap:
        library.normalizer = normalizers.Precompiled(vocabulary.charsmap)
    scheme = "always" if vocabulary.flags.get("add_space_prefix", True) else "never"
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    if vocabulary.flags.get("remove_extra_whitespaces", False):
        library.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), library.pre_tokenizer])
    library.decoder = decoders.Metaspace(prepend_scheme=scheme)
    if has_bytes:
        library.decoder = decoders.Sequence([decoders.ByteFallback(), library.decoder])
    return library


def _wordpiece(vocabulary: GGUFVocabulary, size: int) -> tokenizers.Tokenizer:
    """BERT's kind: the longest entry first, within words."""
    unknown = vocabulary.tokens[_needed_unknown_id(vocabulary)]
    library = tokenizers.Tokenizer(models.WordPiece(_entries(vocabulary, size), unk_token=unknown))
    library.normalizer = normalizers.BertNormalizer(
        lowercase=vocabulary.flags.get("normalizer.lowercase", True),
        strip_accents=vocabulary.flags.get("normalizer.strip_accents"),
    )
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.WordPiece("##")
    return library


_BUILDERS: Mapping[str, Callable[[GGUFVocabulary, int], tokenizers.Tokenizer]] = {
    "gpt2": _byte_level, "llama": _sentencepiece, "gemma4": _gemma4, "t5": _unigram, "bert": _wordpiece,
}  # fmt: skip


def _entries(vocabulary: GGUFVocabulary, size: int) -> dict[str, int]:
    return dict(zip(vocabulary.tokens[:size], range(size), strict=True))


def _character_merges(vocabulary: GGUFVocabulary, size: int, merges: list[tuple[str, str]]) -> tokenizers.Tokenizer:
    unknown = unknown_id(vocabulary)
    name = None if unknown is None else vocabulary.tokens[unknown]
    entries = _entries(vocabulary, size)
    return tokenizers.Tokenizer(models.BPE(entries, merges, unk_token=name, fuse_unk=True, byte_fallback=True))


def _merges_by_score(vocabulary: GGUFVocabulary, size: int) -> list[tuple[str, str]]:
    """Every way to put an entry together from two others, the best entry first.

    That is the order in which SentencePiece merges; among equals, as transformers sorts them when it converts a
    vocabulary: the longer left part first. Runs of spaces go before everything else.
    """
    entries = list(zip(vocabulary.tokens[:size], vocabulary.types[:size], strict=True))
    ranks = {
        token: -score
        for (token, kind), score in zip(entries, _merge_scores(vocabulary, size), strict=True)
        if kind == TokenType.NORMAL
    }
    runs = [token for token, kind in entries if kind == TokenType.USER_DEFINED and is_spaces(token)]
    parts = ranks.keys() | runs
    num_chars = sum(map(len, parts))
    if num_chars > MAX_PIECE_CHARS:
        raise TokenizerError(
            f"{PREFIX}tokens has {num_chars} characters in all, at most {MAX_PIECE_CHARS} are read",
            hint=CONVERT_AGAIN, field=PREFIX + "tokens",
        )  # fmt: skip
    merges = _splits(sorted(ranks, key=ranks.__getitem__), parts)
    if len(set(ranks.values())) < len(ranks):
        merges.sort(key=lambda pair: (ranks[pair[0] + pair[1]], -len(pair[0]), -len(pair[1])))
    return sorted(_splits(runs, parts), key=lambda pair: (-len(pair[0]), -len(pair[1]))) + merges


def _splits(tokens: list[str], parts: Set[str]) -> list[tuple[str, str]]:
    """Every way to cut each of `tokens` in two parts, the longer left part first."""
    return [
        (left, right)
        for token in tokens
        for cut in range(len(token) - 1, 0, -1)
        if (left := token[:cut]) in parts and (right := token[cut:]) in parts
    ]


def _merge_scores(vocabulary: GGUFVocabulary, size: int) -> list[float]:
    """A score for each entry. Some converters write one score for all; then, and in Gemma's files, order counts.

    Llama's runs of spaces come before everything else in that order, and are merged after everything else.
    """
    is_gemma = vocabulary.architecture.startswith("gemma")
    types = vocabulary.types[:size]
    if vocabulary.scores is not None and not is_gemma:
        scores: list[float] = vocabulary.scores[:size].tolist()
        if len({score for score, kind in zip(scores, types, strict=True) if kind == TokenType.NORMAL}) > 1:
            return scores
    in_order = [-float(token_id) for token_id in range(size)]
    if not is_gemma:
        in_order = [score - size * is_spaces(token) for score, token in zip(in_order, vocabulary.tokens, strict=False)]
    return in_order


def unknown_id(vocabulary: GGUFVocabulary) -> int | None:
    """The entry for what no other entry stands for."""
    found = vocabulary.ids.get("unk")
    if found is None:
        found = next(iter(vocabulary.ids_of(TokenType.UNKNOWN)), None)
    return found


def _needed_unknown_id(vocabulary: GGUFVocabulary) -> int:
    found = unknown_id(vocabulary)
    if found is None:
        raise TokenizerError(
            f"{PREFIX}unknown_token_id is missing from the file's metadata", hint=CONVERT_AGAIN,
            field=PREFIX + "unknown_token_id",
        )  # fmt: skip
    return found


def _no_merges() -> TokenizerError:
    return TokenizerError(
        f"{PREFIX}merges is missing from the file's metadata", hint=CONVERT_AGAIN, field=PREFIX + "merges"
    )


def _contradiction(vocabulary: GGUFVocabulary, error: BaseException) -> TokenizerError:
    """What the library refused: merges of tokens that are not there, or rules of normalisation."""
    name = "precompiled_charsmap" if vocabulary.model == "t5" else "merges" if vocabulary.merges else "tokens"
    return TokenizerError(f"{PREFIX}{name} does not fit: {str(error)[:200]}", hint=CONVERT_AGAIN, field=PREFIX + name)
