from __future__ import annotations

import copy
import math

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.sampling_params import NOT_YET, RequestOutputKind, SamplingParams, SamplingType
from quire.errors import QuireClientError, UnsupportedError, ValidationError

BAD = {
    "temperature below zero": ("temperature", -0.1),
    "temperature not a number": ("temperature", math.nan),
    "temperature infinite": ("temperature", math.inf),
    "temperature as text": ("temperature", "0.7"),
    "temperature as bool": ("temperature", True),
    "temperature none": ("temperature", None),
    "top_p zero": ("top_p", 0.0),
    "top_p above one": ("top_p", 1.1),
    "top_p not a number": ("top_p", math.nan),
    "top_k below minus one": ("top_k", -2),
    "top_k a float": ("top_k", 1.0),
    "min_p negative": ("min_p", -0.1),
    "min_p above one": ("min_p", 1.5),
    "n zero": ("n", 0),
    "n too large": ("n", 16385),
    "n as bool": ("n", True),
    "presence_penalty out of range": ("presence_penalty", 2.5),
    "frequency_penalty out of range": ("frequency_penalty", -2.5),
    "repetition_penalty zero": ("repetition_penalty", 0.0),
    "repetition_penalty infinite": ("repetition_penalty", math.inf),
    "repetition_penalty huge int": ("repetition_penalty", 10**400),
    "seed as text": ("seed", "1"),
    "seed beyond int64": ("seed", 2**63),
    "stop with an empty text": ("stop", ["a", ""]),
    "stop an empty text": ("stop", ""),
    "stop of numbers": ("stop", [1]),
    "stop a number": ("stop", 5),
    "stop_token_ids of floats": ("stop_token_ids", [1.0]),
    "stop_token_ids a text": ("stop_token_ids", "12"),
    "stop_token_ids negative": ("stop_token_ids", [-1]),
    "stop_token_ids of bools": ("stop_token_ids", [True]),
    "ignore_eos a number": ("ignore_eos", 1),
    "max_tokens zero": ("max_tokens", 0),
    "max_tokens a float": ("max_tokens", 3.5),
    "min_tokens negative": ("min_tokens", -1),
    "min_tokens above max_tokens": ("min_tokens", 17),
    "logprobs below minus one": ("logprobs", -2),
    "logprobs false": ("logprobs", False),
    "no logprob_token_ids": ("logprob_token_ids", []),
    "too many logprob_token_ids": ("logprob_token_ids", list(range(129))),
    "a negative logprob_token_id": ("logprob_token_ids", [-1]),
    "prompt_logprobs as text": ("prompt_logprobs", "5"),
    "detokenize a text": ("detokenize", "yes"),
    "output_kind unknown": ("output_kind", 3),
    "logit_bias a list": ("logit_bias", [1]),
    "logit_bias with a text key": ("logit_bias", {"1": 1.0}),
    "logit_bias infinite": ("logit_bias", {1: math.inf}),
    "logit_bias negative id": ("logit_bias", {-1: 1.0}),
    "allowed_token_ids empty": ("allowed_token_ids", []),
    "bad_words with an empty text": ("bad_words", [""]),
    "bad_words too many": ("bad_words", [f"x{index}" for index in range(129)]),
    "extra_args a list": ("extra_args", [1]),
    "extra_args with an object": ("extra_args", {"x": object()}),
    "extra_args with a huge int": ("extra_args", {"x": [2**64]}),
}


@pytest.mark.parametrize(("field", "value"), BAD.values(), ids=BAD.keys())
def test_a_bad_value_is_refused_with_the_fields_name_and_a_hint(field: str, value: object) -> None:
    with pytest.raises(ValidationError) as caught:
        SamplingParams(**{field: value})
    assert field in str(caught.value.field)
    assert field in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize("name", NOT_YET)
def test_a_parameter_not_honoured_yet_is_refused_by_name(name: str) -> None:
    with pytest.raises(
        UnsupportedError, match=f"{name} is valid for vLLM, but Quire does not implement it yet"
    ) as caught:
        SamplingParams(**{name: {"anything": 1}})
    assert caught.value.field == name


@pytest.mark.parametrize("name", NOT_YET)
def test_a_parameter_not_honoured_yet_accepts_its_neutral_values(name: str) -> None:
    for neutral in NOT_YET[name]:
        SamplingParams(**{name: neutral})


def test_the_first_neutral_value_is_the_default() -> None:
    params = SamplingParams()
    assert all(getattr(params, name) == neutral[0] for name, neutral in NOT_YET.items())


def test_an_unknown_parameter_names_the_nearest() -> None:
    for make in (SamplingParams, SamplingParams.from_optional, lambda **k: SamplingParams.from_dict(k)):
        with pytest.raises(ValidationError, match=r"'temprature'\nhint: did you mean 'temperature'"):
            make(temprature=1.0)


