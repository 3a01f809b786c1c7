from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.logprobs import LogprobsArrays
from quire.core.sampling_params import SamplingParams
from quire.kernels.native.runtime import NativeRuntime
from quire.sample.ops.native import NativeSamplingOps
from quire.sample.ops.torch_ops import TorchSamplingOps, argmax, draw
from quire.sample.rng import uniform
from quire.sample.sampler import Sampler
from quire.sample.states import SamplingStates
from tests.unit.sample import reference
from tests.unit.sample.conftest import VOCAB_SIZE, Bench


def random_logits(num_lines: int, seed: int = 0, vocab_size: int = VOCAB_SIZE) -> torch.Tensor:
    return torch.randn(num_lines, vocab_size, generator=torch.Generator().manual_seed(seed)) * 3


def test_greedy_takes_the_likeliest_token_and_the_lowest_id_of_equals(bench: Bench) -> None:
    bench.add(0, SamplingParams(temperature=0))
    bench.add(1, SamplingParams(temperature=0))
    logits = random_logits(2)
    logits[1] = -5.0
    logits[1, [9, 30]] = 2.0
    output = bench.sample(logits, [0, 1])
    assert output.token_ids.tolist() == [int(logits[0].argmax()), 9]
    assert output.token_ids.dtype == np.int32 and output.logprobs is None and not output.is_invalid.any()


PARAMS = {
    "temperature": {"temperature": 0.7},
    "cold": {"temperature": 0.01},
    "hot": {"temperature": 2.0},
    "top_k": {"top_k": 5},
    "top_k_one": {"top_k": 1},
    "top_k_all": {"top_k": VOCAB_SIZE},
    "top_p": {"top_p": 0.8},
    "tiny_top_p": {"top_p": 1e-6},
    "min_p": {"min_p": 0.2},
    "min_p_one": {"min_p": 1.0},
    "top_k_top_p": {"top_k": 12, "top_p": 0.7},
    "all_filters": {"top_k": 20, "top_p": 0.9, "min_p": 0.05, "temperature": 1.3},
    "penalties": {"repetition_penalty": 1.5, "frequency_penalty": 0.6, "presence_penalty": -0.5},
    "bias": {"logit_bias": {3: 5.0, 7: -100.0}},
    "allowed": {"allowed_token_ids": [4, 9, 50]},
    "bad_words": {"bad_words_token_ids": [[8], [5, 6], [1, 6, 9], [7, 7]]},
    "min_tokens": {"min_tokens": 5, "stop_token_ids": [11, 12], "max_tokens": 9},
    "everything": {
        "temperature": 0.9,
        "top_k": 30,
        "top_p": 0.95,
        "min_p": 0.01,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.3,
        "presence_penalty": 0.2,
        "logit_bias": {9: 4.0},
        "bad_words_token_ids": [[6, 20]],
        "min_tokens": 9,
        "max_tokens": 20,
        "allowed_token_ids": list(range(40)),
    },
}


@pytest.mark.parametrize("name", PARAMS)
def test_a_draw_is_the_inverse_of_the_exact_distribution_at_the_rows_random_number(name: str, bench: Bench) -> None:
    params, prompt, output = SamplingParams(**PARAMS[name]), [1, 2, 3, 3], [5, 1, 6]
    bench.add(2, params, prompt, output, seed=99, eos=10)
    for trial in range(40):
        logits = random_logits(1, trial)
        position = len(prompt) + len(output) + trial
        token_id = int(bench.sample(logits, [2], [position]).token_ids[0])
        x = reference.constrained_logits(logits[0].numpy(), params, prompt, output, eos_token_id=10)
        probs = reference.distribution(x, params)
        number = float(uniform(np.array([99], dtype=np.uint64), np.array([position]))[0])
        if token_id != reference.draw(probs, number):  # float32 may move the edge between two tokens
            edges = np.cumsum(probs)
            assert np.abs(edges - number).min() < 1e-5
            assert probs[token_id] > 0


