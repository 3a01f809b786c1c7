"""tokenizer.model files: the same ids and texts as the SentencePiece library, special tokens recognised."""

from __future__ import annotations

import pytest
import sentencepiece
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.errors import TokenizerError
from quire.tokenization.incremental import IncrementalDetokenizer
from quire.tokenization.tokenizer import load_tokenizer
from tests.unit.tokenization.vocabularies import sentencepiece_proto, write_sentencepiece

CONFIG = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "added_tokens_decoder": {"330": {"content": "<|end|>", "special": True}},
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(write_sentencepiece(tmp_path_factory.mktemp("legacy"), CONFIG))


@pytest.fixture(scope="module")
def library():
    processor = sentencepiece.SentencePieceProcessor()
    processor.LoadFromSerializedProto(sentencepiece_proto())
    return processor


@settings(deadline=None, max_examples=100)
@given(text=st.text(alphabet=st.sampled_from("abe qui.\u00e4你🙂"), max_size=40))
def test_ids_and_text_equal_the_library(tokenizer, library, text):
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == library.encode(text)
    assert tokenizer.decode(ids) == library.decode(ids) == text


def test_begin_of_text_is_added(tokenizer, library):
    assert tokenizer.encode("the dog") == [library.bos_id(), *library.encode("the dog")]


def test_roles_come_from_the_model_file_when_nothing_names_them(tmp_path, library):
    tokenizer = load_tokenizer(write_sentencepiece(tmp_path))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (library.bos_id(), library.eos_id())


def test_special_tokens_are_cut_out_of_the_text(tokenizer, library):
    ids = tokenizer.encode("the dog</s><|end|>", add_special_tokens=False)
    assert ids == [*library.encode("the dog"), library.eos_id(), 330]
    assert tokenizer.decode(ids) == "the dog"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "the dog</s><|end|>"


def test_special_tokens_can_be_read_as_plain_text(tokenizer, library):
    assert tokenizer.encode("a</s>", add_special_tokens=False, allow_special=False) == library.encode("a</s>")


@pytest.mark.parametrize(("legacy", "text"), [(True, "a b"), (False, "ab")])
def test_text_after_a_special_token_begins_with_a_space_in_legacy_mode(tmp_path, legacy, text):
    tokenizer = load_tokenizer(write_sentencepiece(tmp_path, {**CONFIG, "legacy": legacy}))
    assert tokenizer.decode(tokenizer.encode("a<|end|>b", add_special_tokens=False)) == text


def test_streaming_equals_the_whole(tokenizer):
    prompt, output = tokenizer.encode("the dog"), tokenizer.encode(" 你好 🙂 fox", add_special_tokens=False)
    stream = IncrementalDetokenizer.create(tokenizer, prompt)
    text = "".join([stream.push([token_id]) for token_id in output]) + stream.finish()
    assert tokenizer.decode([*prompt, *output]) == tokenizer.decode(prompt) + text
    assert "\ufffd" not in text


@pytest.mark.parametrize("content", [b"", b"garbage", b"\x00" * 100])
def test_a_malformed_model_is_refused(tmp_path, content):
    (tmp_path / "tokenizer.model").write_bytes(content)
    with pytest.raises(TokenizerError, match="tokenizer.model"):
        load_tokenizer(tmp_path)


def test_a_truncated_model_is_refused(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_proto()[:1000])
    with pytest.raises(TokenizerError, match="download the file again"):
        load_tokenizer(tmp_path)
