"""Answers have the form that was asked for, whatever else a request asks for and whatever happens around it."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.config.build import build_config
from quire.engine.async_llm import AsyncLLM
from quire.errors import ConfigError, UnsupportedError, ValidationError
from tests.structured.libraries import needs_libraries

pytestmark = needs_libraries
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
}
PROMPT = "Once upon a time"
FORMS: dict[str, dict[str, Any]] = {
    "json": {"json": PERSON},
    "json_text": {"json": json.dumps(PERSON)},
    "regex": {"regex": r"\d{3}-[a-f]{4}"},
    "choice": {"choice": ["yes", "no", 'may "be"', "é\n"]},
    "ebnf": {"grammar": 'root ::= "x" ("y" | "z") "w"'},
    "lark": {"grammar": 'start: "x" ("y" | "z") "w"'},
    "composed": {"json": {"allOf": [{"type": "integer"}, {"minimum": 5}, {"maximum": 99}]}},
}


def has_form(form: dict[str, Any], text: str) -> bool:
    """Whether `text` is as `form` asks."""
    jsonschema = pytest.importorskip("jsonschema")
    if "json" in form:
        schema = form["json"] if isinstance(form["json"], dict) else json.loads(form["json"])
        return bool(jsonschema.Draft202012Validator(schema).is_valid(json.loads(text)))
    if "choice" in form:
        return text in form["choice"]
    return re.fullmatch(form.get("regex", "x[yz]w"), text) is not None


def params(form: dict[str, Any] | None, **fields: Any) -> SamplingParams:
    """Random, seeded, with room to finish."""
    compact = None if form is None else {**form, "disable_any_whitespace": True}
    return SamplingParams(**{"seed": 1, "max_tokens": 150, "structured_outputs": compact, **fields})


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """`leaf` on a small pool of pages: many requests at once do not fit it."""
    llm = LLM(num_gpu_blocks_override=30, block_size=16, max_num_seqs=16, max_model_len=256)
    yield llm
    llm.llm_engine.shutdown()


def answers(llm: LLM, all_params: list[SamplingParams]) -> list[Any]:
    return [output.outputs for output in llm.generate([PROMPT] * len(all_params), all_params, use_tqdm=False)]


@pytest.mark.parametrize("form", FORMS)
def test_an_answer_has_its_form_and_ends_by_itself(llm: LLM, form: str):
    for outputs in answers(llm, [params(FORMS[form], seed=seed) for seed in range(6)]):
        assert outputs[0].finish_reason == "stop" and has_form(FORMS[form], outputs[0].text), outputs[0].text


def test_structured_and_free_requests_in_one_batch_are_what_they_are_alone():
    llm = LLM(max_model_len=256)
    mixed = [params(form, seed=seed) for seed in range(3) for form in [*FORMS.values(), None]]
    crowd = answers(llm, mixed)
    assert [one[0].text for one in crowd] == [answers(llm, [one])[0][0].text for one in mixed]
    llm.llm_engine.shutdown()


def test_answers_have_their_form_although_their_requests_are_preempted(llm: LLM):
    forms = list(FORMS.values()) * 4
    outputs = llm.generate([PROMPT] * 28, [params(form, seed=i) for i, form in enumerate(forms)], use_tqdm=False)
    assert all(has_form(form, one.outputs[0].text) for form, one in zip(forms, outputs))


def test_n_answers_logprobs_and_greedy_requests_follow_the_grammar(llm: LLM):
    form = FORMS["regex"]
    (several,) = answers(llm, [params(form, n=4)])
    assert len(several) == 4 and all(has_form(form, one.text) for one in several)
    ((greedy,),) = answers(llm, [params(form, temperature=0.0, seed=None)])
    assert has_form(form, greedy.text)
    ((scored,),) = answers(llm, [params(form, logprobs=3)])
    first = next(iter(scored.logprobs[0].values()))
    assert first.decoded_token.isdigit() and first.logprob > float("-inf"), "forbidden tokens are out before scores"


def test_an_answer_that_is_cut_says_length(llm: LLM):
    ((cut,),) = answers(llm, [params(FORMS["json"], max_tokens=3)])
    assert cut.finish_reason == "length" and len(cut.token_ids) == 3


def test_stop_texts_end_an_answer_before_its_grammar_does(llm: LLM):
    ((stopped,),) = answers(llm, [params(FORMS["regex"], stop="-")])
    assert re.fullmatch(r"\d{3}", stopped.text) and stopped.stop_reason == "-"


def test_an_ended_grammar_only_ends_again_where_the_end_is_ignored(llm: LLM):
    ((answer,),) = answers(llm, [params(FORMS["ebnf"], ignore_eos=True, max_tokens=12)])
    assert answer.finish_reason == "length" and has_form(FORMS["ebnf"], answer.text)


@pytest.mark.parametrize(
    ("form", "word"),
    [
        ({"json": {"type": "object", "properties": {"a": {"not": {"type": "null"}}}}}, "/properties/a/not"),
        ({"json": {"type": "string", "minimumLength": 3}}, "/minimumLength"),
        ({"json": {"$ref": "#/$defs/missing"}}, "/$ref"),
        ({"regex": "(?=a)b"}, "regex"),
        ({"regex": "(a"}, "unclosed"),
        ({"json": "{"}, "not JSON"),
        ({"choice": []}, "empty"),
        ({"json": {}, "regex": "a"}, "exactly one"),
        ({"jsn": {}}, "did you mean 'json'"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_form_that_cannot_be_honoured_is_refused_by_its_place(llm: LLM, form: dict[str, Any], word: str):
    with pytest.raises(ValidationError, match=re.escape(word)) as caught:
        llm.generate(PROMPT, SamplingParams(structured_outputs=form), use_tqdm=False)
    assert (caught.value.field or "").startswith("structured_outputs")


def test_a_grammar_that_takes_too_much_ends_its_own_request_alone():
    config = build_config(max_model_len=256, structured_outputs_config={"compile_timeout": 0.3})
    hog = {"regex": "(" + "|".join(f"{'ab' * i}[^x]{{0,400}}" for i in range(60)) + "){40}"}

    async def run() -> tuple[Any, str]:
        engine = AsyncLLM.from_config(config)
        try:

            async def text(request_id: str, form: dict[str, Any] | None) -> str:
                async for output in engine.generate(PROMPT, params(form, max_tokens=40), request_id):
                    last = output
                return last.outputs[0].text

            failed, *others = await asyncio.gather(
                text("hog", hog), text("other", FORMS["regex"]), text("free", None), return_exceptions=True
            )
            assert all(isinstance(one, str) for one in others), others
            again = await text("again", FORMS["regex"])
            return failed, again
        finally:
            engine.shutdown()

    failed, again = asyncio.run(run())
    assert isinstance(failed, ValidationError) and failed.field == "structured_outputs.regex", failed
    assert has_form(FORMS["regex"], again)


def test_a_form_and_a_budget_wait_for_the_thinking_whose_marks_the_settings_name():
    llm = LLM(max_model_len=256, structured_outputs_config={"reasoning_parser": "think"})
    asked = [params(FORMS["regex"], seed=seed, thinking_token_budget=seed) for seed in range(4)]
    texts = [output.outputs[0].text for output in llm.generate(["<think>"] * 4, asked, use_tqdm=False)]
    assert all(has_form(FORMS["regex"], text.partition("</think>")[2].lstrip()) for text in texts), texts
    llm.llm_engine.shutdown()
    with pytest.raises(ConfigError, match="reasoning_parser"):
        LLM(structured_outputs_config={"reasoning_parser": "thnik"})


def test_a_budget_without_marks_is_refused(llm: LLM):
    with pytest.raises(UnsupportedError, match="reasoning_parser"):
        llm.generate(PROMPT, SamplingParams(thinking_token_budget=5), use_tqdm=False)