def test_positional_arguments_are_refused_with_the_keyword_form() -> None:
    with pytest.raises(ValidationError, match="by keyword"):
        SamplingParams(1)  # type: ignore[call-arg]


def test_any_temperature_is_taken_and_extreme_ones_are_brought_into_range() -> None:
    temperatures = [SamplingParams(temperature=one).temperature for one in (0, 1e-9, 2.5, 100, 1e300)]
    assert temperatures == [0.0, 0.01, 2.5, 100.0, 1e6]


def test_zero_temperature_is_greedy_and_neutralises_the_filters() -> None:
    params = SamplingParams(temperature=0, top_p=0.5, top_k=7, min_p=0.3)
    assert (params.top_p, params.top_k, params.min_p) == (1.0, 0, 0.0)
    assert params.is_greedy and params.sampling_type is SamplingType.GREEDY


def test_greedy_with_several_answers_is_refused() -> None:
    with pytest.raises(ValidationError, match="n=2 with temperature=0"):
        SamplingParams(temperature=0, n=2)


def test_a_tiny_temperature_is_raised_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", logger="quire"):
        assert SamplingParams(temperature=0.001).temperature == 0.01
    assert "temperature=0.001" in caplog.text


def test_seeds() -> None:
    assert SamplingParams(seed=-1).seed is None
    assert SamplingParams(seed=-1).sampling_type is SamplingType.RANDOM
    assert SamplingParams(seed=0).sampling_type is SamplingType.RANDOM_SEED


def test_a_stop_text_becomes_a_list() -> None:
    assert SamplingParams(stop="END").stop == ["END"]
    assert SamplingParams(stop=[]).stop_strings == []
    assert SamplingParams(stop=("a", "b")).stop_strings == ["a", "b"]  # type: ignore[arg-type]


def test_stop_needs_text() -> None:
    with pytest.raises(ValidationError, match="detokenize=True"):
        SamplingParams(stop="x", detokenize=False)


def test_stop_ids_are_deduplicated_in_order() -> None:
    assert SamplingParams(stop_token_ids=[3, 1, 3]).stop_token_ids == [3, 1]
    assert SamplingParams(stop_token_ids=np.array([3, 1])).stop_token_ids == [3, 1]  # type: ignore[arg-type]


def test_logprobs_true_is_one_and_prompt_logprobs_skip_the_prefix_cache() -> None:
    params = SamplingParams(logprobs=True, prompt_logprobs=-1)
    assert params.logprobs == 1 and type(params.logprobs) is int
    assert params.skip_reading_prefix_cache is True
    assert SamplingParams().skip_reading_prefix_cache is False
    assert SamplingParams(prompt_logprobs=1, skip_reading_prefix_cache=False).skip_reading_prefix_cache is False


def test_numpy_numbers_become_python_numbers() -> None:
    params = SamplingParams(max_tokens=np.int64(5), temperature=np.float32(0.5))  # type: ignore[arg-type]
    assert type(params.max_tokens) is int and type(params.temperature) is float


def test_from_optional_drops_none_clamps_biases_and_keeps_unlimited_length() -> None:
    params = SamplingParams.from_optional(n=None, top_p=None, logit_bias={"5": 1000, 6: -1000}, max_tokens=None)
    assert params.n == 1 and params.logit_bias == {5: 100.0, 6: -100.0} and params.max_tokens is None
    assert SamplingParams.from_optional().max_tokens == 16


def test_spaces_between_special_tokens_is_refused_only_where_it_would_matter() -> None:
    SamplingParams(spaces_between_special_tokens=False)
    with pytest.raises(UnsupportedError, match="spaces_between_special_tokens"):
        SamplingParams(spaces_between_special_tokens=False, skip_special_tokens=False)


def test_transfer_parameters_in_extra_args_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedError, match="ec_transfer_params"):
        SamplingParams(extra_args={"ec_transfer_params": {}})
    with pytest.raises(ValidationError, match="kv_transfer_params must be an object"):
        SamplingParams(extra_args={"kv_transfer_params": [1]})


def test_deeply_nested_extra_args_are_refused() -> None:
    nested: dict[str, object] = {}
    for _ in range(100):
        nested = {"x": nested}
    with pytest.raises(ValidationError, match="nested too deeply"):
        SamplingParams(extra_args=nested)


