"""What is wrong with a request is found before the engine core hears of it; what is right is made plain."""

from __future__ import annotations

import pytest

from quire.core.request_options import DEFAULT_OPTIONS, RequestOptions
from quire.core.sampling_params import SamplingParams
from quire.engine.generation_defaults import GenerationDefaults
from quire.engine.input_processor import InputLimits, InputProcessor, bad_words_token_ids
from quire.errors import ValidationError
from tests.unit.engine.fakes import EOS, TOKENIZER, ids

LIMITS = InputLimits(vocab_size=TOKENIZER.vocab_size, max_model_len=10, max_logprobs=5)
DEFAULTS = GenerationDefaults(eos_token_id=EOS, other_eos_token_ids=(2, 3))


def prepare(prompt, params=None, tokenizer=TOKENIZER, options=DEFAULT_OPTIONS):
    return InputProcessor(LIMITS, tokenizer, DEFAULTS).prepare(prompt, params or SamplingParams(), options)


def test_text_is_tokenized_with_what_the_vocabulary_adds():
    prepared = prepare("fox")
    assert prepared.prompt_token_ids.tolist() == TOKENIZER.encode("fox")
    assert prepared.prompt == "fox"
    assert prepare("fox", options=RequestOptions(add_special_tokens=False)).prompt_token_ids.tolist() == ids("fox")


def test_ids_come_through_as_they_are():
    prepared = prepare({"prompt_token_ids": [5, 6], "prompt": "given", "cache_salt": "s"})
    assert (prepared.prompt_token_ids.tolist(), prepared.prompt, prepared.cache_salt) == ([5, 6], "given", "s")


@pytest.mark.parametrize("length", [10, 11, 500])
def test_a_prompt_that_leaves_no_room_is_refused_with_both_numbers(length):
    with pytest.raises(ValidationError, match=rf"length is 10 .* {length} tokens\nhint: .* at most 9 tokens"):
        prepare([7] * length)


def test_the_longest_prompt_may_get_one_token():
    assert prepare([7] * 9, SamplingParams(max_tokens=None)).params.max_tokens == 1


@pytest.mark.parametrize("token_id", [TOKENIZER.vocab_size, 2**31 - 1])
def test_ids_outside_the_vocabulary_are_refused(token_id):
    with pytest.raises(ValidationError, match=rf"prompt_token_ids\[1\] is {token_id}"):
        prepare([5, token_id])


@pytest.mark.parametrize(("asked", "given"), [(None, 6), (3, 3), (100, 6)])
def test_max_tokens_is_a_number_that_fits(asked, given):
    assert prepare([5] * 4, SamplingParams(max_tokens=asked)).params.max_tokens == given


def test_the_callers_parameters_stay_as_they_are():
    params = SamplingParams(max_tokens=None, stop_token_ids=[7])
    before = params.clone()
    prepare([5], params)
    assert params == before


def test_further_ends_of_turn_become_stop_ids():
    assert prepare([5], SamplingParams(stop_token_ids=[7, 2])).params.stop_token_ids == [7, 2, 3]
    assert prepare([5], SamplingParams(ignore_eos=True)).params.stop_token_ids is None


def test_all_logprobs_are_as_many_as_the_vocabulary():
    unlimited = InputLimits(vocab_size=TOKENIZER.vocab_size, max_model_len=10, max_logprobs=-1)
    params = SamplingParams(logprobs=-1, prompt_logprobs=-1)
    prepared = InputProcessor(unlimited, TOKENIZER, DEFAULTS).prepare([5], params).params
    assert prepared.logprobs == prepared.prompt_logprobs == TOKENIZER.vocab_size


@pytest.mark.parametrize(
    "params",
    [
        {"logprobs": 6},
        {"logprobs": -1},
        {"prompt_logprobs": 6},
        {"stop_token_ids": [10**6]},
        {"allowed_token_ids": [10**6]},
        {"logit_bias": {10**6: 1.0}},
    ],
    ids=str,
)
def test_parameters_that_this_model_cannot_serve_are_refused_by_name(params):
    with pytest.raises(ValidationError) as caught:
        prepare([5], SamplingParams(**params))
    assert next(iter(params)) in str(caught.value)


def test_text_needs_a_tokenizer():
    with pytest.raises(ValidationError, match="skip_tokenizer_init"):
        prepare("text", tokenizer=None)


@pytest.mark.parametrize("prompt", ["", [], {}, {"prompt": ""}, 3, None, {"prompt_token_ids": [-1]}], ids=repr)
def test_malformed_prompts_are_refused(prompt):
    with pytest.raises(ValidationError):
        prepare(prompt)


def test_parameters_of_a_wrong_type_are_refused():
    with pytest.raises(ValidationError, match="must be a SamplingParams"):
        prepare([5], {"temperature": 1})


def test_bad_words_are_banned_at_the_beginning_and_after_a_space():
    forms = bad_words_token_ids(TOKENIZER, ["fox", " fox"])
    assert forms == [ids("fox"), ids(" fox")]
    assert prepare([5], SamplingParams(bad_words=["fox"])).params.bad_words_token_ids == forms
