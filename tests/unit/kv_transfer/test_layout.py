"""Layouts: equal ones have one digest, others are refused by what differs."""

from __future__ import annotations

import dataclasses

import pytest

from quire.errors import ConfigError
from quire.kv_transfer.layout import KVCacheLayout, LayerLayout, layout_from_json

LAYER = LayerLayout(names=("model.layers.0.attn",), shape=(2, 2, 64), strides=(128, 64, 1), dtype="bfloat16")
LAYOUT = KVCacheLayout(
    block_size=16, order="native_cpu: head, keys then values", layers=(LAYER,), groups=("full attention x 1",),
    model="ab" * 32, build="1.0",
)  # fmt: skip
OTHERS = {
    "block_size": 32,
    "order": "values then keys",
    "layers": (dataclasses.replace(LAYER, strides=(64, 128, 1)),),
    "groups": ("a sliding window of 8 tokens x 1",),
    "model": "cd" * 32,
    "build": "1.1",
}


def test_a_layout_that_was_written_down_is_the_same():
    again = layout_from_json(LAYOUT.to_json(), "a file")
    assert again == LAYOUT and again.digest == LAYOUT.digest
    LAYOUT.check_same(again, "a file")


@pytest.mark.parametrize("field", OTHERS)
def test_whatever_differs_is_refused_by_name(field):
    other = dataclasses.replace(LAYOUT, **{field: OTHERS[field]})
    assert other.digest != LAYOUT.digest
    with pytest.raises(ConfigError, match=rf"KV blocks in /there have another layout .*\({field}: "):
        LAYOUT.check_same(other, "/there")


@pytest.mark.parametrize("text", ["", "{}", "[1]", b"\xff", '{"block_size": "x"}', "[" * 100_000])
def test_what_does_not_describe_a_layout_is_refused(text):
    with pytest.raises(ConfigError, match="a file does not describe a KV cache layout"):
        layout_from_json(text, "a file")
