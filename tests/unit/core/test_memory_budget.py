from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.memory_budget import (
    StepLimits,
    check_allocation,
    check_swap_space,
    estimate_weights_bytes,
    estimate_workspace_bytes,
    plan_memory,
)
from quire.errors import NotEnoughMemoryError
from quire.utils.memory import GIB, MIB
from tests.unit.worker.tiny import TINY_ARCH, tiny_arch, tiny_config

LIMITS = StepLimits(max_num_seqs=8, max_num_batched_tokens=512, max_model_len=128)


@settings(deadline=None)
@given(
    st.integers(0, 100 * GIB),
    st.floats(0.05, 1.0),
    st.integers(0, 60 * GIB),
    st.integers(0, 20 * GIB),
    st.none() | st.integers(1, 50 * GIB),
)
def test_the_parts_never_exceed_what_may_be_used(
    free: int, utilization: float, weights: int, workspace: int, useful: int | None
) -> None:
    try:
        budget = plan_memory(
            free_bytes=free,
            utilization=utilization,
            weights_bytes=weights,
            workspace_bytes=workspace,
            useful_bytes=useful,
        )
    except NotEnoughMemoryError:
        assert int(free * utilization) <= weights + workspace
        return
    assert budget.kv_cache_bytes > 0
    assert budget.kv_cache_bytes + weights + workspace <= free * utilization
    assert useful is None or budget.kv_cache_bytes <= useful


def test_the_log_line_says_what_was_chosen_and_why() -> None:
    budget = plan_memory(
        free_bytes=10 * GIB, utilization=0.9, weights_bytes=2 * GIB, workspace_bytes=GIB, useful_bytes=None
    )
    line = "memory for the KV cache: 6.0 GiB (10.0 GiB free x 0.90 - 2.0 GiB weights - 1.0 GiB workspace)"
    assert budget.describe() == line
    capped = plan_memory(
        free_bytes=10 * GIB, utilization=0.9, weights_bytes=2 * GIB, workspace_bytes=GIB, useful_bytes=100 * MIB
    )
    assert capped.describe().startswith("memory for the KV cache: 100.0 MiB (") and "limited by" in capped.describe()


@pytest.mark.parametrize(
    ("free", "utilization", "weights", "expected"),
    [
        (
            10 * GIB,
            0.5,
            4 * GIB,
            "lower max_num_batched_tokens or max_num_seqs, or raise gpu_memory_utilization above 0.60",
        ),
        (10 * GIB, 0.9, 12 * GIB, "free memory until 15.6 GiB is available, or use a smaller model"),
    ],
)
def test_a_refusal_names_the_numbers_and_what_would_work(
    free: int, utilization: float, weights: int, expected: str
) -> None:
    with pytest.raises(NotEnoughMemoryError, match=f"{weights / GIB:.1f} GiB for weights") as caught:
        plan_memory(
            free_bytes=free,
            utilization=utilization,
            weights_bytes=weights,
            workspace_bytes=2 * GIB,
            useful_bytes=None,
        )
    assert caught.value.hint is not None and expected in caught.value.hint


def test_a_given_cache_size_is_held_against_the_free_memory() -> None:
    check_allocation(GIB, 3 * GIB, 2 * GIB)
    with pytest.raises(NotEnoughMemoryError, match=r"1\.0 GiB does not fit: 2\.5 GiB is free") as caught:
        check_allocation(GIB, 2 * GIB + 512 * MIB, 2 * GIB)
    assert caught.value.hint and f"kv_cache_memory_bytes <= {512 * MIB}" in caught.value.hint


def test_the_estimate_of_the_weights_is_what_the_model_takes() -> None:
    import torch

    from quire.distributed.parallel_context import ParallelContext
    from quire.models.loader import load_model

    for tie in (True, False):
        arch = dataclasses.replace(TINY_ARCH, tie_word_embeddings=tie)
        model = load_model(
            arch, "", tiny_config().load, torch.float32, torch.device("cpu"), ParallelContext(), None, 128, 0
        )
        tensors = [*model.parameters(), *model.buffers()]
        actual = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        assert 0.98 * actual <= estimate_weights_bytes(arch, 128, 4) <= 1.02 * actual