@pytest.mark.parametrize("mode", ["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"])
def test_logprob_fields_follow_the_mode(mode: str, make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(4, mode=mode)
    greedy = SamplingParams(temperature=0, logprobs=3, repetition_penalty=1.4, logit_bias={2: 9.0})
    random = SamplingParams(temperature=0.5, top_k=10, top_p=0.9, logprobs=5, presence_penalty=1.0)
    bench.add(0, greedy, [1, 2], [5])
    bench.add(1, SamplingParams(temperature=1.0))
    bench.add(2, random, [1, 2], [5])
    logits = random_logits(3)
    output = bench.sample(logits, [0, 1, 2])
    assert output.logprobs is not None
    assert output.logprobs.index.tolist() == [0, 2]
    for line, params in enumerate((greedy, random)):
        x = logits[2 * line].double().numpy()
        if mode.startswith("processed"):
            x = reference.constrained_logits(x, params, [1, 2], [5])
        if mode.startswith("processed") and params is random:
            probs = reference.distribution(x, params)
            x = np.where(probs > 0, x / params.temperature, -np.inf)
        scores = x if mode.endswith("logits") else np.log(np.maximum(reference.softmax(x), 1e-300))
        num_top = params.logprobs
        ids = output.logprobs.token_ids[line, : num_top + 1]
        expected_ids, expected_ranks = reference.logprob_line(scores, int(output.token_ids[2 * line]), num_top)
        assert ids.tolist() == expected_ids
        assert output.logprobs.ranks[line, : num_top + 1].tolist() == expected_ranks
        found = output.logprobs.logprobs[line, : num_top + 1]
        possible = scores[ids] > -600
        assert np.abs(found[possible] - scores[ids][possible]).max() <= 1e-4
        assert (found[~possible] == -np.inf).all()


def test_lines_that_ask_for_fewer_logprobs_are_padded(bench: Bench) -> None:
    bench.add(0, SamplingParams(logprobs=0))
    bench.add(1, SamplingParams(logprobs=4))
    bench.add(2, SamplingParams(logprobs=-1))
    lines = bench.sample(random_logits(3), [0, 1, 2]).logprobs
    assert lines is not None and lines.token_ids.shape == (3, VOCAB_SIZE + 1)
    for line, num_top in enumerate((0, 4, VOCAB_SIZE)):
        assert (lines.token_ids[line, : num_top + 1] >= 0).all()
        assert (lines.token_ids[line, num_top + 1 :] == -1).all()
        assert np.isnan(lines.logprobs[line, num_top + 1 :]).all()
        assert np.isfinite(lines.logprobs[line, : num_top + 1]).all()
    assert sorted(lines.token_ids[2, 1:].tolist()) == list(range(VOCAB_SIZE))


def test_equal_scores_count_against_the_sampled_rank_and_are_listed_by_rising_id(bench: Bench) -> None:
    bench.add(0, SamplingParams(temperature=0, logprobs=3))
    logits = torch.zeros(1, VOCAB_SIZE)
    lines = bench.sample(logits, [0]).logprobs
    assert lines is not None
    assert lines.token_ids[0].tolist() == [0, 0, 1, 2]
    assert lines.ranks[0].tolist() == [VOCAB_SIZE, 1, 2, 3]


def line_of(lines: LogprobsArrays, entry: int, num_top: int) -> tuple[list[int], bytes, list[int]]:
    line = lines.index.tolist().index(entry)
    width = num_top + 1
    return (
        lines.token_ids[line, :width].tolist(),
        lines.logprobs[line, :width].tobytes(),
        lines.ranks[line, :width].tolist(),
    )


MANY_PARAMS = [
    SamplingParams(**{**PARAMS[name], "logprobs": number % 4} if number % 3 else PARAMS[name])
    for number, name in enumerate([*PARAMS, "top_p", "top_k", "temperature"] * 4)
][:58] + [SamplingParams(temperature=0, logprobs=2), SamplingParams(temperature=0)] * 3


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_a_row_gets_the_same_bits_alone_as_in_a_shuffled_batch_of_64(
    mode: str, make_bench: Callable[..., Bench]
) -> None:
    vocab_size = 1009
    bench = make_bench(64, vocab_size, mode)
    generator = np.random.default_rng(0)
    for row, params in enumerate(MANY_PARAMS):
        tokens = generator.integers(0, vocab_size, 9).tolist()
        bench.add(row, params, tokens[:5], tokens[5:], seed=row, eos=10)
    logits = random_logits(64, 1, vocab_size)
    logits[::5] = logits[::5].round()  # equal scores
    order = generator.permutation(64)
    positions = generator.integers(9, 2000, 64)
    together = bench.sample(logits[order], order.tolist(), positions[order].tolist())
    for entry, row in enumerate(order.tolist()):
        alone = bench.sample(logits[row : row + 1], [row], [int(positions[row])])
        assert alone.token_ids[0] == together.token_ids[entry]
        num_top = MANY_PARAMS[row].logprobs
        if num_top is not None:
            assert alone.logprobs is not None and together.logprobs is not None
            assert line_of(alone.logprobs, 0, num_top) == line_of(together.logprobs, entry, num_top)


def test_a_batch_too_large_for_one_block_gets_the_same_bits(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    for row in range(8):
        bench.add(row, SamplingParams(top_p=0.9, top_k=20 + row, logprobs=row), seed=row)
    logits = random_logits(8)
    whole = bench.sample(logits, list(range(8)))
    monkeypatch.setattr("quire.sample.ragged.MAX_BLOCK_ELEMENTS", 3 * VOCAB_SIZE)
    cut = bench.sample(logits, list(range(8)))
    assert cut.token_ids.tolist() == whole.token_ids.tolist()
    assert whole.logprobs is not None and cut.logprobs is not None
    assert cut.logprobs.token_ids.tolist() == whole.logprobs.token_ids.tolist()
    assert cut.logprobs.logprobs.tobytes() == whole.logprobs.logprobs.tobytes()


def test_the_number_of_threads_does_not_change_a_bit() -> None:
    logits = random_logits(16, 3, 40_009)
    numbers = uniform(np.arange(16, dtype=np.uint64), np.arange(16))
    num_threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = draw(logits, numbers), torch.log_softmax(logits, -1)
        torch.set_num_threads(2)
        two = draw(logits, numbers), torch.log_softmax(logits, -1)
    finally:
        torch.set_num_threads(num_threads)
    assert one[0].tolist() == two[0].tolist() and torch.equal(one[1], two[1])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_unusable_logits_are_flagged_and_give_an_id_inside_the_vocabulary(
    bench: Bench, temperature: float, value: float
) -> None:
    bench.add(0, SamplingParams(temperature=temperature, logprobs=1))
    bench.add(1, SamplingParams(temperature=temperature))
    logits = random_logits(2)
    alone = bench.sample(logits[1:], [1])
    if value == float("-inf"):
        logits[0] = value
    else:
        logits[0, 17] = value
    output = bench.sample(logits, [0, 1])
    assert output.is_invalid.tolist() == [True, False]
    assert 0 <= output.token_ids[0] < VOCAB_SIZE
    assert output.token_ids[1] == alone.token_ids[0]


def test_masks_that_leave_no_token_possible_are_flagged(bench: Bench) -> None:
    bench.add(0, SamplingParams(allowed_token_ids=[3], bad_words_token_ids=[[3]]))
    assert bench.sample(random_logits(1), [0]).is_invalid.tolist() == [True]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=4), st.integers(0, 2**31), st.data())
