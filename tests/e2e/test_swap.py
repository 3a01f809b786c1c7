"""Preempted requests go on with the same tokens and log-probabilities, whether swapped or computed again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.core.scheduler_output import SchedulerOutput
from quire.worker.block_transfers import CopyTimes, HostTransfers
from tests.e2e.crowds import COUNT, Found, run
from tests.e2e.tiny_model import write_tiny_model
from tests.effort import effort

ROOM = {"swap_space": 0.05}
MODES: dict[str, dict[str, Any]] = {
    "recompute": {"preemption_mode": "recompute"},
    "swap": {"preemption_mode": "swap", **ROOM},
    "auto": {"preemption_mode": "auto", **ROOM},
    "swap, little room": {"preemption_mode": "swap", "swap_space": 1e-4},
}
BACKENDS: dict[str, dict[str, Any]] = {
    "native": {"attention_backend": "native_cpu"},
    "reference": {"attention_backend": "torch_reference", "dtype": "float32"},
    "fp8": {"attention_backend": "native_cpu", "dtype": "bfloat16", "kv_cache_dtype": "fp8_e4m3"},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    return write_tiny_model(directory / "tiny", directory / "marker")


@pytest.fixture(scope="module")
def in_peace(model: Path) -> dict[str, Found]:
    return {name: run(model, max_num_seqs=COUNT, **settings) for name, settings in BACKENDS.items()}


@pytest.mark.parametrize(
    ("backend", "mode", "prefix_caching"),
    [
        *(("native", mode, True) for mode in effort(("swap", "swap, little room"), MODES)),
        *effort((), (("native", "swap", False), ("fp8", "swap", True))),
        ("native", "auto", False), ("native", "recompute", False), ("fp8", "auto", False), ("reference", "swap", True),
    ],
)  # fmt: skip
def test_a_crowd_in_a_tiny_pool_gets_the_answers_it_gets_in_peace(
    model: Path, in_peace: dict[str, Found], backend: str, mode: str, prefix_caching: bool
):
    found = run(
        model, max_num_seqs=70, num_gpu_blocks_override=72, scheduler_reserve_full_isl=False,
        enable_prefix_caching=prefix_caching, **BACKENDS[backend], **MODES[mode],
    )  # fmt: skip
    expected = in_peace[backend].answers
    if backend == "reference":  # its bits depend on the batch
        assert [tokens for (tokens, _), _ in found.answers] == [tokens for (tokens, _), _ in expected]
        assert all(
            one[1] == pytest.approx(other[1], abs=1e-4)
            for (one, _), (other, _) in zip(found.answers, expected, strict=True)
        )
    else:
        assert found.answers == expected
    assert in_peace[backend].num_preemptions == 0 and found.num_preemptions >= 100
    assert (found.num_swap_preemptions > 0) == (mode != "recompute") == (found.num_bytes[0] > 0)
    assert found.num_swap_preemptions == found.num_preemptions or mode != "swap"
    assert found.num_bytes[1] <= found.num_bytes[0]


def test_when_steps_that_swap_fail_halfway_every_answer_is_the_same(
    model: Path, in_peace: dict[str, Found], monkeypatch: pytest.MonkeyPatch
):
    calls: list[int] = []
    whole = HostTransfers.run

    def fail_sometimes(transfers: HostTransfers, scheduled: SchedulerOutput) -> CopyTimes:
        times = whole(transfers, scheduled)
        if len(scheduled.swap_outs) or len(scheduled.swap_ins):
            calls.append(len(scheduled.swap_ins))
            if len(calls) % 25 == 3:
                raise RuntimeError("the worker failed after its copies")
        return times

    monkeypatch.setattr(HostTransfers, "run", fail_sometimes)
    found = run(
        model, max_num_seqs=70, num_gpu_blocks_override=72, scheduler_reserve_full_isl=False, **BACKENDS["native"],
        **MODES["swap"],
    )  # fmt: skip
    assert found.answers == in_peace["native"].answers
    assert len(calls) > 30 and any(calls)