def test_the_workspace_grows_with_every_limit() -> None:
    arch = tiny_arch(vocab_size=50_000, intermediate_size=4096)
    base = estimate_workspace_bytes(arch, LIMITS, 4)
    many = StepLimits(max_num_seqs=4096, max_num_batched_tokens=4096, max_model_len=128)
    assert estimate_workspace_bytes(arch, many, 4) > base
    long = dataclasses.replace(LIMITS, max_model_len=10_000_000)
    assert estimate_workspace_bytes(arch, long, 4) > base
    tokens = dataclasses.replace(LIMITS, max_num_batched_tokens=100_000)
    assert estimate_workspace_bytes(arch, tokens, 4) > base


def test_drafts_have_rows_of_logits_of_their_own_as_far_as_a_step_verifies_them() -> None:
    limits = StepLimits(max_num_seqs=100, max_num_batched_tokens=2048, max_model_len=128)
    assert limits.max_num_logits == 100
    assert dataclasses.replace(limits, num_drafts=1).max_num_logits == 200
    assert dataclasses.replace(limits, num_drafts=5).max_num_logits == 300
    assert dataclasses.replace(limits, max_num_seqs=1, num_drafts=20).max_num_logits == 21
    assert dataclasses.replace(limits, max_num_batched_tokens=128, num_drafts=5).max_num_logits == 128
    assert dataclasses.replace(limits, num_drafts=5, max_step_drafts=32).max_num_logits == 132
    arch = tiny_arch(vocab_size=50_000)
    assert estimate_workspace_bytes(arch, dataclasses.replace(LIMITS, num_drafts=4), 4) > estimate_workspace_bytes(
        arch, LIMITS, 4
    )


def test_swap_space_in_the_same_memory_is_taken_off_the_cache() -> None:
    budget = plan_memory(
        free_bytes=10 * GIB, utilization=0.9, weights_bytes=2 * GIB, workspace_bytes=GIB, useful_bytes=None,
        swap_bytes=2 * GIB,
    )  # fmt: skip
    assert budget.kv_cache_bytes == 4 * GIB and budget.describe().endswith("1.0 GiB workspace - 2.0 GiB swap space)")


def test_a_swap_space_that_leaves_no_cache_is_refused_with_the_size_that_fits() -> None:
    with pytest.raises(NotEnoughMemoryError, match=r"swap_space=6 GiB does not fit: 6\.0 GiB is available") as caught:
        plan_memory(
            free_bytes=10 * GIB, utilization=0.9, weights_bytes=2 * GIB, workspace_bytes=GIB, useful_bytes=None,
            swap_bytes=6 * GIB,
        )  # fmt: skip
    assert caught.value.field == "swap_space" and caught.value.hint == "use swap_space <= 5.99, or free memory"
    check_swap_space(0, 0)
    with pytest.raises(NotEnoughMemoryError) as caught:
        check_swap_space(GIB, MIB)
    assert caught.value.hint == "use swap_space=0, or free memory"
    with pytest.raises(NotEnoughMemoryError, match="kv_offloading_size=2 GiB does not fit") as caught:
        check_swap_space(2 * GIB, GIB, "kv_offloading_size")
    assert caught.value.field == "kv_offloading_size" and caught.value.hint.startswith("use kv_offloading_size <= 0.99")


def test_a_cache_of_a_given_size_is_held_against_what_the_swap_space_leaves() -> None:
    with pytest.raises(NotEnoughMemoryError, match=r"of which 1\.0 GiB is workspace and 1\.5 GiB swap space") as caught:
        check_allocation(GIB, 3 * GIB, GIB, int(1.5 * GIB))
    assert caught.value.hint is not None and "less swap_space" in caught.value.hint
