"""generation_config.json: ends of a turn and the makers' sampling parameters."""

from __future__ import annotations

import pytest

from quire.config.overrides import generation_values
from quire.engine.generation_defaults import read_generation_defaults
from quire.errors import ModelError


def read(config, tokenizer_eos=None, arch_eos=()):
    return read_generation_defaults(config, tokenizer_eos, arch_eos, 100)


@pytest.mark.parametrize(
    ("config", "tokenizer_eos", "arch_eos", "primary", "others"),
    [
        ({}, None, (), -1, ()),
        ({}, 7, (), 7, ()),
        ({}, 7, (8, 7), 7, (8,)),
        ({"eos_token_id": 5}, None, (8,), 5, ()),
        ({"eos_token_id": [5, 6]}, 6, (8,), 6, (5,)),
    ],
    ids=["none", "tokenizer", "config.json", "one", "several"],
)
def test_ends_of_turn(config, tokenizer_eos, arch_eos, primary, others):
    defaults = read(config, tokenizer_eos, arch_eos)
    assert (defaults.eos_token_id, defaults.other_eos_token_ids) == (primary, others)


def test_sampling_parameters_are_taken():
    params = read({"temperature": 0.6, "top_p": 0.9, "max_new_tokens": 50, "do_sample": True}).sampling_params()
    assert (params.temperature, params.top_p, params.max_tokens) == (0.6, 0.9, 50)


def test_sampling_parameters_can_be_ignored_and_replaced():
    config = {"temperature": 0.6, "top_k": 5, "eos_token_id": 7}
    neutral = generation_values(config, {"top_p": 0.5}, is_neutral=True)
    assert neutral == {"eos_token_id": 7, "top_p": 0.5}
    assert generation_values(config, {"top_k": 9}, is_neutral=False) == {**config, "top_k": 9}


@pytest.mark.parametrize(
    "config",
    [{"eos_token_id": "x"}, {"eos_token_id": [1, None]}, {"eos_token_id": 100}, {"eos_token_id": True}, {"top_p": 7}],
    ids=str,
)
def test_malformed_values_are_refused(config):
    with pytest.raises(ModelError):
        read(config)
