"""CostTable: what a step lasts on this machine, by its tokens and contexts; learned from the steps that it runs.

Called by the draft controller. Owns the measurements. A few steps measured at start say how steps grow with their
tokens, real steps how long they are; what was not seen lies between what was, in the form of those at the start. A
plain step of n decoding rows and o prompt tokens lasts plain(n) + o * prompt_token; b drafts make it longer by a share
of plain(n) that is learned for each load, with what drafts cost beside their tokens (several rounds of sampling, longer
messages). No curve falls with its tokens.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from quire.spec_decode.load import LoadBucket

# Powers of two and the numbers behind them: where costs have steps (graphs of fixed sizes), these are at the former.
KNOTS = (
    1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 17, 24, 32, 33, 48, 64, 65, 96, 128, 129, 192, 256, 257, 384, 512, 513, 768, 1024,
    1025, 2048, 4096, 8192,
)  # fmt: skip
KNOTS_APART = 8
# Measurements of a number of drafts after which it is known whether it is worth it: the first one finds nothing in the
# caches.
ENOUGH_TRIALS = 3
# What each further token adds to the step of one, until steps of more were measured: about that of bfloat16 on a CPU.
PRIOR_SLOPE = 0.05
# Weight of the newest of many measurements, and of one that several knots share at most.
NEWEST_SHARE = 1 / 16
MIN_HAT = 0.25
# One measurement moves a curve by no more than these factors: a machine may be away for a while.
LEAST_RATIO, MOST_RATIO = 0.5, 2.0


Prior = Callable[[int], float]
"""By which share of a plain step so many drafts make it longer, as far as that is known without measuring them."""


class MeasuredStep(NamedTuple):
    """A step of short contexts that was measured at start.

    Attributes:
        num_decoding: rows that decode.
        num_drafts: of all rows together.
        seconds: to be scheduled, computed, sampled and taken in.
        drafting_s: that a model took besides to draft for the next step; 0 = there is none, or it was not asked.
    """

    num_decoding: int
    num_drafts: int
    seconds: float
    drafting_s: float = 0.0


class LearnedCurve:
    """A curve that is positive: a shape times a factor at each of its knots, linear between them.

    Args:
        knots: [num_knots] float64, rising, from 1.
        shape: [num_knots] float64, positive: the curve as long as nothing was measured.

    Attributes:
        is_measured: anything was.
    """

    def __init__(self, knots: np.ndarray, shape: np.ndarray) -> None:
        self._knots: list[float] = knots.tolist()
        self._shape = shape
        self._numbers = np.arange(len(knots), dtype=np.float64)
        self._factors = np.ones(len(knots))
        self._counts = np.zeros(len(knots), dtype=np.int64)
        self._values: list[float] = shape.tolist()
        self.is_measured = False

    def value(self, place: float) -> float:
        """The curve there; beyond the last knot it goes on in proportion."""
        knots, values = self._knots, self._values  # lists: an array costs several times as much for one place
        if place >= knots[-1]:
            return values[-1] * place / knots[-1]
        high = max(1, bisect_right(knots, place))
        share = max(0.0, (place - knots[high - 1]) / (knots[high] - knots[high - 1]))
        return values[high - 1] + share * (values[high] - values[high - 1])

    def observe(self, place: float, measured: float, num_steps: int = 1) -> None:
        """Take in a measurement, or the mean of several: an exponential mean at the knots that are near."""
        high = min(max(1, bisect_right(self._knots, place)), len(self._knots) - 1)
        low = high - 1
        share = min(1.0, max(0.0, (place - self._knots[low]) / (self._knots[high] - self._knots[low])))
        own = self._shape[low : high + 1] * self._factors[low : high + 1]
        beyond = max(1.0, place / self._knots[-1])
        ratio = float(measured / (beyond * (own[0] + share * (own[1] - own[0]))))
        bounded = min(max(ratio, LEAST_RATIO), MOST_RATIO)
        for knot, hat in ((low, 1.0 - share), (high, share)):
            if hat < MIN_HAT:
                continue
            count = int(self._counts[knot])
            newest = 1.0 - (1.0 - max(1 / (count + 1), NEWEST_SHARE)) ** num_steps
            self._factors[knot] *= 1.0 + (hat * newest if count else 1.0) * ((bounded if count else ratio) - 1.0)
            self._counts[knot] = count + num_steps
        self.is_measured = True
        self._fill(high if share > 0.5 else low)

    def _fill(self, newest: int) -> None:
        """Knots that were not measured get what lies between their neighbours. Where measurements say that the curve
        falls the newest one holds: others are older, and the machine may have been slower or faster.
        """
        is_seen = self._counts > 0
        self._factors = np.interp(self._numbers, self._numbers[is_seen], self._factors[is_seen])
        values = self._shape * self._factors
        lower = np.minimum.accumulate(values[newest::-1])[::-1]
        self._values = [*lower[:-1].tolist(), *np.maximum.accumulate(values[newest:]).tolist()]

    def successor(self) -> LearnedCurve:
        """A curve for a similar load, which starts from this one and soon is what is measured there."""
        curve = LearnedCurve(np.array(self._knots), self._shape)
        curve._factors, curve._values = self._factors.copy(), self._values
        curve._counts, curve.is_measured = np.minimum(self._counts, 1), self.is_measured
        return curve


class DraftsCurve:
    """How much longer drafts make a step, as a share of the plain one.

    A number costs no more than larger ones were measured to. What is estimated too low is chosen, and so is measured.

    Attributes:
        turned_down: the share of a step for which drafts were proposed and none was verified.
    """

    def __init__(self) -> None:
        self._measured: dict[int, float] = {}
        self._counts: dict[int, int] = {}
        self._numbers, self._shares = [0], [0.0]
        self._num_turned_down, self.turned_down = 0, 0.0

    @property
    def most_measured(self) -> int:
        """Largest number of drafts that was measured; 0 = none."""
        return self._numbers[-1]

    def is_measured(self, num_drafts: int) -> bool:
        """Whether this number was, or one that is near."""
        return _knot_below(num_drafts) in self._measured

    def is_known(self, num_drafts: int) -> bool:
        """Whether a number that is near was measured so often that one measurement more says little."""
        return self._counts.get(_knot_below(num_drafts), 0) * NEWEST_SHARE >= 1.0

    def value(self, num_drafts: int, prior: Prior) -> float:
        """The share of so many drafts, at least 1; between and beyond those that were measured in the form of `prior`.

        Beyond them it goes on as a part of `prior` that is as large as before, all of it at most; and as steep as the
        line between the last two at least.
        """
        numbers, shares = self._numbers, self._shares
        at = bisect_right(numbers, num_drafts) - 1
        if at and numbers[at] == num_drafts:
            return shares[at]
        last, expected = numbers[-1], prior(num_drafts)
        if not last:
            return expected
        if num_drafts >= last:
            foreseen = prior(last)
            more = (expected - foreseen) * min(1.0, shares[-1] / foreseen if foreseen > 0.0 else 1.0)
            if len(numbers) > 2:
                more = max(more, (shares[-1] - shares[-2]) / (last - numbers[-2]) * (num_drafts - last))
            return shares[-1] + more
        low, high = at, at + 1
        start = prior(numbers[low]) if low else 0.0
        rise = prior(numbers[high]) - start
        share = (
            (num_drafts - numbers[low]) / (numbers[high] - numbers[low]) if rise <= 0.0 else (expected - start) / rise
        )
        return shares[low] + min(max(share, 0.0), 1.0) * (shares[high] - shares[low])

    def least(self, num_drafts: int) -> float | None:
        """What so many drafts cost at least: no less than fewer do. None = this, or none as large, was measured."""
        numbers = self._numbers
        if num_drafts >= numbers[-1] or _knot_below(num_drafts) in self._measured:
            return None
        return self._shares[bisect_right(numbers, num_drafts) - 1]

    def hoped(self, num_drafts: int, fewer: int) -> float | None:
        """What so many drafts may cost, if each costs what each of about `fewer` does. None = they were tried, or those
        were not measured.
        """
        at = bisect_right(self._numbers, fewer) - 1
        if not at or self._counts.get(_knot_below(num_drafts), 0) >= ENOUGH_TRIALS:
            return None
        return self._shares[at] * num_drafts / self._numbers[at]

    def observe(self, num_drafts: int, share: float, prior: Prior) -> None:
        """Take in a measurement: an exponential mean of those of the same number, or one that is near."""
        knot = _knot_below(num_drafts)
        share *= knot / num_drafts
        count = self._counts.get(knot, 0)
        known = self._measured.get(knot, 0.0)
        if 0 < count < ENOUGH_TRIALS:
            share = min(share, known)  # a number that was disturbed once would not be tried again
        # The first one is compared with what it was expected to be: the machine may have been away just then.
        expected = known if count else self.value(knot, prior)
        bounded = min(share, MOST_RATIO * (1.0 + expected) - 1.0)
        self._measured[knot] = known + max(1 / (count + 1), NEWEST_SHARE) * (bounded - known)
        self._counts[knot] = count + 1
        numbers = sorted(self._measured)
        self._numbers = [0, *numbers]
        falling = accumulate((max(0.0, self._measured[number]) for number in reversed(numbers)), min)
        self._shares = [0.0, *list(falling)[::-1]]

    def observe_turned_down(self, share: float) -> None:
        """Take in a step for which drafts were proposed and none was verified."""
        self._num_turned_down += 1
        bounded = min(max(share, self.turned_down - 1.0), self.turned_down + 1.0)
        self.turned_down += max(1 / self._num_turned_down, NEWEST_SHARE) * (bounded - self.turned_down)

    def successor(self) -> DraftsCurve:
        """A curve for a similar load, which starts from this one and soon is what is measured there."""
        curve = DraftsCurve()
        curve._num_turned_down, curve.turned_down = min(self._num_turned_down, 1), self.turned_down
        curve._measured, curve._counts = dict(self._measured), dict.fromkeys(self._counts, 1)
        curve._numbers, curve._shares = self._numbers, self._shares
        return curve


def _knot_below(num_drafts: int) -> int:
    """The number of drafts whose measurements it is counted with: small ones are apart."""
    return num_drafts if num_drafts <= KNOTS_APART else KNOTS[bisect_right(KNOTS, num_drafts) - 1]


class CostTable:
    """Durations of steps, in seconds.

    Attributes:
        prediction_ratio: measured over predicted seconds of the steps of late, an exponential mean.
        most_foreseen: drafts up to which steps were measured at start; 0 = none were.
    """

    def __init__(self) -> None:
        self._knots = np.array(KNOTS, dtype=np.float64)
        self._shape = 1.0 + PRIOR_SLOPE * (self._knots - 1.0)
        self.most_foreseen = 0
        self._plain: dict[int, LearnedCurve] = {}
        self._drafted: dict[LoadBucket, DraftsCurve] = {}
        self._newest_drafted: DraftsCurve | None = None
        self._predicted: dict[tuple[LoadBucket, int, tuple[int, ...]], list[float]] = {}  # since the newest measurement
        self._prompt_token_s = 0.0
        self._num_prompts = 0
        self.prediction_ratio = 1.0

    def begin(self, measured: Sequence[MeasuredStep]) -> None:
        """Start from steps that were measured before there were requests.

        The least of each number of tokens counts, and none more than larger ones: what disturbs a step makes it longer.
        """
        least: dict[int, float] = {}
        for step in measured:
            num_tokens = step.num_decoding + step.num_drafts
            least[num_tokens] = min(step.seconds, least.get(num_tokens, step.seconds))
        numbers = sorted(least)
        if len(numbers) < 2 or numbers[0] != 1 or min(least.values()) <= 0.0:
            return
        seconds = list(accumulate((least[number] for number in reversed(numbers)), min))[::-1]
        slope = (seconds[-1] - seconds[-2]) / (numbers[-1] - numbers[-2])
        beyond = slope * np.maximum(0.0, self._knots - numbers[-1])
        self._shape = (np.interp(self._knots, numbers, seconds) + beyond) / seconds[0]
        self.most_foreseen = numbers[-1] - 1

    def is_measured(self, bucket: LoadBucket) -> bool:
        """Whether a plain step of about these contexts was measured; False = what is predicted is in no unit."""
        curve = self._plain.get(bucket.context_class)
        return curve is not None and curve.is_measured

    def plain_seconds(self, bucket: LoadBucket, num_decoding: int, num_other_tokens: int) -> float:
        """Predicted seconds of a step without drafts."""
        return self._plain_curve(bucket).value(num_decoding) + num_other_tokens * self._prompt_token_s

    def token_seconds(self, bucket: LoadBucket, num_decoding: int) -> float:
        """Seconds that plain decoding takes for one token of `num_decoding` rows, prompts aside."""
        return self._plain_curve(bucket).value(num_decoding) / num_decoding

    def decode_seconds(self, bucket: LoadBucket, num_decoding: int, numbers: tuple[int, ...]) -> list[float]:
        """Predicted seconds of a step without drafts, then with each of some numbers of them, without its prompts.

        Args:
            numbers: of drafts, at least 1, rising; with them seconds never fall.
        """
        known = self._predicted.get((bucket, num_decoding, numbers))  # most steps teach nothing
        if known is None:
            plain_s, prior = self._plain_and_prior(bucket, num_decoding)
            curve = self._drafted_curve(bucket)
            known = [plain_s, *(plain_s * (1.0 + curve.value(number, prior)) for number in numbers)]
            self._predicted[bucket, num_decoding, numbers] = known
        return known

    def _plain_and_prior(self, bucket: LoadBucket, num_decoding: int) -> tuple[float, Prior]:
        """Seconds of a plain step, and by which share of them drafts make it longer as far as none was measured."""
        plain = self._plain_curve(bucket)
        plain_s = plain.value(num_decoding)
        if not self.most_foreseen:
            slope = (plain.value(num_decoding + 1) - plain_s) / plain_s
            return plain_s, lambda num_drafts: slope * num_drafts
        return plain_s, lambda num_drafts: plain.value(num_decoding + num_drafts) / plain_s - 1.0

    def turned_down_seconds(self, bucket: LoadBucket, num_decoding: int) -> float:
        """Predicted seconds of a step without drafts for which some were proposed: what is in the caches is theirs."""
        return self._plain_curve(bucket).value(num_decoding) * (1.0 + self._drafted_curve(bucket).turned_down)

    def record_turned_down(self, bucket: LoadBucket, num_decoding: int, num_other_tokens: int, seconds: float) -> None:
        """Take in a step without drafts for which some were proposed."""
        plain = self._plain_curve(bucket)
        if plain.is_measured:
            plain_s = self.plain_seconds(bucket, num_decoding, num_other_tokens)
            self._drafted_curve(bucket).observe_turned_down(seconds / plain_s - 1.0)

    def most_tried(self, bucket: LoadBucket) -> int:
        """Drafts up to which a step of this load was measured, or one that is like it; 0 = none was."""
        return self._drafted_curve(bucket).most_measured

    def is_tried(self, bucket: LoadBucket, num_drafts: int) -> bool:
        """Whether a step of about so many drafts was measured."""
        return self._drafted_curve(bucket).is_measured(num_drafts)

    def least_seconds(self, bucket: LoadBucket, num_decoding: int, numbers: Sequence[int]) -> list[float | None]:
        """As far as is known, a step with each of these numbers may take no longer than that; None = it was measured,
        or no larger number was: then what is predicted is all that is known.
        """
        plain_s = self._plain_curve(bucket).value(num_decoding)
        shares = map(self._drafted_curve(bucket).least, numbers)
        return [None if share is None else plain_s * (1.0 + share) for share in shares]

    def hoped_seconds(
        self, bucket: LoadBucket, num_decoding: int, fewer: int, numbers: Sequence[int]
    ) -> list[float | None]:
        """What a step with each of these numbers of drafts may take, if each costs what each of `fewer` does; None = as
        of `DraftsCurve.hoped`.
        """
        plain_s, curve = self._plain_curve(bucket).value(num_decoding), self._drafted_curve(bucket)
        shares = [curve.hoped(number, fewer) for number in numbers]
        return [None if share is None else plain_s * (1.0 + share) for share in shares]

    def is_known(self, bucket: LoadBucket, num_drafts: int) -> bool:
        """Whether steps of about so many drafts, at least 1, were measured often."""
        return self._drafted_curve(bucket).is_known(num_drafts)

    def record(
        self, bucket: LoadBucket, num_decoding: int, num_other_tokens: int, num_drafts: int, seconds: float
    ) -> None:
        """Take in a step that was measured, without the proposer's time."""
        self._predicted.clear()
        plain = self._plain_curve(bucket)
        prompts_s = num_other_tokens * self._prompt_token_s
        if plain.is_measured:
            self._note_prediction(bucket, num_decoding, num_drafts, prompts_s, seconds)
        if num_drafts and plain.is_measured:
            if plain.value(num_decoding) > seconds - prompts_s > 0.0:  # without drafts it would have taken no longer
                plain.observe(num_decoding, seconds - prompts_s)
            plain_s, prior = self._plain_and_prior(bucket, num_decoding)
            self._drafted_curve(bucket).observe(num_drafts, (seconds - prompts_s) / plain_s - 1.0, prior)
        elif num_drafts:
            return
        elif num_other_tokens and plain.is_measured:
            self._record_prompts(max(0.0, seconds - plain.value(num_decoding)) / num_other_tokens)
        else:  # until one without prompts was measured, their tokens cost what others do
            plain.observe(num_decoding + num_other_tokens, seconds)

    def record_plain(self, bucket: LoadBucket, num_decoding: int, num_steps: int, step_s: float) -> None:
        """Take in plain steps without prompts: the mean of their seconds."""
        self._predicted.clear()
        self._plain_curve(bucket).observe(num_decoding, step_s, num_steps)

    def _note_prediction(
        self, bucket: LoadBucket, num_decoding: int, num_drafts: int, prompts_s: float, seconds: float
    ) -> None:
        plain_s, prior = self._plain_and_prior(bucket, num_decoding)
        share = self._drafted_curve(bucket).value(num_drafts, prior) if num_drafts else 0.0
        predicted_s = prompts_s + plain_s * (1.0 + share)
        ratio = min(max(seconds / predicted_s, LEAST_RATIO), MOST_RATIO)
        self.prediction_ratio += NEWEST_SHARE * (ratio - self.prediction_ratio)

    def _record_prompts(self, token_s: float) -> None:
        self._num_prompts += 1
        self._prompt_token_s += max(1 / self._num_prompts, NEWEST_SHARE) * (token_s - self._prompt_token_s)

    def _plain_curve(self, bucket: LoadBucket) -> LearnedCurve:
        curve = self._plain.get(bucket.context_class)
        if curve is None:
            curve = self._make_plain(bucket.context_class)
            self._plain[bucket.context_class] = curve
        return curve

    def _make_plain(self, context_class: int) -> LearnedCurve:
        """The curve of contexts that were not seen yet begins as that of the nearest ones."""
        if self._plain:
            return self._plain[min(self._plain, key=lambda known: abs(known - context_class))].successor()
        return LearnedCurve(self._knots, self._shape)

    def _drafted_curve(self, bucket: LoadBucket) -> DraftsCurve:
        curve = self._drafted.get(bucket)
        if curve is None:
            newest = self._newest_drafted
            curve = DraftsCurve() if newest is None else newest.successor()
            self._drafted[bucket] = curve
        self._newest_drafted = curve
        return curve
