"""Small vocabularies of each kind that Quire decodes, trained in the test, and directories that hold them."""

from __future__ import annotations

import functools
import io
import json
from pathlib import Path
from typing import Any

import sentencepiece
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from quire.tokenization.fast_backend import FastBackend
from quire.tokenization.tokenizer import Tokenizer

SENTENCES = (
    "The quick brown fox jumps over the lazy dog.",
    "Pages are gathered into a quire, and quires are bound into a book.",
    "Ein Satz mit Umlauten: äöü, ß; 你好，世界 🙂👍🏽 and naïve café.",
)
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
CHAT_MARKS = ["<|im_start|>", "<|im_end|>"]


@functools.cache
def byte_level_library() -> tokenizers.Tokenizer:
    """Like Qwen's and Llama 3's."""
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<s>", "</s>", *CHAT_MARKS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(SENTENCES, trainer)
    library.add_tokens(["<tool>"])
    library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return library


@functools.cache
def llama_library() -> tokenizers.Tokenizer:
    """Like Llama 1's and 2's: spaces as U+2581, bytes as <0xNN>."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581"]
    letters = sorted({letter for letter in "".join(SENTENCES) if letter.isascii() and letter != " "})
    merges = [("\u2581", "t"), ("h", "e"), ("\u2581t", "he"), ("i", "n"), ("\u2581", "a"), ("r", "e")]
    pieces += [*letters, *("".join(merge) for merge in merges)]
    model = models.BPE({piece: i for i, piece in enumerate(pieces)}, merges, unk_token="<unk>", byte_fallback=True)
    library = tokenizers.Tokenizer(model)
    library.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    library.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    library.add_special_tokens(["<unk>", "<s>", "</s>"])
    return library


@functools.cache
def metaspace_library() -> tokenizers.Tokenizer:
    """A Metaspace decoder, as in T5's and old Llama conversions."""
    library = tokenizers.Tokenizer(models.BPE(unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=120, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    library.train_from_iterator(SENTENCES, trainer)
    return library


@functools.cache
def word_library() -> tokenizers.Tokenizer:
    """No decoder at all: tokens are joined with spaces."""
    words = ["<unk>", "<s>", "</s>", *sorted(set(" ".join(SENTENCES).split()))]
    library = tokenizers.Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library.add_special_tokens(["<unk>", "<s>", "</s>"])
    return library


LIBRARIES = {
    "byte-level": byte_level_library,
    "llama": llama_library,
    "metaspace": metaspace_library,
    "no-decoder": word_library,
}


@functools.cache
def tokenizer_of(kind: str) -> Tokenizer:
    """The Quire tokenizer over `LIBRARIES[kind]`."""
    return Tokenizer(FastBackend(LIBRARIES[kind]()), SPECIAL)


@functools.cache
def sentencepiece_proto(kind: str = "bpe") -> bytes:
    """A trained SentencePiece model with byte fallback."""
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES * 4),
        model_writer=out,
        model_type=kind,
        vocab_size=330,
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    return out.getvalue()


def write_fast(directory: Path, config: dict[str, Any] | None = None, kind: str = "byte-level") -> Path:
    """A model directory with tokenizer.json and tokenizer_config.json."""
    LIBRARIES[kind]().save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps(SPECIAL if config is None else config))
    return directory


def write_sentencepiece(directory: Path, config: dict[str, Any] | None = None) -> Path:
    """A model directory with tokenizer.model."""
    (directory / "tokenizer.model").write_bytes(sentencepiece_proto())
    (directory / "tokenizer_config.json").write_text(json.dumps(config or {}))
    return directory
