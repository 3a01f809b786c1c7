"""What a request forbids beside its grammar: where the two leave no token, that request alone ends, and says why."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from quire import LLM, SamplingParams
from quire.config.build import build_config
from quire.engine.async_llm import AsyncLLM
from quire.errors import ValidationError
from tests.structured.libraries import needs_libraries
from tests.structured.test_answers import FORMS, PROMPT, answers, has_form, params

pytestmark = needs_libraries
EOS = 2


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    llm = LLM(max_num_seqs=16, max_model_len=256)
    yield llm
    llm.llm_engine.shutdown()


Together = Callable[[list[SamplingParams]], list[Any]]


@pytest.fixture(scope="module")
def together() -> Iterator[Together]:
    """Runs requests in one batch of a served engine: for each its text, or what went wrong."""
    with asyncio.Runner() as runner:

        async def start() -> AsyncLLM:
            return AsyncLLM.from_config(build_config(max_num_seqs=16, max_model_len=256))

        engine, numbers = runner.run(start()), iter(range(1000))

        async def text(one: SamplingParams) -> str:
            async for output in engine.generate(PROMPT, one, str(next(numbers))):
                last = output
            return last.outputs[0].text

        async def run(asked: list[SamplingParams]) -> list[Any]:
            return await asyncio.gather(*map(text, asked), return_exceptions=True)

        yield lambda asked: runner.run(run(asked))
        engine.shutdown()


def ids(llm: LLM, texts: list[str]) -> list[int]:
    """Every token that these texts may be written with, among them the single bytes."""
    table = llm.llm_engine.tokenizer.table
    pieces = [table.piece(token_id) for token_id in range(3072)]
    parts = {text.encode()[i:j] for text in texts for i in range(len(text)) for j in range(i + 1, len(text) + 1)}
    return [token_id for token_id, piece in enumerate(pieces) if piece in parts]


def test_allowed_ids_without_an_end_are_refused_before_anything_runs(llm: LLM):
    with pytest.raises(ValidationError, match="no end-of-sequence token") as caught:
        llm.generate(PROMPT, params(FORMS["ebnf"], allowed_token_ids=ids(llm, ["xyw"])), use_tqdm=False)
    assert caught.value.field == "allowed_token_ids"


@pytest.mark.parametrize(
    ("form", "fields", "blamed"),
    [
        ({"choice": ["yes", "no"]}, {"allowed_token_ids": [EOS]}, "allowed_token_ids"),
        ({"choice": ["yes"]}, {"bad_words": ["yes", "y", "ye"]}, "bad_words"),
        ({"regex": "a?"}, {"allowed_token_ids": [EOS], "min_tokens": 1}, "min_tokens"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_request_without_a_first_token_ends_with_the_field_and_its_neighbours_do_not_notice(
    together: Together, form: dict[str, Any], fields: dict[str, Any], blamed: str
):
    alone = together([params(FORMS["json"])]) + together([params(None)])
    first, failed, last = together([params(FORMS["json"]), params(form, **fields), params(None)])
    assert isinstance(failed, ValidationError) and failed.field == blamed and "after 0 tokens" in failed.message
    assert [first, last] == alone


@pytest.mark.parametrize(
    ("form", "fields", "blamed"),
    [
        ({"choice": ["yes", "no"]}, {"min_tokens": 20}, "min_tokens"),
        ({"regex": "ab{4}c"}, {"allowed": ["ab", "b"]}, "allowed_token_ids"),
        ({"regex": "a b{4}c"}, {"bad_words": ["c", "bc", "bbc", "bbbc", "bbbbc"]}, "bad_words"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_request_that_runs_out_of_tokens_later_ends_with_the_field(
    llm: LLM, together: Together, form: dict[str, Any], fields: dict[str, Any], blamed: str
):
    if "allowed" in fields:
        fields = {"allowed_token_ids": [*ids(llm, fields["allowed"]), EOS]}
    alone = together([params(FORMS["json"])]) + together([params(None)])
    for greedy in ({}, {"temperature": 0.0, "seed": None}):
        first, failed, last = together([params(FORMS["json"]), params(form, **{**fields, **greedy}), params(None)])
        assert isinstance(failed, ValidationError) and failed.field == blamed, failed
        assert "excludes all tokens" in failed.message and "after 0 tokens" not in failed.message
        assert [first, last] == alone


def test_min_tokens_within_what_the_grammar_can_write_are_written(llm: LLM):
    ((answer,),) = answers(llm, [params({"regex": "[ab]{1,60}"}, min_tokens=12)])
    assert len(answer.token_ids) >= 12 and set(answer.text) <= {"a", "b"}


def test_a_bias_of_minus_100_makes_a_token_unlikely_and_never_impossible(llm: LLM):
    forbidden = dict.fromkeys(ids(llm, ["yes", "no"]), -100.0)
    ((answer,),) = answers(llm, [params({"choice": ["yes", "no"]}, logit_bias=forbidden)])
    assert answer.text in ("yes", "no") and answer.finish_reason == "stop"


def test_allowed_ids_narrow_what_a_grammar_allows(llm: LLM):
    allowed = [*ids(llm, ["xyw"]), EOS]
    for (answer,) in answers(llm, [params(FORMS["ebnf"], allowed_token_ids=allowed, seed=seed) for seed in range(4)]):
        assert answer.text == "xyw" and has_form(FORMS["ebnf"], answer.text)
        assert np.isin(answer.token_ids, allowed).all()
