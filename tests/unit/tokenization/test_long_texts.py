"""Long texts are worked on without the interpreter's lock, and become the same ids."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

import pytest

from quire.tokenization.fast_backend import LONG_CHARS, LONG_IDS
from quire.tokenization.tokenizer import Tokenizer, load_tokenizer
from tests.unit.tokenization.vocabularies import LIBRARIES, SENTENCES, tokenizer_of, write_sentencepiece

TEXT = " ".join(SENTENCES) * 400
SELDOM = 1
"""Work that keeps the lock lets others have it once, at its end. How often another thread gets it is up to the system:
some hundred times, and three times beside much else."""


def turns_of_others(work: Callable[[], object]) -> int:
    """How often another thread got the interpreter's lock while `work` ran; no lock is taken away from anybody."""
    turns, during = 0, -1
    interval = sys.getswitchinterval()

    def run() -> None:
        nonlocal during
        before = turns
        work()
        during = turns - before

    thread = threading.Thread(target=run)
    sys.setswitchinterval(1000)
    try:
        thread.start()
        while thread.is_alive():
            turns += 1
            time.sleep(0)  # gives the lock away
    finally:
        sys.setswitchinterval(interval)
    return during


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory) -> Tokenizer:
    return load_tokenizer(write_sentencepiece(tmp_path_factory.mktemp("tokenizer")))


def test_others_run_while_a_long_text_is_tokenized(sentencepiece):
    for tokenizer in (tokenizer_of("byte-level"), sentencepiece):
        tokenizer.encode(TEXT, allow_special=False)  # whatever is made once
        assert turns_of_others(lambda: tokenizer.encode(TEXT)) > SELDOM  # noqa: B023 (called at once)
        assert turns_of_others(lambda: tokenizer.encode(TEXT, allow_special=False)) > SELDOM  # noqa: B023


def test_others_run_while_many_ids_are_made_text_by_the_library():
    tokenizer = tokenizer_of("no-decoder")
    assert tokenizer.table is None
    ids = tokenizer.encode(TEXT) * 10
    assert turns_of_others(lambda: tokenizer.decode(ids)) > SELDOM


@pytest.mark.parametrize("kind", LIBRARIES)
def test_long_texts_become_the_same_ids_and_back(kind):
    tokenizer, library = tokenizer_of(kind), LIBRARIES[kind]()
    pieces = ["</s>", "<s>", "</", "s>", "<|im_end|>", "<tool>", "\u2581", "\x00", "\n\n", " ", "é", *SENTENCES]
    for shift in range(len(pieces)):
        text = "".join(pieces[(shift + 5 * index) % len(pieces)] for index in range(400))
        assert len(text) >= LONG_CHARS
        for special in (True, False):
            assert tokenizer.encode(text, special) == library.encode(text, add_special_tokens=special).ids
        ids = tokenizer.encode(text)
        assert len(ids) > LONG_IDS or kind == "no-decoder"
        assert tokenizer.decode(ids, skip_special_tokens=False) == library.decode(ids, skip_special_tokens=False)
        if shift == 0:
            plain = tokenizer.encode(text, allow_special=False)
            library.encode_special_tokens = True
            assert plain == library.encode(text).ids
            library.encode_special_tokens = False
