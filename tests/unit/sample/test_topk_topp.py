from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.sample.ops.topk_topp import drop_below_inplace, min_p_threshold, top_k_threshold, top_p_threshold
from tests.unit.sample import reference


def lines(num_lines: int, vocab_size: int, seed: int, *, with_ties: bool) -> torch.Tensor:
    logits = torch.randn(num_lines, vocab_size, generator=torch.Generator().manual_seed(seed)) * 2
    return logits.round() if with_ties else logits


def kept_by_top_p(logits: torch.Tensor, top_p: list[float]) -> np.ndarray:
    probs = torch.softmax(logits, -1)
    drop_below_inplace(logits, probs, top_p_threshold(probs, torch.tensor(top_p, dtype=torch.float64)))
    return ~np.isneginf(logits.numpy())


def kept(logits: torch.Tensor, thresholds: torch.Tensor) -> np.ndarray:
    changed = logits.clone()
    drop_below_inplace(changed, logits, thresholds)
    assert torch.equal(changed[changed > float("-inf")], logits[changed > float("-inf")])
    return ~np.isneginf(changed.numpy())


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 300), st.integers(0, 2**31), st.booleans(), st.data())
def test_top_k_keeps_tokens_that_fewer_than_k_others_beat(
    vocab_size: int, seed: int, with_ties: bool, data: st.DataObject
) -> None:
    logits = lines(3, vocab_size, seed, with_ties=with_ties)
    top_k = [data.draw(st.integers(1, vocab_size)) for _ in range(3)]
    found = kept(logits, top_k_threshold(logits, torch.tensor(top_k)))
    for line, k in enumerate(top_k):
        x = logits[line].numpy()
        assert found[line].tolist() == [bool((x > value).sum() < k) for value in x]


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 1500), st.integers(0, 2**31), st.booleans(), st.data())
def test_top_p_keeps_tokens_whose_likelier_ones_hold_less_than_p(
    vocab_size: int, seed: int, with_ties: bool, data: st.DataObject
) -> None:
    logits = lines(3, vocab_size, seed, with_ties=with_ties)
    top_p = [data.draw(st.floats(1e-6, 0.9999)) for _ in range(3)]
    found = kept_by_top_p(logits.clone(), top_p)
    for line, p in enumerate(top_p):
        x = logits[line].double().numpy()
        probs = reference.softmax(x)
        likelier = np.array([probs[x > value].sum() for value in x])
        sure = np.abs(likelier - p) > 1e-5
        assert (found[line] == (likelier < p))[sure].all()
        assert found[line].any()


@pytest.mark.parametrize("vocab_size", [127, 128, 129, 1023, 1024, 1025, 9000])
def test_a_flat_distribution_needs_many_tokens_at_every_width(vocab_size: int) -> None:
    logits = torch.arange(vocab_size, dtype=torch.float32)[None] * 1e-5
    found = kept_by_top_p(logits.clone(), [0.75])
    expected = reference.softmax(logits[0].double().numpy())[::-1].cumsum().searchsorted(0.75) + 1
    assert abs(int(found.sum()) - int(expected)) <= 1
    assert found[0, -1] and found[0, -int(found.sum()) :].all()


def test_min_p_keeps_tokens_with_a_share_of_the_largest_probability() -> None:
    logits = lines(4, 50, 1, with_ties=False)
    min_p = np.array([0.5, 0.01, 1.0, 0.0])
    with np.errstate(divide="ignore"):
        log_min_p = torch.from_numpy(np.log(min_p).astype(np.float32))
    found = kept(logits, min_p_threshold(logits, log_min_p))
    for line, share in enumerate(min_p):
        probs = reference.softmax(logits[line].double().numpy())
        assert found[line].tolist() == (probs >= share * probs.max() * (1 - 1e-6)).tolist()
