"""Tokenizers from GGUF metadata against the Hugging Face tokenizers that the metadata was made from."""

from __future__ import annotations

import functools
import io
import json
from typing import Any

import pytest
import sentencepiece
import tokenizers
from sentencepiece.sentencepiece_model_pb2 import ModelProto
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers.convert_slow_tokenizer import generate_merges
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX as QWEN_2
from transformers.models.qwen3_5.tokenization_qwen3_5 import PRETOKENIZE_REGEX as QWEN_35

from quire.tokenization.incremental import IncrementalDetokenizer
from quire.tokenization.tokenizer import Tokenizer, load_tokenizer, tokenizer_from_metadata
from tests.unit.tokenization.gguf_metadata import SCRIPTS, corpus, from_library, from_sentencepiece

TEXTS = corpus()
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
CONTRACTION = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LLAMA_3 = CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
WORD_4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+%s"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*%s"
)
GPT_4O = WORD_4O % (f"{CONTRACTION}?", f"{CONTRACTION}?") + (
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = WORD_4O % ("", "") + r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
DEEPSEEK_V3 = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def split(pattern: str) -> Any:
    return pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")


def bytes_after(*steps: Any) -> Any:
    return pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


WORDS = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
# Name in the metadata -> what the tokenizer.json of such a model holds: pre-tokenizer, is it composed, ignore_merges.
BYTE_LEVEL: dict[str, tuple[Any, bool, bool]] = {
    "gpt-2": (WORDS, False, False),
    "llama-bpe": (bytes_after(split(LLAMA_3)), False, True),
    "qwen2": (bytes_after(split(QWEN_2)), True, False),
    "qwen35": (bytes_after(split(QWEN_35)), True, False),
    "gpt-4o": (bytes_after(split(GPT_4O)), False, False),
    "tekken": (bytes_after(split(TEKKEN)), False, True),
    "deepseek-v3": (
        bytes_after(split(r"\p{N}{1,3}"), split("[一-龥\u3040-ゟ゠-ヿ]+"), split(DEEPSEEK_V3)), False, False
    ),
    "starcoder": (pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), WORDS]), False, False),
    "command-r": (pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), WORDS]), True, False),
    "falcon": (
        pre_tokenizers.Sequence([
            pre_tokenizers.Punctuation("contiguous"), WORDS, pre_tokenizers.Digits(individual_digits=False),
            split("[0-9][0-9][0-9]"),
        ]), False, False,
    ),
    "bloom": (bytes_after(split(r" ?[^(\s|[.,!?…。，、।۔،])]+")), False, False),
}  # fmt: skip


def byte_level(pre: str) -> tokenizers.Tokenizer:
    """A trained tokenizer of this kind, with special tokens in the vocabulary and added behind it."""
    before, nfc, ignore_merges = BYTE_LEVEL[pre]
    library = tokenizers.Tokenizer(models.BPE(ignore_merges=ignore_merges))
    library.pre_tokenizer = before
    if nfc:
        library.normalizer = normalizers.NFC()
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=800, special_tokens=SPECIAL[:2], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    library.train_from_iterator(TEXTS[::4], trainer)
    library.add_special_tokens([tokenizers.AddedToken(token, normalized=False) for token in SPECIAL[2:]])
    library.add_tokens([tokenizers.AddedToken(token, normalized=False) for token in ("<tool>", "    ")])
    library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return library


def word_piece() -> tokenizers.Tokenizer:
    library = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    library.normalizer = normalizers.BertNormalizer()
    library.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    library.decoder = decoders.WordPiece()
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=600, special_tokens=names, show_progress=False)
    # The converter's spelling is ambiguous for words that begin with its own mark.
    library.train_from_iterator([text.replace("\u2581", "") for text in TEXTS[::4]], trainer)
    library.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return library


@functools.cache
def sentencepiece_proto(kind: str, prefix: bool) -> bytes:
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS[::4]), model_writer=out, model_type=kind, vocab_size=800, character_coverage=0.98,
        byte_fallback=kind == "bpe", add_dummy_prefix=prefix, remove_extra_whitespaces=kind == "unigram",
        normalization_rule_name="identity" if kind == "bpe" else "nmt_nfkc", minloglevel=2, num_threads=1,
        allow_whitespace_only_pieces=True, hard_vocab_limit=False,
    )  # fmt: skip
    return out.getvalue()


