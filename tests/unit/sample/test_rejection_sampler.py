"""The vectorised rules decide as the papers' algorithms do, line by line, given the same random numbers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from quire.core.sampling_params import SamplingParams
from quire.kernels.reference import rejection_sampler as twin
from quire.sample.drawn_drafts import DrawnDrafts
from quire.sample.rejection_sampler import DraftedLines, RejectionSampler, TypicalAcceptance, block_acceptance
from quire.sample.rng import STREAM_ACCEPT, STREAM_DRAFT, STREAM_RESIDUAL, attempt, uniform
from quire.sample.states import SamplingStates

VOCAB_SIZE = 13
NUM_LINES = 300
POSITIONS = np.arange(NUM_LINES) % 40 + 5
SEEDS = np.arange(NUM_LINES, dtype=np.uint64)


def random_probs(seed: int, num_lines: int = NUM_LINES, peak: float = 1.5) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.softmax(torch.randn(num_lines, VOCAB_SIZE, generator=generator) * peak, dim=1)


def drafted_lines(q: torch.Tensor, num_before: np.ndarray) -> DraftedLines:
    """A draft on each line: drawn from its q on the even ones, the likeliest of q on the odd ones."""
    token_ids = q.argmax(1).numpy().astype(np.int32)
    token_ids[::2] = torch.multinomial(q, 1, generator=torch.Generator().manual_seed(4))[::2, 0].numpy()
    drawn = np.arange(0, len(q), 2)
    return DraftedLines(token_ids, num_before, drawn, q[::2])


def dense(q: torch.Tensor, drafted: DraftedLines) -> np.ndarray:
    """[n, vocab_size] float64: q of every line, one-hot where it was not drawn."""
    found = np.eye(VOCAB_SIZE)[drafted.token_ids]
    found[drafted.drawn] = q.double().numpy()[drafted.drawn]
    return found


def test_a_draft_stands_with_the_ratio_of_its_probabilities_and_else_the_residual_is_drawn():
    p, q = random_probs(1), random_probs(2)
    num_before = np.arange(NUM_LINES) % 3
    drafted = drafted_lines(q, num_before)
    found = RejectionSampler().choose(p, np.zeros(NUM_LINES, dtype=np.int32), drafted, SEEDS, POSITIONS)
    numbers = uniform(SEEDS, POSITIONS, STREAM_ACCEPT), uniform(SEEDS, POSITIONS, STREAM_RESIDUAL)
    full = dense(q, drafted)
    for line in range(NUM_LINES):
        draws: Iterator[float] = iter([numbers[0][line], numbers[1][line]])
        both = np.stack([p[line].double().numpy()] * 2)
        wanted = twin.standard(both, full[line][None], [int(drafted.token_ids[line])], lambda draws=draws: next(draws))
        assert found[line] == wanted[0]
    assert 0.2 < np.mean(found == drafted.token_ids) < 0.9


def test_the_chance_of_a_block_is_that_of_the_paper():
    p, q = random_probs(1), random_probs(2)
    drafted = drafted_lines(q, np.zeros(NUM_LINES, dtype=np.int64))
    scale = np.random.default_rng(0).random(NUM_LINES)
    scale[::7] = 1.0
    chance, after = block_acceptance(p, scale, drafted)
    for line, q_line in enumerate(dense(q, drafted)):
        p_line, draft = p[line].double().numpy(), drafted.token_ids[line]
        mass = np.maximum(scale[line] * p_line - q_line, 0.0).sum()
        assert chance[line] == pytest.approx(mass / (mass + 1 - scale[line]), abs=1e-6)
        assert after[line] == pytest.approx(min(1.0, scale[line] * p_line[draft] / q_line[draft]), rel=1e-5)


def test_a_draft_from_the_target_itself_always_stands():
    p = random_probs(1)
    drawn = np.arange(NUM_LINES)
    drafted = DraftedLines(torch.multinomial(p, 1)[:, 0].numpy().astype(np.int32), drawn * 0, drawn, p)
    found = RejectionSampler().choose(p, np.full(NUM_LINES, -1, dtype=np.int32), drafted, SEEDS, POSITIONS)
    assert (found == drafted.token_ids).all()


def test_a_draft_that_is_impossible_never_stands():
    p, q = random_probs(1), random_probs(2)
    drafted = drafted_lines(q, np.zeros(NUM_LINES, dtype=np.int64))
    p[np.arange(NUM_LINES), drafted.token_ids] = 0.0
    found = RejectionSampler().choose(
        p / p.sum(1, keepdim=True), np.zeros(NUM_LINES, np.int32), drafted, SEEDS, POSITIONS
    )
    assert (found != drafted.token_ids).all()


def test_a_line_is_judged_the_same_whatever_is_beside_it():
    p, q = random_probs(1), random_probs(2)
    drafted, sampled = drafted_lines(q, np.zeros(NUM_LINES, dtype=np.int64)), np.zeros(NUM_LINES, dtype=np.int32)
    rule = RejectionSampler()
    together = rule.choose(p, sampled, drafted, SEEDS, POSITIONS)
    for line in range(0, NUM_LINES, 17):
        at = np.array([line])
        alone = rule.choose(p[at], sampled[at], drafted.take(at), SEEDS[at], POSITIONS[at])
        assert alone[0] == together[line]


def test_typical_acceptance_goes_by_threshold_and_entropy():
    p = random_probs(1, peak=3.0)
    drafted = drafted_lines(random_probs(2), np.zeros(NUM_LINES, dtype=np.int64))
    sampled = np.full(NUM_LINES, -1, dtype=np.int32)
    found = TypicalAcceptance(0.09, 0.3).choose(p, sampled, drafted, SEEDS, POSITIONS)
    wanted = [
        twin.is_typical(line, int(draft), 0.09, 0.3)
        for line, draft in zip(p.double().numpy(), drafted.token_ids, strict=True)
    ]
    assert (found == drafted.token_ids).tolist() == wanted
    assert 0.1 < np.mean(wanted) < 0.9


@pytest.mark.parametrize("is_block", [False, True])
def test_drafts_are_drawn_by_numbers_of_their_own_and_remembered_until_their_place_is_sampled(is_block: bool):
    states = SamplingStates(4, VOCAB_SIZE, torch.device("cpu"))
    for row, temperature in ((1, 0.7), (3, 0.0)):
        states.add_row(row, SamplingParams(temperature=temperature), np.array([1], dtype=np.int32), 1, seed=row)
    drawn = DrawnDrafts(states, 2, torch.device("cpu"), is_block=is_block)
    rows, logits = np.array([1, 3]), random_probs(3, 2)
    drawn.begin(rows, np.array([7, 9]))
    first, scores = drawn.draw(logits, rows)
    second, _ = drawn.draw(logits[:1], rows[:1])
    np.testing.assert_allclose(
        scores, [torch.softmax(logits[0] / 0.7, 0).max(), torch.softmax(logits[1], 0).max()], 1e-6
    )
    probs = torch.softmax(logits[0] / 0.7, 0)
    cumulative = probs.double().cumsum(0).numpy()
    for i, token in enumerate((first[0], second[0])):
        number = uniform(np.array([1], np.uint64), np.array([7 + i]), attempt(STREAM_DRAFT, np.array([i * is_block])))
        assert token == np.searchsorted(cumulative, number[0] * cumulative[-1], side="right")
    assert first[1] == int(logits[1].argmax())
    assert drawn.is_waiting(rows, np.array([7, 9])).tolist() == [True, True]
    assert drawn.is_waiting(rows, np.array([8, 9])).tolist() == [False, True]

    lines = np.array([1, 1, 3]), np.array([0, 1, 0]), np.array([True, True, True])
    whole = drawn.of_lines(np.array([first[0], -1, first[1]], dtype=np.int32), *lines)
    assert whole.token_ids.tolist() == [first[0], second[0], first[1]] and whole.drawn.tolist() == [0, 1, 2]
    torch.testing.assert_close(whole.probs[0], probs)
    other = drawn.of_lines(np.array([first[0] + 1, -1, -1], dtype=np.int32), *lines)  # another proposer's
    assert other.token_ids.tolist() == [first[0] + 1, -1, first[1]] and other.drawn.tolist() == [2]
    drawn.forget(rows)
    assert not drawn.is_waiting(rows, np.array([7, 9])).any()


def test_drafts_of_another_vocabulary_are_kept_by_the_targets_ids_and_broken_logits_end_a_chain():
    states = SamplingStates(4, VOCAB_SIZE, torch.device("cpu"))
    for row in (0, 2):
        states.add_row(row, SamplingParams(temperature=1.0), np.array([1], dtype=np.int32), 1, seed=row)
    drawn, rows, ids = (
        DrawnDrafts(states, 2, torch.device("cpu")),
        np.array([0, 2]),
        np.array([9, 4, 7], dtype=np.int32),
    )
    drawn.begin(rows, np.array([7, 9]))
    logits = torch.tensor([[0.1, 2.0, -1.0], [0.0, float("nan"), 1.0]])
    found = drawn.draw(logits, rows, ids)
    assert found.token_ids[0] in ids and found.token_ids[1] == -1
    assert drawn.is_waiting(rows, np.array([7, 9])).tolist() == [True, False]
    lines = drawn.of_lines(found.token_ids[:1], rows[:1], np.array([0]), np.array([True]))
    torch.testing.assert_close(lines.probs[0, torch.from_numpy(ids).long()], torch.softmax(logits[0], 0))
    assert lines.probs.sum() == pytest.approx(1.0)