def test_generation_config_adds_the_further_end_ids() -> None:
    params = SamplingParams(stop_token_ids=[9])
    params.update_from_generation_config({"eos_token_id": [2, 7, 9]}, eos_token_id=2)
    assert params.stop_token_ids == [9, 7]
    ignoring = SamplingParams(ignore_eos=True)
    ignoring.update_from_generation_config({"eos_token_id": [2, 7]}, eos_token_id=2)
    assert ignoring.stop_token_ids is None
    single = SamplingParams()
    single.update_from_generation_config({"eos_token_id": 2}, eos_token_id=2)
    assert single.stop_token_ids is None


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(stop_token_ids=[100]),
        SamplingParams(allowed_token_ids=[5, 100]),
        SamplingParams(logit_bias={100: 1.0}),
        SamplingParams(bad_words=["x"], bad_words_token_ids=[[1, 100]]),
    ],
    ids=["stop_token_ids", "allowed_token_ids", "logit_bias", "bad_words"],
)
def test_ids_outside_the_vocabulary_are_refused_for_the_model(params: SamplingParams) -> None:
    params.validate_for_model(vocab_size=101)
    with pytest.raises(ValidationError, match=r"in \[0, 99\]"):
        params.validate_for_model(vocab_size=100)


def test_named_tokens_count_as_logprobs_and_must_agree_with_them() -> None:
    assert SamplingParams(logprob_token_ids=[5, 9]).logprobs == 2
    params = SamplingParams(logprob_token_ids=list(range(30)), logprobs=30)
    params.validate_for_model(vocab_size=100, max_logprobs=20)
    with pytest.raises(ValidationError, match="logprobs=3 with 2 logprob_token_ids"):
        SamplingParams(logprob_token_ids=[5, 9], logprobs=3)
    with pytest.raises(ValidationError, match="logprob_token_ids"):
        SamplingParams(logprob_token_ids=[100]).validate_for_model(vocab_size=100)


def test_too_many_logprobs_are_refused_for_the_engine() -> None:
    SamplingParams(logprobs=20).validate_for_model(vocab_size=100, max_logprobs=20)
    SamplingParams(logprobs=-1).validate_for_model(vocab_size=100, max_logprobs=-1)
    for params in (SamplingParams(logprobs=21), SamplingParams(prompt_logprobs=-1)):
        with pytest.raises(ValidationError, match="max_logprobs="):
            params.validate_for_model(vocab_size=100, max_logprobs=20)
    with pytest.raises(ValidationError, match="at most 100"):
        SamplingParams(logprobs=101).validate_for_model(vocab_size=100, max_logprobs=-1)


def test_texts_are_refused_without_a_tokenizer() -> None:
    for params in (SamplingParams(stop="x"), SamplingParams(bad_words=["x"])):
        with pytest.raises(ValidationError, match="skip_tokenizer_init"):
            params.validate_for_model(vocab_size=10, has_tokenizer=False)


def test_a_clone_shares_nothing_mutable() -> None:
    params = SamplingParams(stop=["a"], extra_args={"x": [1]})
    clone = params.clone()
    assert clone == params
    clone.stop.append("b")  # type: ignore[union-attr]
    clone.extra_args["x"].append(2)  # type: ignore[index]
    assert params.stop == ["a"] and params.extra_args == {"x": [1]}


def test_output_kind_accepts_its_number() -> None:
    assert SamplingParams(output_kind=2).output_kind is RequestOutputKind.FINAL_ONLY  # type: ignore[arg-type]


VALID = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.floats(0, 2),
        "top_p": st.floats(0.01, 1),
        "top_k": st.integers(-1, 1000),
        "min_p": st.floats(0, 1),
        "seed": st.none() | st.integers(-(2**63), 2**63 - 1),
        "stop": st.none() | st.text(min_size=1) | st.lists(st.text(min_size=1)),
        "stop_token_ids": st.none() | st.lists(st.integers(0, 2**31 - 1)),
        "max_tokens": st.none() | st.integers(10, 10**6),
        "min_tokens": st.integers(0, 10),
        "logprobs": st.none() | st.integers(-1, 100) | st.just(True),
        "logit_bias": st.none() | st.dictionaries(st.integers(0, 1000), st.floats(-100, 100)),
        "extra_args": st.none() | st.dictionaries(st.text(), st.integers(-5, 5) | st.text()),
    },
)


@settings(deadline=None, max_examples=100)
@given(VALID)
def test_normalising_twice_changes_nothing_and_messages_carry_every_field(values: dict[str, object]) -> None:
    params = SamplingParams(**values)
    assert msgspec.structs.replace(params) == params
    assert copy.deepcopy(params) == params
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


ANYTHING = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.integers()) | st.binary()


@settings(deadline=None, max_examples=300)
@given(st.sampled_from(SamplingParams.__struct_fields__), ANYTHING)
def test_any_value_is_accepted_or_refused_with_the_fields_name(field: str, value: object) -> None:
    if field == "bad_words_token_ids":
        return
    try:
        SamplingParams(**{field: value})
    except QuireClientError as error:
        assert error.field and error.hint
