"""`kv_transfer_config`: what is accepted, and what an error says."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quire.config.build import build_config
from quire.config.kv_transfer import parse_kv_transfer_config
from quire.errors import ConfigError


def parse(**values: Any) -> Any:
    return parse_kv_transfer_config(json.dumps(values))


def test_nothing_or_an_empty_object_is_no_connector():
    assert parse_kv_transfer_config(None) is None and parse_kv_transfer_config("{}") is None
    assert build_config(model="leaf").kv_transfer is None


def test_an_object_reaches_the_engine_as_text_or_as_a_mapping():
    values = {"kv_connector": "X", "kv_role": "kv_consumer", "kv_connector_extra_config": {"a": 1}}
    for given in (values, json.dumps(values)):
        config = build_config(model="leaf", kv_transfer_config=given).kv_transfer
        assert config is not None and config.kv_connector == "X" and config.kv_connector_extra_config == {"a": 1}
        assert config.is_kv_consumer and not config.is_kv_producer and not config.fails_requests
        assert config.kv_ip == "127.0.0.1"


def test_keys_of_vllm_that_ask_for_nothing_are_accepted():
    assert parse(kv_connector="X", kv_buffer_device="cpu", kv_rank=0, kv_parallel_size=1) is not None


@pytest.mark.parametrize(
    ("values", "message", "hint"),
    [
        ({"kv_conector": "X"}, "'kv_conector' is not a known key", "did you mean 'kv_connector'"),
        ({"kv_role": "kv_both"}, "kv_connector is missing", "ExampleConnector"),
        ({"kv_connector": ""}, "kv_connector is empty", "name a connector"),
        ({"kv_connector": 3}, "kv_connector must be a string", ""),
        ({"kv_connector": "X", "kv_role": "both"}, "kv_role='both' is not one of", "kv_both"),
        ({"kv_connector": "X", "kv_role": []}, "kv_role=.* is not one of", "kv_both"),
        ({"kv_connector": "X", "kv_rank": 2}, "kv_rank=2 is not supported", "leave out kv_rank"),
        ({"kv_connector": "X", "kv_port": 70000}, "kv_port", ""),
        ({"kv_connector": "X", "kv_load_failure_policy": "ignore"}, "kv_load_failure_policy='ignore'", "fail"),
        ({"kv_connector": "X", "kv_load_timeout_s": True}, "kv_load_timeout_s=True", "0 to 86400"),
        ({"kv_connector": "X", "kv_connector_extra_config": []}, "is not a JSON object", "key"),
        ({"kv_connector": "X", "kv_connector_module_path": "/tmp/evil.py"}, "not the name of a module", "not a file"),
        ({"kv_connector": "X", "kv_connector_module_path": "a..b"}, "not the name of a module", "dotted name"),
    ],
)
def test_what_is_wrong_is_named_with_the_fix(values, message, hint):
    with pytest.raises(ConfigError, match=f"kv_transfer_config: .*{message}") as caught:
        parse(**values)
    assert hint in str(caught.value.hint) and caught.value.field == "kv_transfer_config"


@pytest.mark.parametrize("text", ["[]", "{", '"X"', "[" * 100_000])
def test_what_is_not_an_object_is_refused(text):
    with pytest.raises(ConfigError, match="is not a JSON object"):
        parse_kv_transfer_config(text)
