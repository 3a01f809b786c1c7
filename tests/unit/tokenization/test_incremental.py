"""Text that comes in pieces is the text of the whole, and never shows half of a character."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.tokenization.incremental import ByteDetokenizer, IncrementalDetokenizer, WindowDetokenizer
from tests.unit.tokenization.vocabularies import LIBRARIES, tokenizer_of

TEXTS = st.text(alphabet=st.sampled_from("abe qui.\n\u00e4\u00df你好🙂👍🏽\u2581"), min_size=1, max_size=40)


def pieces(kind, prompt, output, skip, cuts=()):
    stream = IncrementalDetokenizer.create(tokenizer_of(kind), prompt, skip_special_tokens=skip)
    bounds = sorted({0, len(output), *(cut for cut in cuts if cut < len(output))})
    parts = [stream.push(output[start:end]) for start, end in zip(bounds, bounds[1:], strict=False)]
    return [*parts, stream.finish()]


def ids(kind, max_size=30):
    return st.lists(st.integers(0, tokenizer_of(kind).vocab_size - 1), max_size=max_size)


@pytest.mark.parametrize("kind", ["byte-level", "llama", "metaspace", "no-decoder"])
@settings(deadline=None, max_examples=150)
@given(data=st.data(), skip=st.booleans())
def test_pieces_join_to_the_text_after_the_prompt(kind, data, skip):
    tokenizer = tokenizer_of(kind)
    prompt = tokenizer.encode(data.draw(TEXTS))
    output = data.draw(ids(kind))
    cuts = data.draw(st.lists(st.integers(0, 30)))
    whole = tokenizer.decode([*prompt, *output], skip_special_tokens=skip)
    before = tokenizer.decode(prompt, skip_special_tokens=skip)
    assert whole.startswith(before)
    assert "".join(pieces(kind, prompt, output, skip, cuts)) == whole[len(before) :]


@pytest.mark.parametrize("kind", ["byte-level", "llama", "metaspace"])
@settings(deadline=None, max_examples=60)
@given(data=st.data(), skip=st.booleans())
def test_pieces_join_to_the_whole_text_without_a_prompt(kind, data, skip):
    output = data.draw(ids(kind))
    assert "".join(pieces(kind, [], output, skip, range(30))) == tokenizer_of(kind).decode(output, skip)


@pytest.mark.parametrize("kind", ["byte-level", "llama"])
@settings(deadline=None, max_examples=100)
@given(text=TEXTS)
def test_no_piece_holds_half_of_a_character(kind, text):
    output = tokenizer_of(kind).encode(text, add_special_tokens=False)
    parts = pieces(kind, [], output, True, range(200))
    assert "\ufffd" not in "".join(parts)
    assert parts[-1] == "", "valid text is complete with its last token"


@pytest.mark.parametrize("kind", LIBRARIES)
@settings(deadline=None, max_examples=100)
@given(data=st.data(), skip=st.booleans())
def test_decoding_equals_the_library(kind, data, skip):
    """Bytes that are no UTF-8 are left out: there the library changes characters that were complete."""
    tokenizer = tokenizer_of(kind)
    output = data.draw(ids(kind))
    expected = LIBRARIES[kind]().decode(output, skip_special_tokens=skip)
    ours = tokenizer.decode(output, skip_special_tokens=skip)
    assert ours == expected or (kind == "llama" and "\ufffd" in expected)


def test_a_prompt_that_ends_inside_a_character_is_continued():
    tokenizer = tokenizer_of("byte-level")
    token_ids = tokenizer.encode("龍", add_special_tokens=False)
    assert len(token_ids) > 1
    assert "".join(pieces("byte-level", token_ids[:1], token_ids[1:], True)) == "龍"


def test_an_incomplete_character_becomes_one_replacement_at_the_end():
    token_ids = tokenizer_of("byte-level").encode("龍", add_special_tokens=False)[:1]
    assert pieces("byte-level", [], token_ids, True) == ["", "\ufffd"]


def test_a_long_prompt_of_special_tokens_keeps_the_space_of_the_first_word():
    tokenizer = tokenizer_of("llama")
    prompt = [*tokenizer.encode("the"), *[2] * 50]
    assert "".join(pieces("llama", prompt, tokenizer.encode("the"), True)) == " the"


@pytest.mark.parametrize(("kind", "expected"), [("byte-level", ByteDetokenizer), ("no-decoder", WindowDetokenizer)])
def test_the_kind_of_vocabulary_decides_the_method(kind, expected):
    assert isinstance(IncrementalDetokenizer.create(tokenizer_of(kind), []), expected)


@settings(deadline=None, max_examples=60)
@given(data=st.data(), kind=st.sampled_from(["byte-level", "llama"]))
def test_the_window_method_agrees_where_text_is_valid(data, kind):
    tokenizer = tokenizer_of(kind)
    prompt, output = tokenizer.encode(data.draw(TEXTS)), tokenizer.encode(data.draw(TEXTS), add_special_tokens=False)
    stream = WindowDetokenizer(tokenizer, prompt, tokenizer.special_ids)
    text = "".join([stream.push([token_id]) for token_id in output]) + stream.finish()
    assert text == "".join(pieces(kind, prompt, output, True))


def test_byte_tokens_that_are_no_utf8_keep_their_valid_characters():
    tokenizer = tokenizer_of("llama")
    token_ids = tokenizer.convert_tokens_to_ids(["<0x26>", "<0xFF>", "<0x26>"])
    assert tokenizer.decode(token_ids) == "&\ufffd&"
