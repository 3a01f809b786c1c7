"""`speculative_config`: vLLM's forms of it make one value, and what cannot be is refused by name with the fix."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from quire.cli import serve
from quire.config import QuireConfig
from quire.config.build import build_config
from quire.config.speculative import MTP_ALIASES, SpeculativeConfig
from quire.config.speculative_forms import KEYS, NO_EFFECT, REFUSED
from quire.entrypoints.args import QuireParser
from quire.errors import ConfigError, QuireClientError, UnsupportedError

PARSER = QuireParser(prog="quire serve")
serve.add_arguments(PARSER)
VLLM_FIELDS = """
    enforce_eager num_speculative_tokens model method draft_tensor_parallel_size tensor_parallel_size quantization
    moe_backend attention_backend kv_cache_dtype max_model_len revision code_revision index_share_for_mtp_iteration
    disable_padded_drafter_batch disable_eagle_block_drop disable_lookahead_block_hashes use_local_argmax_reduction
    use_heterogeneous_vocab prompt_lookup_max prompt_lookup_min parallel_drafting num_speculative_tokens_per_batch_size
    suffix_decoding_max_tree_depth suffix_decoding_max_cached_requests suffix_decoding_max_spec_factor
    suffix_decoding_min_token_prob draft_load_config rejection_sample_method synthetic_acceptance_rates
    synthetic_acceptance_length enable_adaptive_verification draft_sample_method dspark_draft_topk xpress_topc