def llama(prefix: bool = True) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """The parts that transformers' `LlamaConverter` puts together, with its merges."""
    proto = sentencepiece_proto("bpe", prefix)
    pieces = [(piece.piece, piece.score) for piece in ModelProto.FromString(proto).pieces]
    entries = {piece: token_id for token_id, (piece, _) in enumerate(pieces)}
    merges = generate_merges(entries, pieces)
    library = tokenizers.Tokenizer(models.BPE(entries, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    spaces = normalizers.Replace(" ", "\u2581")
    library.normalizer = normalizers.Sequence([*([normalizers.Prepend("\u2581")] if prefix else []), spaces])
    decoder = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    library.decoder = decoders.Sequence([*decoder, *([decoders.Strip(" ", 1, 0)] if prefix else [])])
    library.add_special_tokens([tokenizers.AddedToken(token, normalized=False) for token in ("<unk>", *SPECIAL)])
    library.add_tokens([tokenizers.AddedToken("<tool>", normalized=False)])
    library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    added = {"<|im_start|>": True, "<|im_end|>": True, "<tool>": False}
    return library, from_sentencepiece(proto, added=added, add_space_prefix=prefix)


def gemma4() -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    """As Llama's, with the merges in the file, and with runs of spaces that are added tokens."""
    library, metadata = llama(prefix=False)
    runs = sorted(token for token in library.get_vocab() if len(token) > 1 and not token.strip("\u2581"))
    library.add_tokens([tokenizers.AddedToken(token, normalized=False) for token in runs])
    merges = [" ".join(pair) for pair in json.loads(library.to_str())["model"]["merges"]]
    return library, {**metadata, "tokenizer.ggml.model": "gemma4", "tokenizer.ggml.merges": merges}


def unigram() -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    proto = sentencepiece_proto("unigram", True)
    model = ModelProto.FromString(proto)
    charsmap = model.normalizer_spec.precompiled_charsmap
    library = tokenizers.Tokenizer(models.Unigram([(piece.piece, piece.score) for piece in model.pieces], 0, False))
    library.normalizer = normalizers.Precompiled(charsmap)
    library.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    library.decoder = decoders.Metaspace()
    library.add_special_tokens([tokenizers.AddedToken(token, normalized=False) for token in ("<unk>", "<s>", "</s>")])
    library.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 2)])
    return library, from_sentencepiece(
        proto, "t5", add_space_prefix=True, remove_extra_whitespaces=True, precompiled_charsmap=list(charsmap)
    )


def made(kind: str) -> tuple[tokenizers.Tokenizer, dict[str, Any]]:
    if kind in BYTE_LEVEL:
        library = byte_level(kind)
        return library, from_library(library, kind, bos_token_id=0, eos_token_id=1, add_bos_token=True)
    if kind == "bert":
        library = word_piece()
        return library, from_library(library, cls_token_id=2, seperator_token_id=3, unknown_token_id=1)
    others = {
        "llama": llama,
        "llama-no-prefix": functools.partial(llama, prefix=False),
        "gemma4": gemma4,
        "t5": unigram,
    }
    return others[kind]()


@pytest.fixture(scope="module", params=[*BYTE_LEVEL, "llama", "llama-no-prefix", "gemma4", "t5", "bert"])
def pair(request, tmp_path_factory) -> tuple[Tokenizer, tokenizers.Tokenizer, Tokenizer]:
    """The tokenizer from metadata, the library's it was made from, and that through tokenizer.json."""
    directory = tmp_path_factory.mktemp("tokenizer")
    library, metadata = made(request.param)
    library.save(str(directory / "tokenizer.json"))
    return tokenizer_from_metadata(metadata), library, load_tokenizer(directory)


def test_two_thousand_texts_become_the_same_ids_and_back(pair):
    ours, library, through_json = pair
    for special in (True, False):
        expected = [one.ids for one in library.encode_batch_fast(TEXTS, add_special_tokens=special)]
        assert ours.encode_batch(TEXTS, special) == expected
    assert [ours.decode(ids, False) for ids in expected] == [through_json.decode(ids, False) for ids in expected]
    assert [ours.decode(ids) for ids in expected] == [through_json.decode(ids) for ids in expected]


def test_control_tokens_in_a_text_are_plain_text_when_told_so(pair):
    ours, _, through_json = pair
    texts = [text for text in TEXTS if any(name in text for name in (*SPECIAL, "[CLS]"))][:200]
    assert len(texts) == 200
    for text in texts:
        plain = ours.encode(text, add_special_tokens=False, allow_special=False)
        assert plain == through_json.encode(text, add_special_tokens=False, allow_special=False)


def test_vocabularies_are_the_same(pair):
    ours, _, through_json = pair
    assert ours.vocabulary() == through_json.vocabulary()
    assert ours.special_ids == through_json.special_ids
    assert (ours.vocab_size, ours.base_vocab_size) == (through_json.vocab_size, through_json.base_vocab_size)


def test_text_comes_token_by_token_as_from_tokenizer_json(pair):
    ours, _, through_json = pair
    ids = through_json.encode(" ".join(SCRIPTS) + "🙂👍🏽</s> end", add_special_tokens=False)
    streams = []
    for tokenizer in (ours, through_json):
        stream = IncrementalDetokenizer.create(tokenizer, ids[:3])
        streams.append([stream.push([token_id]) for token_id in ids[3:]] + [stream.finish()])
    assert streams[0] == streams[1]
