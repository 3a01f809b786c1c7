from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from quire.config import CacheConfig, ModelConfig, QuireConfig, SchedulerConfig
from quire.config.build import SECRET, all_settings, build_config, settings_as_dict, settings_by_name
from quire.config.not_yet import NOT_YET
from quire.errors import ConfigError, QuireClientError, UnsupportedError
from tests.each import each

SETTINGS = {setting.info.name: setting for setting in all_settings()}


def test_every_setting_has_a_known_kind_a_sentence_and_an_allowed_default() -> None:
    for setting in all_settings():
        info = setting.info
        assert info.kind in ("int", "float", "str", "bool", "list"), info.name
        assert info.doc.endswith("."), info.name
        assert build_config(**{info.name: info.default}) == QuireConfig(), info.name


def test_no_two_settings_share_a_name() -> None:
    names = [name for one in all_settings() for name in (one.info.name, *one.info.aliases)]
    assert len(names) == len(set(names))
    assert not set(names) & set(NOT_YET)


def test_a_config_is_built_from_flat_names_and_aliases() -> None:
    config = build_config(model=Path("/m"), max_model_len=64, device_memory_utilization=0.5, num_gpu_blocks_override=9)
    assert config.model.model == "/m" and config.model.max_model_len == 64
    assert config.cache.memory_utilization == 0.5 and config.cache.num_blocks == 9
    assert build_config(gpu_memory_utilization=0.5).cache.memory_utilization == 0.5


def test_none_means_the_default() -> None:
    assert build_config(dtype=None, seed=None, max_model_len=None) == QuireConfig()


def test_a_setting_given_under_two_names_is_refused() -> None:
    with pytest.raises(ConfigError, match="gpu_memory_utilization once"):
        build_config(gpu_memory_utilization=0.5, device_memory_utilization=0.6)


@pytest.mark.parametrize(
    ("name", "near"),
    [("max_modle_len", "max_model_len"), ("enable_prefix_cache", "enable_prefix_caching"), ("dtyp", "dtype")],
)
def test_an_unknown_setting_names_the_nearest(name: str, near: str) -> None:
    with pytest.raises(ConfigError, match=f"unknown setting '{name}'\nhint: did you mean '{near}'"):
        build_config(**{name: 1})


def test_an_unknown_setting_near_nothing_points_to_the_list() -> None:
    with pytest.raises(ConfigError, match=r"settings\.md"):
        build_config(qqqqqqqqqq=1)


@each("name", NOT_YET)
def test_a_setting_not_supported_yet_is_refused_by_name_unless_neutral(name: str) -> None:
    for neutral in NOT_YET[name]:
        assert build_config(**{name: neutral}) == QuireConfig()
    with pytest.raises(UnsupportedError, match=f"{name} is a vLLM option that Quire does not implement yet"):
        build_config(**{name: "something else"})


def test_a_length_may_be_the_longest_that_fits_or_a_size() -> None:
    def length(value: object) -> int | None:
        return build_config(max_model_len=value).model.max_model_len

    assert length("auto") == length(-1) == -1 and length("16k") == 16000 and length("16K") == 16384
    with pytest.raises(ConfigError, match="max_model_len=0 is out of range") as caught:
        build_config(max_model_len=0)
    assert caught.value.hint == "max_model_len takes an integer: 1 to 1073741824, or -1 (auto), or None"


def out_of_range_values(name: str) -> list[object]:
    info = SETTINGS[name].info
    bad: list[object] = [object(), b"x", [1], {"a": 1}]
    if info.kind not in ("str", "list"):
        bad.append("text")
    if info.kind in ("int", "float"):
        bad.extend([True, float("nan"), float("inf")])
        bad.extend(one for one in (info.minimum and info.minimum - 1, info.maximum and info.maximum + 1) if one)
    if info.kind == "int":
        bad.extend([1.5, 10**30])
    if info.kind == "bool":
        bad.extend([0, 1, "true"])
    if info.kind == "str":
        bad.extend([5, True, "", "x" * (1 << 21), "nul\0"])
    if info.kind == "list":
        bad.extend([5, True, ["nul\0"], [""], "[1]", "[", ["a", 1]])
    if info.choices:
        bad.append("nonsense")
    return bad


@each("name", SETTINGS)
def test_bad_values_of_every_setting_are_refused_with_its_name(name: str) -> None:
    for value in out_of_range_values(name):
        with pytest.raises(ConfigError) as caught:
            build_config(**{name: value})
        assert caught.value.field == name and name in caught.value.message and caught.value.hint


@pytest.mark.parametrize(
    ("name", "value"),
    [("quantization", "torchao"), ("quantization", "quark")],
)
def test_what_is_known_and_not_honoured_is_refused_before_any_model_is_read(name: str, value: object) -> None:
    with pytest.raises(UnsupportedError, match=f"{name}=") as caught:
        build_config(**{name: value})
    assert caught.value.field == name and caught.value.hint


def test_an_unknown_quantization_is_answered_with_the_choices() -> None:
    with pytest.raises(ConfigError, match="quantization='int3' is not one of int8, int4") as caught:
        build_config(quantization="int3")
    assert caught.value.field == "quantization"
    assert caught.value.hint.startswith("use one of int8, int4")  # then those of installed plugins
    assert build_config(quantization="int4").model.quantization == "int4"


def test_configs_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        CacheConfig().block_size = 4  # type: ignore[misc]


def test_each_part_checks_itself() -> None:
    for make in (
        lambda: CacheConfig(watermark=1.0),
        lambda: SchedulerConfig(max_num_seqs=0),
        lambda: ModelConfig(dtype="int3"),
    ):
        with pytest.raises(QuireClientError):
            make()


def test_numbers_of_other_types_become_pythons_own() -> None:
    import numpy as np

    config = build_config(max_model_len=np.int32(7), watermark=0)
    assert type(config.model.max_model_len) is int and type(config.cache.watermark) is float


def test_settings_as_dict_speaks_user_facing_names() -> None:
    values = settings_as_dict(build_config(gpu_memory_utilization=0.25))
    assert values["gpu_memory_utilization"] == 0.25
    assert set(values) == set(SETTINGS) <= set(settings_by_name())


@pytest.mark.parametrize(
    ("text", "is_hidden"),
    [
        ("redis://user:abc@host:6379", True), ("https://host/?sig=abc", True), ("https://host/x?a=1&api_key=abc", True),
        ('{"api_key": "0123456789abcdef"}', True), ("hf_abcdefghijklmnopqrst", True), ('{"password": "x"}', True),
        ("redis://host:6379/0", False), ("/models/mine", False), ('{"max_tokens": 16}', False),
        ("http://[::1]:4318", False),
    ],
)  # fmt: skip
def test_what_looks_like_a_secret_is_not_shown(text: str, is_hidden: bool):
    assert bool(SECRET.search(text)) is is_hidden