def test_impossible_tokens_are_never_drawn_whatever_the_random_number(
    numbers: list[float], seed: int, data: st.DataObject
) -> None:
    logits = random_logits(len(numbers), seed, 17)
    masks = [data.draw(st.sets(st.integers(0, 16), max_size=16)) for _ in numbers]
    for line, mask in enumerate(masks):
        logits[line, sorted(mask)] = float("-inf")
    at = np.array(numbers)
    at[0] = data.draw(st.sampled_from([at[0], 0.0, 1 - 2.0**-53]))
    for token_id, mask in zip(draw(logits, at).tolist(), masks, strict=True):
        assert token_id not in mask


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("scale", [0.5, 3.0])
def test_native_kernels_choose_the_tokens_that_torch_does(temperature: float, scale: float) -> None:
    num_lines, vocab_size = 64, 4001
    tokens: list[np.ndarray] = []
    for ops in (TorchSamplingOps(), NativeSamplingOps(NativeRuntime(num_threads=2))):
        states = SamplingStates(num_lines, vocab_size, torch.device("cpu"))
        bench = Bench(states, Sampler(states, ops))
        for row in range(num_lines):
            filters = [{}, {"top_k": 1 + 9 * row}, {"top_p": 0.3 + row / 100}, {"min_p": 0.03}][row % 4]
            bench.add(row, SamplingParams(temperature=temperature, **filters), [1, 2], seed=row)
        drawn = []
        for step in range(20):
            logits = random_logits(num_lines, step, vocab_size) * (scale / 3)
            drawn.append(bench.sample(logits, list(range(num_lines)), [2 + step] * num_lines).token_ids)
        tokens.append(np.concatenate(drawn))
    # Sums of 4001 float32 weights are off by 1e-6; that is how often a random number falls between the two edges.
    assert (tokens[0] != tokens[1]).sum() <= (0 if temperature == 0 else 1)


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logprobs"])
def test_rows_of_a_wider_matrix_and_its_transpose_are_sampled_alike(
    make_bench: Callable[..., Bench], mode: str
) -> None:
    bench = make_bench(mode=mode)
    bench.add(0, SamplingParams(temperature=0, logprobs=2))
    bench.add(1, SamplingParams(top_p=0.9, presence_penalty=0.5, logprobs=1), [4, 5], [6])
    bench.add(2, SamplingParams(top_k=9))
    logits = random_logits(3)
    rows, positions = np.arange(3, dtype=np.int32), np.array([3, 4, 5])
    expected = bench.sampler.sample(logits.clone(), rows, positions)
    wide = torch.cat((logits, torch.full((3, 9), torch.nan)), dim=1)
    for strided in (wide[:, :VOCAB_SIZE], logits.T.contiguous().T):
        found = bench.sampler.sample(strided, rows, positions)
        assert found.token_ids.tolist() == expected.token_ids.tolist()
        assert found.logprobs is not None and expected.logprobs is not None
        assert found.logprobs.logprobs.tobytes() == expected.logprobs.logprobs.tobytes()
    assert bool(wide[:, VOCAB_SIZE:].isnan().all())


