"""Random schemas, patterns and grammars, written by a model with random weights: every answer that ends is valid."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

import pytest

from quire import LLM
from tests.effort import effort
from tests.structured.corpus import NUM_SCHEMAS, probe, run_corpus
from tests.structured.formats import has_format
from tests.structured.grammar_corpus import RandomGrammar, random_grammar
from tests.structured.libraries import needs_libraries
from tests.structured.schema_corpus import ALL_KEYWORDS, keywords_of, schemas

pytestmark = needs_libraries


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """The shape of leaf with weights by chance: what a grammar allows is written."""
    llm = LLM(load_format="dummy", max_model_len=1024, max_num_seqs=64)
    yield llm
    llm.llm_engine.shutdown()


@pytest.mark.parametrize(("kind", "count"), [("json", effort(30, 60)), ("regex", 20), ("ebnf", 20), ("lark", 20)])
def test_no_answer_violates_what_was_asked(llm: LLM, kind: str, count: int):
    figures = run_corpus(llm, kind, count, seed=1)
    assert figures.violations == [] and figures.num_asked == count
    assert figures.num_ended >= count * 0.6, str(figures)


def test_nothing_that_a_schema_forbids_passes_the_grammar_it_is_given():
    figures = probe("json", "auto", 40, seed=2)
    assert figures.dropped == [] and figures.num_asked > 20


def test_the_corpus_has_every_keyword_of_every_draft():
    found = [keyword for schema in schemas(random.Random(0), NUM_SCHEMAS) for keyword in keywords_of(schema)]
    assert set(found) >= ALL_KEYWORDS, ALL_KEYWORDS - set(found)


def test_the_judge_of_grammars_knows_what_a_grammar_derives():
    inner = ("repeat", ("rule", "r0"), 0, 1)
    nested = ("sequence", (("text", "("), inner, ("text", ")")))
    grammar = RandomGrammar({"r0": ("choice", (nested, ("repeat", ("class", "ab"), 2, 3)))})
    for text in ("()", "(())", "ab", "(bab)"):
        assert grammar.accepts(text)
    for text in ("", "(", "())", "a", "abab", "(a)", "c"):
        assert not grammar.accepts(text)
    flat = RandomGrammar({"r0": ("sequence", (("rule", "r1"), ("text", "z"))), "r1": ("choice", (("text", "a"),) * 2)})
    pattern = re.compile("az")
    assert all(flat.accepts(text) == bool(pattern.fullmatch(text)) for text in ("az", "a", "z", "aaz", ""))
    assert random_grammar(random.Random(3)).ebnf() == random_grammar(random.Random(3)).ebnf()


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("date-time", "2024-02-28T10:20:30Z", "2024-02-28 10:20:30"), ("duration", "P1DT2H", "PT"),
        ("hostname", "a-b.example", "-a"), ("email", "a.b@c.de", "a@"), ("ipv6", "::1", "1.2.3.4"),
        ("uri", "http://a.example/%20", "http://a b"), ("uuid", "123e4567-e89b-12d3-a456-426614174000", "123"),
    ],
)  # fmt: skip
def test_the_judge_of_formats_knows_their_syntax(name: str, good: str, bad: str):
    assert has_format(name, good) and not has_format(name, bad)