"""  # of 0.33, `fly_*` aside


def of_flags(*argv: str) -> SpeculativeConfig | None:
    return serve.configs_from_args(PARSER.parse_args(argv))[0].speculative


def of(**keys: Any) -> SpeculativeConfig:
    found = build_config(speculative_config=keys).speculative
    assert found is not None
    return found


FORMS = {
    "JSON": ["--speculative-config", '{"method": "ngram", "num_speculative_tokens": 3}'],
    "short": ["-sc", '{"method": "ngram", "num_speculative_tokens": 3}'],
    "dotted": ["--speculative-config.method", "ngram", "--speculative-config.num-speculative-tokens=3"],
    "dotted short": ["-sc.method=ngram", "-sc.num_speculative_tokens", "3"],
    "shorthands": ["--spec-method", "ngram", "--spec-tokens", "3"],
    "both": ["--speculative_config.method=ngram", "--spec_tokens", "3"],
}


@pytest.mark.parametrize("argv", FORMS.values(), ids=FORMS.keys())
def test_every_form_of_the_flag_means_the_same(argv: list[str]) -> None:
    assert of_flags(*argv) == SpeculativeConfig(method=("ngram",), num_speculative_tokens=3)


def test_nothing_said_is_none_and_off_is_one_word(tmp_path: Path) -> None:
    assert of_flags() is None and QuireConfig().speculative is None
    assert build_config(speculative_config={}).speculative is None
    assert build_config(speculative_config=None, spec_method=None).speculative is None
    file = tmp_path / "settings.yaml"
    file.write_text("speculative-config: off\n")  # a word that YAML reads as false
    for argv in (["--speculative-config", "off"], ["--spec-method", "off"], ["-sc", '"off"'], ["--config", str(file)]):
        found = of_flags(*argv)
        assert found is not None and found.is_off and found.num_tokens == 0
    assert of(method="off", model="kept", num_speculative_tokens=3).is_off


def test_a_config_file_gives_keys_and_objects(tmp_path: Path) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("speculative_config:\n  method: [suffix, eagle]\n  model: org/head\nspec-tokens: 6\n")
    expected = SpeculativeConfig(method=("suffix", "eagle"), model="org/head", num_speculative_tokens=6)
    assert of_flags("--config", str(file)) == expected
    file.write_text("speculative-config.method: suffix,eagle\nspeculative-config.model: org/head\nspec_tokens: 6\n")
    assert of_flags("--config", str(file)) == expected


def test_a_chain_is_a_list_or_a_text_with_a_comma() -> None:
    one, other = of(method=["suffix", "eagle3"], model="m"), of(method="suffix, eagle3", model="m")
    assert one == other and one.method == ("suffix", "eagle3")
    assert one.history_methods == ("suffix",) and one.model_method == "eagle3"
    assert one.num_tokens == 24, "the larger of the two defaults"


def test_what_is_left_open_has_the_default_of_its_method() -> None:
    assert [of(method=name).num_tokens for name in ("ngram", "suffix", "mtp")] == [8, 24, 1]
    assert of(model="org/small") == SpeculativeConfig(method=("draft_model",), model="org/small")
    assert of(method="ngram", model="[ngram]") == of(method="ngram") == of(model="ngram")
    assert of(method="suffix").acceptance == "sampled"
    assert of(method="ngram", rejection_sample_method="block").acceptance == "rejection"
    assert of(method="mtp", draft_sample_method="probabilistic").acceptance == "rejection"
    assert (
        of(method="mtp").draft_sample_method
        == of(method="ngram", acceptance="rejection").draft_sample_method
        == "greedy"
    )
    assert of(method="mtp", acceptance="rejection").draws_drafts
    assert not of(method="mtp", acceptance="rejection", draft_sample_method="greedy").draws_drafts


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(None, None, (5, 5)), (2, None, (2, 2)), (None, 7, (7, 7)), (2, 4, (2, 4)), (3, 3, (3, 3))],
)
def test_bounds_of_the_lookup_default_to_each_other(low: int, high: int, expected: tuple[int, int]) -> None:
    found = of(method="ngram", prompt_lookup_min=low, prompt_lookup_max=high)
    assert (found.prompt_lookup_min, found.prompt_lookup_max) == expected


@pytest.mark.parametrize("name", sorted(MTP_ALIASES))
def test_deprecated_names_mean_mtp_and_are_warned_of(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", "quire"):
        assert of(method=name).method == ("mtp",)
    assert f"method {name} is a deprecated name of mtp" in caplog.text


def test_a_config_object_goes_where_its_keys_do() -> None:
    given = SpeculativeConfig(method=("ngram",), prompt_lookup_max=4, acceptance="typical", posterior_alpha=0.2)
    assert build_config(speculative_config=given).speculative == given
    for one in (given, of(method="off"), of(method="suffix,mtp")):
        assert SpeculativeConfig(**dataclasses.asdict(one)) == one
        assert build_config(speculative_config=json.dumps(dataclasses.asdict(one))).speculative == one


def test_every_field_of_vllm_is_used_or_named() -> None:
    assert set(VLLM_FIELDS.split()) <= {*KEYS, *REFUSED, *NO_EFFECT}
    assert not set(KEYS) & {*REFUSED, *NO_EFFECT}


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_key_is_taken_where_it_asks_for_nothing(name: str) -> None:
    neutral, why, hint = REFUSED[name]
    for value in neutral:
        assert of(method="suffix", **{name: value}) == of(method="suffix")
    with pytest.raises(UnsupportedError) as caught:
        of(method="suffix", **{name: 7})
    assert name in caught.value.message and why in caught.value.message
    assert caught.value.hint == hint and caught.value.field == "speculative_config"


@pytest.mark.parametrize("name", NO_EFFECT)
def test_a_key_without_effect_is_named_in_the_log(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("WARNING", "quire"):
        assert of(method="suffix", **{name: True}) == of(method="suffix")
    assert f"{name} has no effect: {NO_EFFECT[name]}" in caplog.text


WRONG: dict[str, tuple[dict[str, Any], str, str]] = {
    "no method": ({"num_speculative_tokens": 3}, "neither method nor model", "suffix"),
    "unknown method": ({"method": "ngrma"}, "'ngrma' is not a known method", "did you mean 'ngram'"),
    "empty method": ({"method": ""}, "empty", "suffix"),
    "method as a number": ({"method": 3}, "method", "a list of strings"),
    "unknown key": ({"method": "suffix", "num_tokens": 3}, "no key 'num_tokens'", "num_"),
    "no drafts": ({"method": "suffix", "num_speculative_tokens": 0}, "num_speculative_tokens", "1 to 128"),
    "too many drafts": ({"method": "suffix", "num_speculative_tokens": 129}, "num_speculative_tokens", "1 to 128"),
    "drafts as a text": ({"method": "suffix", "num_speculative_tokens": "3"}, "num_speculative_tokens", "an integer"),
    "three methods": ({"method": "suffix,ngram,mtp"}, "3 methods", "at most two"),
    "one method twice": ({"method": ["ngram", "ngram_gpu"]}, "the same one twice", "once"),
    "two models": ({"method": "mtp,medusa", "model": "m"}, "both need a model", "after suffix"),
    "model without use": ({"method": "suffix", "model": "m"}, "model is given", "draft_model"),
    "quantization without use": ({"method": "ngram", "quantization": "int8"}, "quantization is given", "leave out"),
    "min above max": (
        {"method": "ngram", "prompt_lookup_min": 4, "prompt_lookup_max": 2}, "larger than prompt_lookup_max=2", "<= 2",
    ),
    "lookup of another method": ({"method": "suffix", "prompt_lookup_max": 2}, "of method ngram", "leave them out"),
    "lookup of nothing": ({"method": "ngram", "prompt_lookup_min": 0}, "prompt_lookup_min", "1 to 128"),
    "unknown acceptance": ({"method": "ngram", "acceptance": "greedy"}, "acceptance", "sampled, rejection, typical"),
    "block without rejection": (
        {"method": "ngram", "acceptance": "sampled", "rejection_sample_method": "block"},
        "block needs acceptance rejection", "leave out",
    ),
    "drawn drafts without rejection": (
        {"method": "mtp", "acceptance": "typical", "draft_sample_method": "probabilistic"},
        "probabilistic needs acceptance rejection", "leave out",
    ),
    "drawn drafts without a model": (
        {"method": "ngram", "draft_sample_method": "probabilistic"}, "needs a method with a model", "draft_model",
    ),
    "thresholds without typical": ({"method": "ngram", "posterior_alpha": 0.5}, "of acceptance typical", "typical"),
    "made-up acceptance": (
        {"method": "ngram", "rejection_sample_method": "synthetic"}, "rejection_sample_method", "standard, block",
    ),
    "drafter of others": ({"method": "dflash", "model": "m"}, "dflash is not supported", "suffix"),
    "class by path": ({"method": "custom_class", "model": "a.B"}, "custom_class is not supported", "suffix"),
    "fly": ({"method": "ngram", "fly_window": 2}, "fly_window is not supported", "leave it out"),
    "share of more than all": ({"method": "suffix", "suffix_decoding_min_token_prob": 1.5}, "min_token_prob", "0.0"),
}  # fmt: skip


@pytest.mark.parametrize(("keys", "message", "hint"), WRONG.values(), ids=WRONG.keys())
def test_what_cannot_be_is_refused_with_the_fix(keys: dict[str, Any], message: str, hint: str) -> None:
    with pytest.raises(QuireClientError) as caught:
        of(**keys)
    assert message in caught.value.message and hint in str(caught.value.hint)
    assert caught.value.field == "speculative_config"


def test_a_scheduler_of_others_has_no_drafts() -> None:
    with pytest.raises(UnsupportedError, match="a scheduler plugin is configured") as caught:
        build_config(speculative_config={"method": "suffix"}, scheduler_cls="theirs")
    assert caught.value.field == "speculative_config" and "scheduler_cls" in str(caught.value.hint)
    assert build_config(speculative_config="off", scheduler_cls="theirs").scheduler.scheduler_cls == "theirs"


def test_what_is_not_an_object_and_a_key_given_twice_are_refused() -> None:
    for text in ("on", "[]", '{"method": ', "3"):
        with pytest.raises(ConfigError, match="speculative_config=.* is not a JSON object"):
            build_config(speculative_config=text)
    with pytest.raises(ConfigError, match="both give method: 'ngram' and 'suffix'"):
        build_config(speculative_config={"method": "ngram"}, spec_method="suffix")
    assert build_config(speculative_config={"method": "ngram"}, spec_method="ngram").speculative == of(method="ngram")
    with pytest.raises(ConfigError, match="spec_tokens"):
        build_config(spec_method="ngram", spec_tokens=0)