def test_sampling_nothing_gives_nothing(bench: Bench) -> None:
    output = bench.sample(torch.empty(0, VOCAB_SIZE), [], [])
    assert output.token_ids.shape == (0,) and output.logprobs is None


def test_argmax_counts_nan_as_largest() -> None:
    logits = torch.tensor([[1.0, 3.0, float("nan")], [2.0, 1.0, 0.0]])
    token_ids, is_invalid = argmax(logits)
    assert token_ids.tolist() == [2, 0] and is_invalid.tolist() == [True, False]


def test_half_precision_logits_are_sampled_in_float32(bench: Bench) -> None:
    bench.add(0, SamplingParams(temperature=0, logprobs=1))
    logits = random_logits(1).to(torch.bfloat16)
    lines = bench.sample(logits, [0]).logprobs
    assert lines is not None and lines.logprobs.dtype == np.float32
    assert abs(lines.logprobs[0, 0] - float(torch.log_softmax(logits.float(), -1).max())) <= 1e-6


@pytest.mark.parametrize("mode", ["raw_logprobs", "processed_logits"])
def test_named_tokens_have_the_logprobs_that_all_tokens_have(mode: str, make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(6, mode=mode)
    bench.add(0, SamplingParams(temperature=0, logprob_token_ids=[7, 2, 9]))
    bench.add(1, SamplingParams(temperature=0, logprobs=1))
    bench.add(2, SamplingParams(temperature=1.0))
    bench.add(3, SamplingParams(temperature=0, logprob_token_ids=[5]))
    logits = random_logits(4)
    found = bench.sample(logits, [0, 1, 2, 3])
    bench.add(4, SamplingParams(temperature=0, logprobs=-1))
    assert found.logprobs is not None and found.logprobs.index.tolist() == [0, 1, 3]
    for line, (entry, ids) in enumerate([(0, [7, 2, 9]), (3, [5])]):
        whole = bench.sample(logits[entry : entry + 1], [4]).logprobs
        assert whole is not None
        place = [whole.token_ids[0, 1:].tolist().index(one) + 1 for one in ids]
        named = slice(1, 1 + len(ids))
        at = [0, 2][line]
        assert found.logprobs.token_ids[at].tolist() == [found.token_ids[entry], *ids, *[-1] * (3 - len(ids))]
        assert np.abs(found.logprobs.logprobs[at, named] - whole.logprobs[0, place]).max() < 1e-5
        assert not found.logprobs.ranks[at, named].any()
    assert (found.logprobs.token_ids[1] >= 0).tolist() == [True, True, False, False]
    bench.states.remove_row(0)
    bench.states.remove_row(3)
    assert not bench.states.logprob_token_ids
    bench.add(5, SamplingParams(temperature=0, logprob_token_ids=[int(logits[0].argmax()), 2]))
    again = bench.sample(logits[:1], [5]).logprobs
    assert again is not None and again.token_ids[0, 1:].tolist() == [-1, 2], "the sampled token is named once"
