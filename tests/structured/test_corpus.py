"""Random schemas, patterns and grammars, written by a model with random weights: every answer that ends is valid."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from quire import LLM
from tests.structured.corpus import run_corpus
from tests.structured.libraries import needs_libraries

pytestmark = needs_libraries


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """The shape of leaf with weights by chance: what a grammar allows is written."""
    llm = LLM(load_format="dummy", max_model_len=1024, max_num_seqs=64)
    yield llm
    llm.llm_engine.shutdown()


@pytest.mark.parametrize(("kind", "count"), [("json", 60), ("regex", 20), ("grammar", 20)])
def test_no_answer_violates_what_was_asked(llm: LLM, kind: str, count: int):
    figures = run_corpus(llm, kind, count, seed=1)
    assert figures.violations == [] and figures.num_asked == count
    assert figures.num_ended >= count * 0.7, str(figures)
