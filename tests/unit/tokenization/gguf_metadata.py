"""Tokenizers as llama.cpp's converter writes them into GGUF metadata, and the texts they are compared on."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping
from typing import Any

import sentencepiece
import tokenizers

SCRIPTS = ("the of pages quire lazy dog fox JUMPS over CamelCase snake_case naive", "äöüß éàç ñ İı ſ ǆ Ω K",
           "привет мир нещо", "你好 世界 我想在apple工作", "こんにちは カタカナ ー", "안녕하세요 세계", "हिन्दी भाषा की",
           "العربية ١٢٣ ۔ ، ؟", "ไทย ภาษา កាន់តែ", "e\u0301 n\u0303 a\u0308 \u1e9b\u0323", "𝐀𝛀 𐐀𐐨 ⅷ ² ½ ①")  # fmt: skip
BITS = (
    " ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", "\t\t", " \n ", "\u00a0", "\u3000", "\u2581", "\u2581\u2581",
    "\u200b", "0", "7", "42", "123", "1234", "1234567", "3.14", "1,000", "'s", "'LL", "'Re", "don't", "WE'VE",
    "\u2019s", "def f(x):\n    return x**2  # ok", '{"a": [1, 2]}', "<a href='x'>", "for (;;) {}", "$%^&*", "!!??",
    "...", "---", "🙂", "👍🏽", "😶\u200d🌫️", "🇩🇪", "<|im_start|>", "<|im_end|>", "</s>", "<s>", "<tool>", "[CLS]",
    "<0x0A>", "##x", "\u0000", "\ufffd", "\ufeff", "http://x.y/z?q=1", "/path/to/file", "_", "«»", "“”", "–", "。",
    "，", "！",
)  # fmt: skip


def corpus(count: int = 2000, seed: int = 0) -> list[str]:
    """Texts of many scripts, code, numbers, spaces, emoji and names of control tokens."""
    chance = random.Random(seed)
    words = [word for line in SCRIPTS for word in line.split(" ")]
    texts = ["", " ", "  ", "\n", "a", *BITS, *SCRIPTS]
    while len(texts) < count:
        bits = [chance.choice(words if chance.random() < 0.6 else BITS) for _ in range(chance.randint(1, 9))]
        texts.append(chance.choice(("", " ", " ")).join(bits))
    return texts[:count]


def looks_special(token: str) -> bool:
    """What the converter calls a control token although the model's makers do not."""
    return (token.startswith("<|") and token.endswith("|>")) or bool(re.fullmatch(r"<unused\d+>", token))


def from_library(
    library: tokenizers.Tokenizer, pre: str | None = None, *, filler: int = 3, **others: Any
) -> dict[str, Any]:
    """Metadata of a byte-level or WordPiece tokenizer.

    Args:
        filler: entries beyond the vocabulary, as the embedding has rows for them.
        others: further keys, after "tokenizer.ggml.".
    """
    state = json.loads(library.to_str())
    added = library.get_added_tokens_decoder()
    count = library.get_vocab_size()
    tokens, types = [], []
    for token_id in range(count):
        token = library.id_to_token(token_id)
        is_control = token_id in added and (added[token_id].special or looks_special(token))
        types.append(3 if is_control else 4 if token_id in added else 1)
        tokens.append(token if token_id not in added or is_control else token.replace("\u2581", " "))
    model = "bert" if state["model"]["type"] == "WordPiece" else "gpt2"
    if model == "bert":
        tokens = [_phantom(token, kind) for token, kind in zip(tokens, types)]
    metadata = {"model": model, "tokens": tokens, "token_type": types, **others}
    if pre is not None:
        metadata["pre"] = pre
    if model == "gpt2":
        metadata["merges"] = [" ".join(pair) for pair in state["model"]["merges"]]
        metadata["tokens"] = tokens + [f"[PAD{count + i}]" for i in range(filler)]
        metadata["token_type"] = types + [5] * filler
    return {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}


def _phantom(token: str, kind: int) -> str:
    if kind == 3:
        return token
    return token[2:] if token.startswith("##") else f"\u2581{token}"


def from_sentencepiece(
    proto: bytes, model: str = "llama", added: Mapping[str, bool] | None = None, **others: Any
) -> dict[str, Any]:
    """Metadata of a SentencePiece model.

    Args:
        added: tokens after the model's own -> is it special.
    """
    library = sentencepiece.SentencePieceProcessor(model_proto=proto)
    tokens, scores, types = [], [], []
    for i in range(library.get_piece_size()):
        tokens.append(library.id_to_piece(i))
        scores.append(library.get_score(i))
        kinds = ((library.is_unknown, 2), (library.is_control, 3), (library.is_unused, 5), (library.is_byte, 6))
        types.append(next((kind for check, kind in kinds if check(i)), 1))
    for token, is_special in (added or {}).items():
        tokens.append(token)
        scores.append(-1000.0)
        types.append(3 if is_special or looks_special(token) else 4)
    values = {"model": model, "pre": "default", "tokens": tokens, "scores": scores, "token_type": types}
    ids = {"bos_token_id": library.bos_id(), "eos_token_id": library.eos_id(), "unknown_token_id": library.unk_id()}
    values |= {key: value for key, value in ids.items() if value >= 0}
    return {f"tokenizer.ggml.{key}": value for key, value in {**values, **others}.items()}
