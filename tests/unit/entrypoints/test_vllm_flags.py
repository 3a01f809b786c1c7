"""The flags of `vllm serve` 0.33, by name, and the forms in which its users write them."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from quire.cli import serve
from quire.config.not_yet import NO_EFFECT, NOT_YET
from quire.entrypoints.args import QuireParser
from quire.entrypoints.flag_forms import merge_dotted, plain_argv
from quire.errors import ConfigError, QuireClientError, UnsupportedError
from tests.each import each

NAMES = Path(__file__).with_name("vllm_flags.txt").read_text().split()
PARSER = QuireParser(prog="quire serve")
serve.add_arguments(PARSER)


def configs(*argv: str) -> tuple[Any, Any]:
    return serve.configs_from_args(PARSER.parse_args(argv))


def test_the_list_of_names_is_whole() -> None:
    assert len(set(NAMES)) == 322


@each("flag", NAMES)
def test_no_flag_of_vllm_is_unknown(flag: str) -> None:
    action = PARSER._option_string_actions[flag]
    name = action.dest
    if name in NO_EFFECT:
        assert configs(*([flag] if action.nargs == 0 else [flag, "1"])) == configs()
    elif name in NOT_YET and action.help == "==SUPPRESS==":
        with pytest.raises(
            UnsupportedError, match=f"{name} is a vLLM option that Quire does not implement yet: .{{10,}}"
        ) as caught:
            configs(*([flag] if action.nargs in (0, "?") else [flag, "something"]))
        assert caught.value.field == name and caught.value.hint and len(caught.value.hint) > len(f"leave out {name}; ")


def test_what_changes_nothing_is_named_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("quire").propagate = True
    with caplog.at_level("INFO", "quire"):
        configs("--enable-prompt-tokens-details", "--disable-log-requests", "-O3")
    assert [record.args[0] for record in caplog.records if record.args] == [
        "enable_prompt_tokens_details", "disable_log_requests", "optimization_level",
    ]  # fmt: skip


FORMS = {
    "underscores": (["--max_model_len", "64"], {"max_model_len": 64}),
    "underscores and equals": (["--max_model_len=64"], {"max_model_len": 64}),
    "underscores negated": (["--no-enable_prefix_caching"], {"enable_prefix_caching": False}),
    "a value with underscores": (["--served-model-name=my_model"], {"served_model_name": "my_model"}),
    "size": (["--max-model-len", "2k"], {"max_model_len": 2000}),
    "the longest that fits": (["--max-model-len", "-1"], {"max_model_len": -1}),
    "the longest that fits, in words": (["--max-model-len=auto"], {"max_model_len": "auto"}),
    "the length in Ki": (["--max-model-len", "1K"], {"max_model_len": "1K"}),
    "binary size": (["--max-num-batched-tokens", "4K"], {"max_num_batched_tokens": 4096}),
    "dotted": (["--structured-outputs-config.backend", "xgrammar"], {"structured_outputs_backend": "xgrammar"}),
    "dotted twice": (
        ["--structured_outputs_config.backend=guidance", "--structured-outputs-config.disable_any_whitespace", "true"],
        {"structured_outputs_backend": "guidance", "structured_outputs_disable_any_whitespace": True},
    ),
    "dotted json": (
        ["--kv-events-config.enable_kv_cache_events", "true", "--kv-events-config.topic", "t"],
        {"kv_events_config": '{"enable_kv_cache_events": true, "topic": "t"}'},
    ),
    "dotted deep": (
        ["--hf-overrides.rope_parameters.factor", "4", "--hf-overrides.rope_parameters.rope_type", "yarn"],
        {"hf_overrides": '{"rope_parameters": {"factor": 4, "rope_type": "yarn"}}'},
    ),
    "vllm's neutral": (["--generation-config", "vllm"], {"generation_config": "vllm"}),
    "optimization level": (["-O3"], {}),
    "compilation": (["-O.mode", "3", "-cc", "3"][:2], {}),
    "one replica": (["-dp", "1", "-tp=1", "-asc", "1"], {}),
    "several names": (["leaf", "--served-model-name", "a", "b"], {"served_model_name": ["a", "b"]}),
    "names with a comma": (["--served-model-name", "a,b"], {"served_model_name": ["a", "b"]}),
}


@pytest.mark.parametrize(("argv", "settings"), FORMS.values(), ids=FORMS.keys())
def test_flags_have_the_forms_of_vllm(argv: list[str], settings: dict[str, Any]) -> None:
    from quire.config.build import build_config

    assert configs(*argv)[0] == build_config(disable_log_stats=False, **settings)


def test_keys_and_origins_may_be_several() -> None:
    _, server = configs("leaf", "--api-key", "one", "two", "--allowed-origins", '["http://a", "http://b"]')
    assert server.api.api_key == ("one", "two") and server.http.allowed_origins == ("http://a", "http://b")
    assert configs("--api-key", "a,b")[1].api.api_key == ("a,b",)
    _, methods = configs("leaf", "--allowed-methods", "GET", "POST", "--allowed-origins", "*")
    assert methods.http.allowed_methods == ("GET", "POST")


WRONG = {
    "an object and its keys": (
        ["--structured-outputs-config", "{}", "--structured-outputs-config.backend", "auto"], "one of the two forms"
    ),
    "a key twice": (["--hf-overrides.dtype=a", "--hf-overrides.dtype=b"], "dtype is given twice"),
    "a key with a value and keys": (["--hf-overrides.a=1", "--hf-overrides.a.b=2"], "a has a value and keys"),
    "two models": (["leaf", "--model", "other"], "two models: 'leaf' and --model 'other'"),
    "a model that a flag took": (["--served-model-name", "name", "org/model"], "put the model first"),
    "a model that became a key": (["--api-key", "secret-key", "org/model"], "put the model first"),
    "credentials for everybody": (["--allow-credentials", "--allowed-origins", "*"], "name the pages"),
    "an unknown override": (["--hf-overrides.rope_scalin", "1"], "did you mean 'rope_scaling'"),
    "an unknown default": (["--override-generation-config", '{"temperatur": 1}'], "did you mean 'temperature'"),
    "a list that is none": (["--allowed-origins", "[1]"], "must be a list of strings"),
    "lora modules": (["leaf", "--lora-modules", "a=b", "c=d"], "merge the adapter"),
}  # fmt: skip


@pytest.mark.parametrize(("argv", "message"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_form_is_refused_with_the_fix(argv: list[str], message: str) -> None:
    with pytest.raises(QuireClientError) as caught:
        configs(*argv)
    assert message in str(caught.value)


def test_both_ways_to_name_one_model_agree() -> None:
    assert configs("leaf", "--model", "leaf")[0].model.model == "leaf"


def test_keys_of_a_config_file_may_be_dotted(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    file.write_text("structured-outputs-config.backend: guidance\nserved_model_name: [a, b]\nmax-model-len: 64\n")
    engine, _ = configs("--config", str(file))
    assert engine.structured_outputs.backend == "guidance" and engine.model.served_model_names == ("a", "b")
    with pytest.raises(ConfigError, match="one of the two forms"):
        merge_dotted({"a": {}, "a.b": 1})


def test_other_arguments_are_left_as_they_are() -> None:
    flags = {"--prompt", "--max_tokens", "--x-y", "--x-y.z"}
    argv = ["some_text", "--max_tokens", "5", "--unknown_flag", "--x_y", "a_b", "--x-y.z", "-5", "--", "--x_y"]
    plain = ["some_text", "--max_tokens", "5", "--unknown-flag", "--x-y", "a_b", "--x-y.z", "-5", "--", "--x_y"]
    assert plain_argv(argv, flags) == plain
    assert json.loads(plain_argv(["--x-y.items+", "1", "--x-y.items+", "-2"], {"--x-y"})[0].partition("=")[2]) == {
        "items": [1, -2]
    }
