"""GGUF files with every type of tensor, and 4-bit checkpoints: the same bits under every circumstance."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.kernels.native.library import supported_tiers
from tests.e2e.same_bits import CIRCUMSTANCES, Answer, make_requests, run
from tests.effort import effort
from tests.models.stored_models import KINDS, make_tiny

REQUESTS = make_requests(17, 320, *effort((6, 100), (12, 300)))
SOME = ("batches of 2", "batches of 17", "chunks of 7", "cached")
CASES: dict[str, dict[str, Any]] = {
    **{name: CIRCUMSTANCES[name] for name in effort(SOME, tuple(CIRCUMSTANCES)[1:])},
    "preempted": {"max_num_seqs": 17, "num_gpu_blocks_override": effort(20, 24), "scheduler_reserve_full_isl": False},
    **{f"tier {tier}": {"max_num_seqs": 17, "kernel_tier": tier} for tier in supported_tiers()},
}


@pytest.fixture(scope="module", params=KINDS)
def expected(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Answer]]:
    served, _ = make_tiny(request.param, tmp_path_factory.mktemp(request.param))
    return served, run(str(served), *REQUESTS, dtype="bfloat16", **CIRCUMSTANCES["alone"])[0]


@pytest.mark.parametrize("name", CASES)
def test_answers_are_the_same_bits(expected: tuple[Path, list[Answer]], name: str):
    served, alone = expected
    found, num_preemptions = run(str(served), *REQUESTS, warm=name == "cached", dtype="bfloat16", **CASES[name])
    assert found == alone
    assert num_preemptions or name != "preempted"
