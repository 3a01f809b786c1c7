"""Loading a tokenizer from a directory, and what it does with text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.errors import TokenizerError, ValidationError
from quire.tokenization.tokenizer import load_tokenizer
from tests.models.checkpoints import make_tokenizer
from tests.unit.tokenization.vocabularies import byte_level_library, tokenizer_of, write_fast


@pytest.fixture(scope="module")
def against_transformers(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    reference = make_tokenizer()
    reference.save_pretrained(path)
    return load_tokenizer(path), reference


@settings(deadline=None, max_examples=100)
@given(text=st.text(max_size=60), add_special_tokens=st.booleans())
def test_encodes_and_decodes_as_transformers(against_transformers, text, add_special_tokens):
    ours, theirs = against_transformers
    ids = ours.encode(text, add_special_tokens)
    assert ids == theirs.encode(text, add_special_tokens=add_special_tokens)
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids, skip_special_tokens=False)


def test_roles_and_ids(tmp_path):
    tokenizer = load_tokenizer(write_fast(tmp_path))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)
    assert tokenizer.special_ids == {0, 1, 2, 3}
    assert tokenizer.vocab_size == byte_level_library().get_vocab_size()
    assert tokenizer.convert_ids_to_tokens([1, 10**6]) == ["</s>", ""]
    assert tokenizer.convert_tokens_to_ids(["</s>", "no such token"]) == [1, None]


def test_special_tokens_in_a_text_are_recognised_unless_told_otherwise():
    tokenizer = tokenizer_of("byte-level")
    text = "a</s>b"
    assert tokenizer.eos_token_id in tokenizer.encode(text)
    plain = tokenizer.encode(text, add_special_tokens=False, allow_special=False)
    assert not set(plain) & tokenizer.special_ids
    assert tokenizer.decode(plain) == text
    assert tokenizer.eos_token_id in tokenizer.encode(text), "reading plain text once changes nothing"


def test_begin_of_text_is_written_only_when_asked_for():
    tokenizer = tokenizer_of("byte-level")
    assert tokenizer.encode("fox")[0] == tokenizer.bos_token_id
    assert tokenizer.bos_token_id not in tokenizer.encode("fox", add_special_tokens=False)


def test_ids_outside_the_vocabulary_have_no_text():
    tokenizer = tokenizer_of("byte-level")
    assert tokenizer.decode([*tokenizer.encode("fox"), 10**6]) == "fox"


def test_half_a_surrogate_pair_is_refused():
    with pytest.raises(ValidationError, match="surrogate"):
        tokenizer_of("byte-level").encode("a\ud800b")


def test_tokens_of_the_configuration_are_added_at_their_ids(tmp_path):
    size = byte_level_library().get_vocab_size()
    added = {str(size): {"content": "<think>", "special": False}, "1": {"content": "</s>", "special": True}}
    tokenizer = load_tokenizer(write_fast(tmp_path, {"added_tokens_decoder": added, "eos_token": {"content": "</s>"}}))
    assert tokenizer.encode("<think>", add_special_tokens=False) == [size]
    assert tokenizer.eos_token_id == 1


def test_an_added_token_at_an_impossible_id_is_refused(tmp_path):
    added = {"100000": {"content": "<think>", "special": False}}
    with pytest.raises(TokenizerError, match=r"should have id 100000.*\nhint: .*download both"):
        load_tokenizer(write_fast(tmp_path, {"added_tokens_decoder": added}))


def test_a_directory_without_tokenizer_is_refused_with_the_fix(tmp_path):
    with pytest.raises(
        TokenizerError, match=r"no tokenizer.json and no tokenizer.model.*\nhint: .*skip_tokenizer_init"
    ):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"model": {"type": "BPE"}}', '{"version": "1.0", "model": 3}']
)
def test_a_malformed_tokenizer_json_is_refused(tmp_path, content):
    write_fast(tmp_path)
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(TokenizerError, match="tokenizer.json"):
        load_tokenizer(tmp_path)


def test_a_truncated_tokenizer_json_is_refused(tmp_path):
    path = write_fast(tmp_path) / "tokenizer.json"
    path.write_text(path.read_text()[:5000])
    with pytest.raises(TokenizerError, match="download the file again"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("content", [b"{", b"[1]", b"\xff\xfe", b"[" * 100000])
def test_a_malformed_configuration_is_refused(tmp_path, content):
    write_fast(tmp_path)
    (tmp_path / "tokenizer_config.json").write_bytes(content)
    with pytest.raises(TokenizerError, match="tokenizer_config.json"):
        load_tokenizer(tmp_path)


def test_a_directory_in_place_of_a_file_is_refused(tmp_path):
    (tmp_path / "tokenizer.json").mkdir()
    with pytest.raises(TokenizerError, match="not a regular file"):
        load_tokenizer(tmp_path)


def test_an_oversized_file_is_refused_before_it_is_read(tmp_path):
    write_fast(tmp_path)
    with (tmp_path / "tokenizer_config.json").open("wb") as file:
        file.truncate(33 << 20)
    with pytest.raises(TokenizerError, match=f"has {33 << 20} bytes"):
        load_tokenizer(tmp_path)


def test_truncation_and_padding_in_the_file_are_ignored(tmp_path):
    write_fast(tmp_path)
    state = json.loads((tmp_path / "tokenizer.json").read_text())
    state["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    assert len(load_tokenizer(tmp_path).encode("The quick brown fox jumps over the lazy dog.")) > 3


def with_template(directory: Path, num_pieces: int, num_ids: int, depth: int = 0) -> Path:
    """A tokenizer whose post-processor puts so many pieces of so many ids around each text."""
    path = write_fast(directory) / "tokenizer.json"
    state = json.loads(path.read_text())
    special = {"SpecialToken": {"id": "x", "type_id": 0}}
    template = [*[special] * num_pieces, {"Sequence": {"id": "A", "type_id": 0}}]
    processor: dict[str, Any] = {
        "type": "TemplateProcessing", "single": template, "pair": [*template, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"x": {"id": "x", "ids": [1] * num_ids, "tokens": ["a"] * num_ids}},
    }  # fmt: skip
    for _ in range(depth):
        processor = {"type": "Sequence", "processors": [processor]}
    path.write_text(json.dumps({**state, "post_processor": processor}))
    return directory


@pytest.mark.parametrize(
    ("num_pieces", "num_ids", "depth"), [(100_000, 1000, 0), (5000, 1000, 0), (10, 1000, 2), (1, 300_000, 0)]
)
def test_a_template_that_adds_absurdly_many_tokens_is_refused_before_it_is_used(tmp_path, num_pieces, num_ids, depth):
    with_template(tmp_path, num_pieces, num_ids, depth)
    with pytest.raises(TokenizerError, match="post_processor (adds|has) [0-9]+"):
        load_tokenizer(tmp_path)


def test_a_template_that_adds_some_tokens_is_used(tmp_path):
    tokenizer = load_tokenizer(with_template(tmp_path, 3, 2, depth=1))
    assert tokenizer.encode("a")[:6] == [1] * 6


@pytest.mark.parametrize(("kind", "text"), [("llama", " the"), ("byte-level", " are"), ("no-decoder", "fox")])
def test_one_token_is_shown_with_its_space(kind, text):
    tokenizer = tokenizer_of(kind)
    ids = tokenizer.encode("a the" if kind == "llama" else "Pages are" if kind == "byte-level" else "fox")
    assert tokenizer.token_text(ids[-1]) == text
