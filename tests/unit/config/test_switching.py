"""The file of models: what it may say, and errors that name the file, the model and the field."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quire.config.server import ApiConfig
from quire.config.switching import check_defaults, read_models_file
from quire.errors import ConfigError, QuireError

FILE = """
memory_budget: 12GiB
idle_unload_s: 600
models:
  chat:
    model: Qwen/Qwen2.5-0.5B-Instruct
    pinned: true
    max-model-len: 8k
    kv_cache_memory_bytes: 512MiB
    tool_call_parser: hermes
  coder:
    model: ./coder.gguf
    served_model_name: [coder-small, small]
"""


def written(directory: Path, text: str, name: str = "models.yaml") -> Path:
    path = directory / name
    path.write_text(text)
    return path


def test_a_file_names_models_with_their_settings_and_the_memory(tmp_path: Path):
    file = read_models_file(written(tmp_path, FILE), {"max_num_seqs": 4, "max_model_len": 512})
    assert file.switching.memory_budget == 12 << 30 and file.switching.idle_unload_s == 600
    chat, coder = file.models
    assert chat.names == ("chat",) and chat.is_pinned and not coder.is_pinned
    assert chat.config.model.max_model_len == 8000 and coder.config.model.max_model_len == 512
    assert chat.config.cache.kv_cache_memory_bytes == 512 << 20
    assert {one.config.scheduler.max_num_seqs for one in file.models} == {4}
    assert coder.names == ("coder", "coder-small", "small") == coder.config.model.served_model_names
    assert chat.api_config(ApiConfig()).tool_call_parser == "hermes"
    assert coder.api_config(ApiConfig(tool_call_parser="mistral")).tool_call_parser == "mistral"


def test_json_says_the_same(tmp_path: Path):
    values = {"memory_budget": "1GiB", "models": {"a": {"model": "leaf", "served_model_name": "b"}}}
    file = read_models_file(written(tmp_path, json.dumps(values), "models.json"))
    assert file.switching.memory_budget == 1 << 30 and file.models[0].names == ("a", "b")


@pytest.mark.parametrize(
    ("text", "says", "field"),
    [
        ("", "models must be a mapping", "models"),
        ("models: []", "models must be a mapping", "models"),
        ("models: {a: leaf}", "model a: 'leaf' is not a mapping", "models"),
        ("models: {a: {}}", "model a: model is missing", "model"),
        ("models: {7: {model: leaf}}", "is not a valid model name", "models"),
        ("models: {'a b': {model: leaf}}", "is not a valid model name", "models"),
        ("models: {a: {model: leaf, served_model_name: [1]}}", "must be a string", "served_model_name"),
        ("models: {a: {model: leaf}, b: {model: leaf, served_model_name: a}}", "of a and of b", "served_model_name"),
        ("models: {a: {model: leaf, pinned: 1}}", "model a: pinned must be true or false", "pinned"),
        ("models: {a: {model: leaf, max_model_length: 1}}", "model a: unknown setting", "max_model_length"),
        ("models: {a: {model: leaf, max_model_len: 0}}", "model a: max_model_len=0 is out of range", "max_model_len"),
        ("models: {a: {model: leaf, port: 1}}", "port is a setting of the whole server", "port"),
        ("models: {a: {model: leaf, kv_cache_memory_bytes: much}}", "is not a size", "kv_cache_memory_bytes"),
        ("models: {a: {model: leaf, tool_call_parser: 7}}", "tool_call_parser must be a string", "tool_call_parser"),
        ("models: {a: {model: leaf, model: leaf}}", "has 'model' twice", "models"),
        ("memory_budget: 12XB\nmodels: {a: {model: leaf}}", "memory_budget='12XB' is not a size", "memory_budget"),
        ("memory_budget: 12\nmodels: {a: {model: leaf}}", "memory_budget=12 is out of range", "memory_budget"),
        ("memory_budgett: 1GiB\nmodels: {a: {model: leaf}}", "unknown setting 'memory_budgett'", "memory_budgett"),
        ("idle_unload_s: soon\nmodels: {a: {model: leaf}}", "idle_unload_s must be a number", "idle_unload_s"),
        ("models: {a: {model: leaf}}\nmodels: {b: {model: leaf}}", "has 'models' twice", "models"),
        ("- models", "is not a mapping", "models"),
        ("models: &a {b: *a}", "uses aliases", "models"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_its_place(tmp_path: Path, text: str, says: str, field: str):
    with pytest.raises(QuireError) as caught:
        read_models_file(written(tmp_path, text))
    assert says in caught.value.message and "models.yaml" in caught.value.message
    assert caught.value.field == field and caught.value.hint


def test_files_that_cannot_be_read_are_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_models_file(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="larger than 1 MiB"):
        read_models_file(written(tmp_path, "#" * (2 << 20)))
    with pytest.raises(ConfigError, match="is not JSON"):
        read_models_file(written(tmp_path, "{", "models.json"))
    with pytest.raises(ConfigError, match="is not an object"):
        read_models_file(written(tmp_path, "[]", "models.json"))


def test_a_setting_given_under_another_name_wins_over_the_default(tmp_path: Path):
    path = written(tmp_path, "models: {a: {model: leaf, device_memory_utilization: 0.5}}")
    file = read_models_file(path, {"gpu_memory_utilization": 0.25})
    assert file.models[0].config.cache.memory_utilization == 0.5


@pytest.mark.parametrize("name", ["flight_recorder", "kv_events_config"])
def test_places_of_one_engine_are_not_given_to_all(name: str):
    with pytest.raises(ConfigError) as caught:
        check_defaults({name: "x"})
    assert caught.value.field == name
