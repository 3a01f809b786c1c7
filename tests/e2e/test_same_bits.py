"""Tokens and log-probabilities are the same bits alone, in a crowd, in chunks, cached, preempted, on every tier."""

from __future__ import annotations

from typing import Any

import pytest

from quire.kernels.native.library import supported_tiers
from tests.e2e.same_bits import CIRCUMSTANCES, Answer, make_requests, run

COUNT = 24
CASES: dict[str, dict[str, Any]] = {
    **{name: settings for name, settings in CIRCUMSTANCES.items() if name != "alone"},
    **{f"tier {tier}": {"max_num_seqs": 17, "kernel_tier": tier} for tier in supported_tiers()},
}


@pytest.fixture(scope="module", params=[None, "int8", "int4"], ids=["bf16", "int8", "int4"])
def expected(request: pytest.FixtureRequest) -> tuple[str | None, list[Answer]]:
    prompts, params = make_requests(COUNT, 3000, 12)
    return request.param, run("leaf", prompts, params, quantization=request.param, **CIRCUMSTANCES["alone"])[0]


@pytest.mark.parametrize("name", CASES)
def test_answers_are_the_same_bits(expected: tuple[str | None, list[Answer]], name: str):
    quantization, alone = expected
    prompts, params = make_requests(COUNT, 3000, 12)
    found, num_preemptions = run(
        "leaf", prompts, params, warm=name == "cached", quantization=quantization, **CASES[name]
    )
    assert found == alone
    assert num_preemptions or name != "preempted"
