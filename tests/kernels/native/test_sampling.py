"""Choosing tokens from logits: sets and orders exactly as the reference, with the same bits from every tier."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.errors import ShapeError
from quire.kernels.native import sampling
from quire.kernels.native.runtime import NativeRuntime
from quire.kernels.native.sampling import DrawParams
from quire.kernels.reference import sampling as reference
from tests.each import each
from tests.kernels.native.guards import guarded, randn, same_bits

# Under, at and over a vector, a block (256) and the columns of a task (16384).
SIZES = [1, 2, 15, 16, 17, 255, 256, 257, 997, 16384, 16401]
NUM_LINES = 13


def make_logits(vocab_size: int, num_lines: int = NUM_LINES, seed: int = 0) -> torch.Tensor:
    """Lines with equal scores, with impossible tokens, and plain ones; the last is nearly flat."""
    logits = randn(num_lines, vocab_size, seed=seed) * 3
    logits[::4] = logits[::4].round()
    logits[1::4] = logits[1::4].masked_fill(randn(*logits[1::4].shape, seed=7) > 0.5, -torch.inf)
    logits[1::4, vocab_size // 2] = 1.0
    logits[-1] *= 1e-3
    return logits


def make_params(num_lines: int, vocab_size: int, seed: int = 0) -> DrawParams:
    rng = np.random.default_rng(seed)
    is_on = rng.random((4, num_lines)) < 0.5
    return DrawParams(
        temperature=np.where(is_on[0], rng.uniform(0.1, 3, num_lines), 1).astype(np.float32),
        top_k=np.where(is_on[1], rng.integers(1, min(2 * vocab_size, 900) + 1, num_lines), 0).astype(np.int32),
        top_p=np.where(is_on[2], rng.uniform(0.01, 0.999, num_lines), 1.0),
        log_min_p=np.where(is_on[3], np.log(rng.uniform(1e-4, 1, num_lines)), -np.inf).astype(np.float32),
        uniforms=rng.integers(0, 2**53, num_lines) * 2.0**-53,
    )


def lines_of(params: DrawParams, lines: slice) -> DrawParams:
    columns = (params.temperature, params.top_k, params.top_p, params.log_min_p, params.uniforms)
    return DrawParams(*(column[lines] for column in columns))


def plain_params(uniforms: list[float], **changed: float) -> DrawParams:
    values = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "log_min_p": -np.inf, **changed}
    dtypes = {"temperature": np.float32, "top_k": np.int32, "top_p": np.float64, "log_min_p": np.float32}
    columns = {name: np.full(len(uniforms), values[name], dtype) for name, dtype in dtypes.items()}
    return DrawParams(**columns, uniforms=np.array(uniforms))


@each("vocab_size", SIZES)
def test_argmax_is_the_lowest_id_of_the_largest(runtime: NativeRuntime, vocab_size: int):
    logits = make_logits(vocab_size)
    before = logits.clone()
    found = sampling.argmax(runtime, logits)
    assert found.dtype == np.int32 and found.tolist() == reference.argmax(logits).tolist()
    assert same_bits(logits, before)
    assert sampling.argmax(runtime, logits[:0]).shape == (0,)
    for at in (vocab_size - 1, vocab_size // 2, 0):
        logits[:, at:] = 99.0
        assert (sampling.argmax(runtime, logits) == at).all()


@each("bad", [np.nan, -np.nan, np.inf])
@each("vocab_size", [1, 17, 300, 16401])
def test_lines_without_a_usable_largest_get_no_token(runtime: NativeRuntime, vocab_size: int, bad: float):
    for at in {0, vocab_size // 2, vocab_size - 1}:
        logits = randn(3, vocab_size)
        logits[1, at] = bad
        assert sampling.argmax(runtime, logits).tolist()[1] == -1
        assert (sampling.argmax(runtime, logits)[[0, 2]] == logits[[0, 2]].argmax(1).numpy()).all()
        token_ids, _ = sampling.sample(runtime, logits, plain_params([0.5] * 3))
        assert (token_ids >= 0).tolist() == [True, False, True]
    logits[2] = -torch.inf
    assert sampling.argmax(runtime, logits).tolist()[1:] == [-1, -1]


@each("vocab_size", SIZES)
def test_draws_and_what_filters_keep_equal_the_reference(
    runtime: NativeRuntime, portable: NativeRuntime, vocab_size: int
):
    for seed in range(3):
        logits, params = make_logits(vocab_size, seed=seed), make_params(NUM_LINES, vocab_size, seed)
        params.temperature[:4] = (2.5, 100.0, 1e4, 1e6)
        before = logits.clone()
        token_ids, thresholds = sampling.sample(runtime, logits, params)
        assert same_bits(logits, before)
        again = sampling.sample(portable, logits, params)
        assert (token_ids == again[0]).all() and (thresholds == again[1]).all()
        for line in range(NUM_LINES):
            expected = reference.filtered(
                logits[line], params.temperature[line], params.top_k[line], params.top_p[line], params.log_min_p[line]
            )
            scores = logits[line] / torch.tensor(params.temperature[line])
            assert torch.equal(scores.masked_fill(scores < thresholds[line], -torch.inf), expected)
            assert token_ids[line] == reference.draw(expected, params.uniforms[line])
            alone = sampling.sample(runtime, logits[line : line + 1], lines_of(params, slice(line, line + 1)))
            assert alone[0] == token_ids[line] and alone[1] == thresholds[line]


def test_lines_without_a_temperature_get_the_likeliest(runtime: NativeRuntime):
    logits, params = make_logits(997), make_params(NUM_LINES, 997)
    params.temperature[::2] = 0.0
    token_ids, thresholds = sampling.sample(runtime, logits, params)
    assert (token_ids[::2] == reference.argmax(logits)[::2]).all()
    assert (thresholds[::2] == -np.inf).all()
    params.temperature[:] = 1e-38  # scores overflow
    assert (sampling.sample(runtime, logits[-1:], lines_of(params, slice(-1, None)))[0] == logits[-1].argmax()).all()
    assert (sampling.sample(runtime, logits * 1e3, params)[0] == reference.argmax(logits * 1e3)).all()


@each("filters", [{}, {"top_p": 0.9999}, {"top_k": 700}, {"log_min_p": -20.0}])
def test_the_edges_of_the_random_number_give_possible_tokens(runtime: NativeRuntime, filters: dict[str, float]):
    logits = randn(2, 1000)
    logits[:, [0, 1, 998, 999]] = -torch.inf
    uniforms = [0.0, 1 - 2.0**-53]
    token_ids, _ = sampling.sample(runtime, logits, plain_params(uniforms, **filters))
    assert 2 <= token_ids[0] < token_ids[1] <= 997


def test_a_flat_line_is_drawn_from_evenly_and_cut_by_ties_alone(runtime: NativeRuntime):
    logits = torch.full((100, 40_000), -2.5)
    uniforms = [(i + 0.5001) / 100 for i in range(100)]
    expected = [int(u * 40_000) for u in uniforms]
    for filters in ({}, {"top_p": 0.01}, {"top_k": 1}, {"log_min_p": 0.0}, {"top_k": 800, "top_p": 0.5}):
        assert sampling.sample(runtime, logits[:9], plain_params(uniforms[:9], **filters))[0].tolist() == expected[:9]
    assert sampling.sample(runtime, logits, plain_params(uniforms))[0].tolist() == expected


def test_top_p_of_a_long_tail_looks_at_as_many_tokens_as_it_needs(runtime: NativeRuntime):
    logits = (torch.arange(30_000) * 1e-5)[torch.randperm(30_000, generator=torch.Generator().manual_seed(0))][None]
    for top_p in (0.001, 0.3, 0.75, 0.999999):
        _, thresholds = sampling.sample(runtime, logits, plain_params([0.5], top_p=top_p))
        kept = int((reference.filtered(logits[0], 1.0, 0, top_p, -np.inf) > -torch.inf).sum())
        assert abs(int((logits >= float(thresholds[0])).sum()) - kept) <= 1  # the two sums round apart


def test_strided_lines_are_read_by_their_stride(runtime: NativeRuntime):
    wide, params = randn(5, 700), make_params(5, 300)
    part = wide[:, 100:400]
    assert (sampling.argmax(runtime, part) == reference.argmax(part)).all()
    for a, b in zip(sampling.sample(runtime, part, params), sampling.sample(runtime, part.contiguous(), params)):
        assert (a == b).all()


@each("vocab_size", [1, 33, 700])
def test_penalties_equal_their_reference_bit_for_bit(runtime: NativeRuntime, vocab_size: int):
    rng = np.random.default_rng(vocab_size)
    given = guarded(make_logits(vocab_size, 6))
    lines = np.array([4, 0, 5], dtype=np.int32)
    ids = [rng.permutation(vocab_size)[: rng.integers(0, vocab_size + 1)] for _ in lines]
    starts = np.cumsum([0, *map(len, ids)])
    counts = rng.integers(0, 3, starts[-1]).astype(np.float32)
    strengths = np.array([[1.3, 0.5, 0.2], [0.7, -1.1, 0.0], [1.0, 0.0, -0.4]], dtype=np.float32)
    expected = given.tensor.clone()
    for i, line in enumerate(lines.tolist()):
        expected[line] = reference.apply_penalties(
            expected[line], ids[i], counts[starts[i] : starts[i + 1]], *strengths[i].tolist()
        )
    sampling.apply_penalties_inplace(runtime, given.tensor, lines, starts, np.concatenate(ids), counts, strengths)
    given.assert_bands()
    assert torch.equal(given.tensor, expected)


def test_penalties_on_ids_and_lines_that_do_not_exist_change_nothing(runtime: NativeRuntime):
    given = guarded(randn(2, 50))
    before = given.tensor.clone()
    lines, starts = np.array([0, 7, -1], dtype=np.int32), np.array([0, 2, 3, 4])
    strengths = np.full((3, 3), 2.0, dtype=np.float32)
    ids, counts = np.array([-1, 50, 3, 3]), np.ones(4, dtype=np.float32)
    sampling.apply_penalties_inplace(runtime, given.tensor, lines, starts, ids, counts, strengths)
    given.assert_bands()
    assert same_bits(given.tensor, before)


@each("vocab_size", [1, 31, 32, 33, 300, 16401])
def test_a_bitmask_leaves_the_tokens_of_its_bits(runtime: NativeRuntime, vocab_size: int):
    rng, num_words = np.random.default_rng(0), -(-vocab_size // 32)
    masks = torch.from_numpy(rng.integers(-(2**31), 2**31, (5, num_words)).astype(np.int32))
    masks[1], masks[2], masks[3, ::2] = 0, -1, -1
    given = guarded(randn(5, vocab_size))
    expected = torch.stack([reference.apply_bitmask(line, mask) for line, mask in zip(given.tensor, masks)])
    some = guarded(given.tensor)
    sampling.apply_bitmask_inplace(runtime, given.tensor, masks)
    given.assert_bands()
    assert same_bits(given.tensor, expected)
    before = some.tensor.clone()
    sampling.apply_bitmask_inplace(runtime, some.tensor, masks[:2].contiguous(), np.array([4, 2], dtype=np.int32))
    some.assert_bands()
    assert same_bits(some.tensor[4], reference.apply_bitmask(before[4], masks[0]))
    assert same_bits(some.tensor[2], reference.apply_bitmask(before[2], masks[1]))
    assert same_bits(some.tensor[[0, 1, 3]], before[[0, 1, 3]])


@each("is_logits", [False, True])
@each("vocab_size", SIZES)
def test_logprobs_rank_and_list_as_the_reference(
    runtime: NativeRuntime, portable: NativeRuntime, vocab_size: int, is_logits: bool
):
    rng = np.random.default_rng(vocab_size)
    logits = make_logits(vocab_size)
    before = logits.clone()
    chosen = rng.integers(0, vocab_size, NUM_LINES).astype(np.int32)
    chosen[:4] = reference.argmax(logits)[:4]
    num_top = np.minimum([0, 1, 5, 20, 300, 997, *[3] * (NUM_LINES - 6)], vocab_size).astype(np.int32)
    ids, scores, ranks = sampling.logprobs(runtime, logits, chosen, num_top, is_logits=is_logits)
    assert same_bits(logits, before)
    for mine, other in zip(
        (ids, scores, ranks), sampling.logprobs(portable, logits, chosen, num_top, is_logits=is_logits)
    ):
        assert mine.tobytes() == other.tobytes()
    for line in range(NUM_LINES):
        alone = sampling.logprobs(
            runtime, logits[line : line + 1], chosen[line : line + 1], num_top[line : line + 1], is_logits=is_logits
        )
        width = 1 + num_top[line]
        assert (
            alone[0].tobytes() == ids[line, :width].tobytes() and alone[1].tobytes() == scores[line, :width].tobytes()
        )
        assert alone[2].tobytes() == ranks[line : line + 1].tobytes()
        assert (ids[line, width:] == -1).all() and np.isnan(scores[line, width:]).all()
        if runtime.tier != portable.tier:  # of the same bits
            continue
        exact = logits[line].double() if is_logits else torch.log_softmax(logits[line].double(), 0)
        found_ids, found = ids[line, :width], torch.from_numpy(scores[line, :width]).double()
        # Three roundings of numbers below 32, and a total within 2 ** -21 of itself.
        wanted = exact[torch.from_numpy(found_ids).long()]
        assert bool(((found - wanted).abs() <= (0.0 if is_logits else 4e-6)).logical_or(found == wanted).all())
        whole = logits[line] if is_logits else torch.from_numpy(all_scores(runtime, logits[line : line + 1]))
        expected_ids, expected_rank = reference.logprobs(whole, int(chosen[line]), int(num_top[line]))
        assert found_ids.tolist() == expected_ids and ranks[line] == expected_rank


def all_scores(runtime: NativeRuntime, line: torch.Tensor) -> np.ndarray:
    """[vocab_size] scores of one line by id: the given tokens of many copies of it."""
    num_ids = line.shape[1]
    if num_ids > 1000:  # through the list of all, whose order another test checks
        ids, scores, _ = sampling.logprobs(runtime, line, np.zeros(1, np.int32), np.array([num_ids], np.int32))
        out = np.empty(num_ids, dtype=np.float32)
        out[ids[0, 1:]] = scores[0, 1:]
        return out
    every = np.arange(num_ids, dtype=np.int32)
    return sampling.logprobs(runtime, line.expand(num_ids, -1).contiguous(), every, np.zeros_like(every))[1][:, 0]


def test_unusable_lines_have_no_logprobs(runtime: NativeRuntime):
    logits = randn(3, 40)
    logits[0, 3], logits[1] = torch.nan, -torch.inf
    two = np.full(3, 2, dtype=np.int32)
    ids, scores, ranks = sampling.logprobs(runtime, logits, two, two)
    assert np.isnan(scores[:2]).all() and np.isfinite(scores[2]).all()
    assert ids[:2].tolist() == [[2, 0, 1]] * 2 and ranks[:2].tolist() == [0, 0] and ranks[2] > 0


def test_impossible_tensors_are_refused(runtime: NativeRuntime):
    logits, params = randn(2, 8), plain_params([0.5, 0.5])
    with pytest.raises(ShapeError, match="logits is torch.bfloat16"):
        sampling.argmax(runtime, logits.bfloat16())
    with pytest.raises(ShapeError, match="strides"):
        sampling.argmax(runtime, randn(8, 2).T)
    with pytest.raises(ShapeError, match="vocab_size is 0"):
        sampling.argmax(runtime, logits[:, :0])
    with pytest.raises(ShapeError, match="temperature is float32"):
        sampling.sample(runtime, logits[:1], params)
    with pytest.raises(ShapeError, match="bitmask has shape"):
        sampling.apply_bitmask_inplace(runtime, logits, torch.zeros(2, 2, dtype=torch.int32))
    with pytest.raises(ShapeError, match="num_top is int64"):
        sampling.logprobs(runtime, logits, np.zeros(2, np.int32), np.zeros(2, np.int64))
    starts = np.array([0, 2, 1])
    empty = np.zeros(1)
    with pytest.raises(ShapeError, match="starts is"):
        sampling.apply_penalties_inplace(runtime, logits, np.zeros(2, np.int32), starts, empty, empty, empty)
