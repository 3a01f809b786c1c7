"""A machine whose steps cost what a function says, with proposers whose drafts are right as often as they say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from quire.core.drafts import DraftController, Proposals, SpeculatedStep, StepLoad

Cost = Callable[[int], float]
NO_DRAFTS = np.zeros(0, dtype=np.int32)


def flat(num_tokens: int) -> float:
    """Reading the weights is all there is."""
    return 0.010


def linear(num_tokens: int) -> float:
    """As bfloat16 on a CPU."""
    return 0.010 + 0.0004 * num_tokens


def steep(num_tokens: int) -> float:
    """As four bits on a CPU: tokens cost nearly what the step does."""
    return 0.002 + 0.001 * num_tokens


def staircase(num_tokens: int) -> float:
    """As graphs of fixed sizes."""
    return 0.004 * (1 << max(0, (num_tokens - 1).bit_length() - 2))


def convex(num_tokens: int) -> float:
    """Ever dearer."""
    return 0.005 + 0.00002 * num_tokens**1.7


COSTS = {"flat": flat, "linear": linear, "steep": steep, "staircase": staircase, "convex": convex}


@dataclass
class Drafter:
    """Drafts of rows, and what becomes of them.

    Attributes:
        chance: of each draft to be right given that those before it are, by number of the step.
        score: that the proposer claims; None = the chance.
        length: drafts that it has for a row, if it has any.
        share: of rows for which it has some.
        seconds: for a step.
    """

    chance: Callable[[int], float]
    score: float | None = None
    length: int = 8
    share: float = 1.0
    seconds: float = 0.00002

    def propose(self, step: int, num_rows: int, most: int, rng: np.random.Generator) -> Proposals:
        has_drafts = rng.random(num_rows) < self.share
        counts = np.where(has_drafts, min(most, self.length), 0).astype(np.int32)
        num_drafts = int(counts.sum())
        score = self.chance(step) if self.score is None else self.score
        return Proposals(
            counts=counts,
            token_ids=np.zeros(num_drafts, dtype=np.int32),
            scores=np.full(num_drafts, score, dtype=np.float32),
            sources=np.zeros(num_rows, dtype=np.int32),
            match_lengths=np.full(num_rows, 4, dtype=np.int32),
        )

    def accept(self, step: int, kept: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """[num_rows] how many drafts of each row were right."""
        chance = min(max(self.chance(step), 1e-9), 1 - 1e-9)
        return np.minimum(kept, rng.geometric(1 - chance, len(kept)) - 1).astype(np.int32)


@dataclass
class Played:
    """What came of it.

    Attributes:
        ratio: seconds of plain steps for the same tokens over the seconds that it took.
        num_steps: in all.
        num_drafted: steps with drafts.
    """

    ratio: float
    num_steps: int
    num_drafted: int


def fixed_ratio(drafter: Drafter, cost: Cost, num_rows: int, num_drafts: int) -> float:
    """The `Played.ratio` to be expected where every row always has so many drafts verified."""
    chance, length = drafter.chance(0), min(num_drafts, drafter.length)
    seconds = cost(num_rows * (1 + length)) + (drafter.seconds if length else 0.0)
    return cost(num_rows) * sum(chance**i for i in range(length + 1)) / seconds


def play(
    controller: DraftController,
    drafter: Drafter,
    cost: Cost,
    *,
    num_steps: int = 2000,
    num_rows: Callable[[int], int] = lambda step: 1,
    noise: float = 0.0,
    slowness: Callable[[int], float] = lambda step: 1.0,
    seed: int = 0,
) -> Played:
    """Run steps, and compare them with plain ones.

    Args:
        num_rows: that decode, by number of the step.
        noise: standard deviation of the logarithm of a step's duration.
        slowness: what a step takes is so many times `cost`, by number of the step.
    """
    rng = np.random.default_rng(seed)
    seconds = plain_s = 0.0
    num_drafted = num_to_skip = rows = num_skipped = 0
    skipped_s = 0.0
    for step in range(num_steps):
        if num_rows(step) != rows:
            num_to_skip = 0
        rows = num_rows(step)
        if num_to_skip:
            num_to_skip -= 1
            step_s = slowness(step) * cost(rows) * float(np.exp(noise * rng.standard_normal()))
            num_skipped, skipped_s = num_skipped + 1, skipped_s + step_s
            seconds += step_s
            plain_s += slowness(step) * cost(rows)
            continue
        if num_skipped:
            controller.record_skipped(num_skipped, skipped_s)
            num_skipped, skipped_s = 0, 0.0
        load = StepLoad(num_decoding=rows, num_other_tokens=0, sum_seq_lens=100 * rows, max_seq_len=100, num_left=4096)
        most = controller.most_tokens(rows, 0, 100)
        num_to_skip = controller.num_skipped()
        proposals, kept, accepted, proposing_s = None, NO_DRAFTS, NO_DRAFTS, 0.0
        num_watched = controller.num_watched()
        if num_watched:
            looked, proposing_s = drafter.propose(step, min(rows, 4), num_watched, rng), drafter.seconds
            controller.observe(load, looked, drafter.accept(step, looked.counts, rng))
        if most:
            proposals, proposing_s = drafter.propose(step, rows, most, rng), drafter.seconds
            kept = controller.choose(load, proposals)
            accepted = drafter.accept(step, kept, rng)
        step_s = slowness(step) * cost(rows + int(kept.sum())) * float(np.exp(noise * rng.standard_normal()))
        controller.record(
            SpeculatedStep(
                load=load, proposals=proposals, kept=kept, accepted=accepted, seconds=step_s, proposing_s=proposing_s
            )
        )
        seconds += step_s + proposing_s
        plain_s += slowness(step) * cost(rows) * (1 + int(accepted.sum()) / rows)
        num_drafted += bool(kept.any())
    return Played(plain_s / seconds, num_steps, num_drafted)
