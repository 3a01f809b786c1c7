"""SpeculationController: how many drafts each step verifies, so that speculation is never slower than plain decoding.

Called by the scheduler's drafts: before a step is drafted for, when there are proposals, and when the step was taken
in. Owns a cost table of this machine, what became of earlier drafts, and the guard. A step of a plan:

    most_tokens(rows, prompt tokens, longest)   the guard: closed, a plain step for comparison, or open
    choose(load, proposals)                     worth of the drafts, cost of the step -> the best budget, perhaps 0
    record(step)                                seconds and accepted drafts: all three learn from them

Of a class that is closed only some steps are asked about; in these drafts are looked at and not verified:

    num_watched()                               drafts of a few rows to look at
    observe(load, proposals, accepted)          later: those that would have stood
    num_skipped()                               plain steps until it is asked again

What is decided follows from what was recorded alone; no clock is read here and nothing is drawn.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence

import numpy as np

from quire.core.drafts import Proposals, SpeculatedStep, StepLoad
from quire.core.speculation_stats import BucketStats, ControllerStats, Reason
from quire.spec_decode.cost_table import CostTable, MeasuredStep
from quire.spec_decode.draft_budget import (
    MIN_GAIN,
    DraftBudget,
    best_budget,
    common_budgets,
    counts_of,
    rank_drafts,
    rank_few,
    worths_of,
    worths_of_few,
)
from quire.spec_decode.draft_watch import MAX_INTERVAL, DraftWatch
from quire.spec_decode.guard import Arm, DraftGuard
from quire.spec_decode.load import LoadBucket, bucket_of
from quire.spec_decode.survival import FEW, Survival

# Most drafts of a row that are asked for at first, and at least; as many again where most of them stood.
FIRST_DEPTH = 8
# Most drafts of a row that are looked at: it takes as many steps until all of them are known to be right or wrong.
LOOK_DEPTH = 4
# Drafts of a step whose costs are not known at all: at most so many, or one of each row, then twice as many as before.
FIRST_TRIED = 4
# Steps in which no draft was worth it after which a few are verified anyway, as what was learned may be out of date.
PROBE_INTERVAL = 32
# Of the rows, the part of which one draft is then verified.
PROBED_SHARE = 8
# Of so many steps with drafts one may have a draft less or more than is best, to learn what that costs.
VARY_INTERVAL = 16
# Of so many such steps one tries again what was tried before, as that may have been a bad moment.
KNOWN_INTERVAL = 4
# Of steps with drafts whose costs are known one of so many is measured.
MEASURED_INTERVAL = 4
# So many steps in a row, of a class that is closed, say what plain steps take.
MIN_SKIPPED = 8
# Weight of the newest of many of a proposer's durations; one counts for so many times what is usual at most.
PROPOSING_SHARE = 1 / 16
MOST_TIMES_PROPOSING = 4.0


class SpeculationController:
    """Implements `DraftController`.

    Args:
        most_drafts: most drafts of a row in a step, at least 1.
        clock: as `DraftController.clock`.
    """

    def __init__(self, most_drafts: int = 32, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self._most_drafts = most_drafts
        self._first_depth, self._look_depth = min(FIRST_DEPTH, most_drafts), min(LOOK_DEPTH, most_drafts)
        self._costs = CostTable()
        self._survival = Survival()
        self._guard = DraftGuard()
        self._watches: dict[LoadBucket, DraftWatch] = {}
        self._watch = DraftWatch()
        self._depths: dict[LoadBucket, int] = {}
        self._proposing: dict[LoadBucket, tuple[int, float]] = {}
        self._newest_proposing_s = 0.0
        self._newest_number = 0
        self._asked = self._num_watched = self._num_to_skip = 0
        self._skipped_load = bucket_of(1, 0, 0), 1  # class and rows of the steps that are not asked about
        self._newest_look_s = -math.inf
        self._num_gainless = 0
        self._num_drafted = 0
        self._num_proposed = 0
        self._total_proposing_s = 0.0
        self._is_probe = False
        self._reasons = dict.fromkeys(Reason, 0)

    def begin(self, measured: Sequence[MeasuredStep]) -> None:
        """Start from what steps took before there were requests; real steps correct it."""
        self._costs.begin(measured)
        drafting = [step.drafting_s for step in measured if step.num_decoding == 1 and step.drafting_s]
        self._newest_proposing_s = min(drafting, default=0.0)

    def most_tokens(self, num_rows: int, num_other_tokens: int, max_seq_len: int) -> int:
        """Most drafts of a row that are worth proposing for the step that is planned; 0 = it is to be plain."""
        bucket = bucket_of(num_rows, num_other_tokens, max_seq_len)
        self._skipped_load = bucket, num_rows
        self._watch = watch = self._watches.get(bucket) or self._enter(bucket)
        may_try = watch.may_try(knows_costs=self._costs.most_foreseen > 0)
        arm = self._guard.next_arm(bucket, promise=watch.promise, may_try=may_try)
        self._num_watched = self._num_to_skip = 0
        if arm is Arm.OPEN:
            self._asked = self._depths.get(bucket, self._first_depth)
            return self._asked
        if arm is Arm.CONTROL:
            self._reasons[Reason.CONTROL] += 1
            return 0
        self._reasons[Reason.CLOSED] += 1
        if self._costs.is_measured(bucket):
            step_s = self._costs.plain_seconds(bucket, num_rows, num_other_tokens)
            self._pause(watch, step_s)
        return 0

    def _pause(self, watch: DraftWatch, step_s: float) -> None:
        """A step of a class that is closed: whether drafts are looked at, and when it is asked about next."""
        busy_s = self._guard.busy_s
        # From the newest look on, of whatever class, and not for as long as one of longer steps has to wait.
        left_s = self._newest_look_s + min(watch.rest_s, MAX_INTERVAL * step_s) - busy_s
        if left_s <= 0.0:
            self._num_watched = self._look_depth
            self._newest_look_s = busy_s
            watch.rest_s = watch.pause_s(step_s, may_hurry=False)  # anew when it was recorded
            self._num_to_skip = self._look_depth - 1  # then it is known what came
        else:
            self._num_to_skip = min(int(left_s / step_s) + 1, MAX_INTERVAL)

    def _enter(self, bucket: LoadBucket) -> DraftWatch:
        """A class that is new begins with what is known of the one before it."""
        self._depths[bucket] = self._first_depth
        watch = self._watches[bucket] = dataclasses.replace(self._watch)
        return watch

    def num_watched(self) -> int:
        """Of a class that is closed: drafts of a row to look at."""
        return self._num_watched

    def num_skipped(self) -> int:
        """Of a class that is closed, nearly all steps: plain steps are to cost nothing."""
        return self._num_to_skip

    def record_skipped(self, num_steps: int, seconds: float) -> None:
        """As `DraftController`. These say what plain steps take by now: those near a look or drafts take longer."""
        self._reasons[Reason.CLOSED] += num_steps
        self._guard.pass_time(seconds)
        bucket, num_rows = self._skipped_load
        if num_steps >= MIN_SKIPPED and not bucket.has_prompts:
            step_s = seconds / num_steps
            self._costs.record_plain(bucket, num_rows, num_steps, step_s)
            self._guard.record_skipped(bucket, num_steps, self._costs.plain_seconds(bucket, num_rows, 0), step_s)

    def choose(self, load: StepLoad, proposals: Proposals) -> np.ndarray:
        """[n] int32; how many of each row's drafts are verified, the first ones."""
        counts = proposals.counts
        most = min(len(proposals.token_ids), load.num_left)
        if not most:
            return np.zeros(len(counts), dtype=np.int32)
        bucket = bucket_of(load.num_decoding, load.num_other_tokens, load.max_seq_len)
        most = min(most, max(FIRST_TRIED, len(counts), self._costs.most_foreseen, 2 * self._costs.most_tried(bucket)))
        worth, ranked = self._ranked(proposals)
        numbers = common_budgets(load.num_decoding, most)
        seconds = self._seconds(bucket, load.num_decoding, numbers)
        seconds[0] = self._costs.turned_down_seconds(bucket, load.num_decoding) + self._proposing_s(bucket)
        best = best_budget(worth, load.num_decoding, numbers, seconds, self._newest_number)
        if best.num_drafts:
            number = self._vary(bucket, load.num_decoding, worth, best, numbers)
        else:
            number = self._probe(len(counts), numbers)
        self._newest_number = number
        return counts_of(ranked[:number], counts)

    def _ranked(self, proposals: Proposals) -> tuple[np.ndarray | list[float], np.ndarray | list[int]]:
        """What all drafts are worth, the largest first, and which drafts these are."""
        if len(proposals.token_ids) <= FEW:
            few = worths_of_few(self._survival.chances_of_few(proposals), proposals.counts.tolist())
            if len(proposals.counts) == 1:
                return few, list(range(len(few)))
            order = rank_few(few)
            return [few[number] for number in order], order
        worth = worths_of(self._survival.chances(proposals), proposals.counts)
        ranked = rank_drafts(worth)
        return worth[ranked], ranked

    def _seconds(self, bucket: LoadBucket, num_decoding: int, numbers: tuple[int, ...]) -> list[float]:
        """Of a step without drafts, and of steps with each of these numbers, the proposer's included."""
        seconds = self._costs.decode_seconds(bucket, num_decoding, numbers)
        proposing_s = self._proposing_s(bucket)
        return [of_step + proposing_s for of_step in seconds]

    def _proposing_s(self, bucket: LoadBucket) -> float:
        """What proposing takes for a step, as measured in steps with drafts: in a look, after many steps without any,
        it takes several times as long, as nothing of it is in the caches. Where it was not measured it counts for
        nothing, so a trial finds it out.
        """
        known = self._proposing.get(bucket)
        return self._newest_proposing_s if known is None else known[1]

    def _vary(
        self,
        bucket: LoadBucket,
        num_decoding: int,
        worth: np.ndarray | list[float],
        best: DraftBudget,
        numbers: tuple[int, ...],
    ) -> int:
        """Now and then some drafts less or more: what that costs may not be known, or have changed."""
        self._num_gainless = 0
        self._num_drafted += 1
        self._reasons[Reason.DRAFTED] += 1
        if self._num_drafted % VARY_INTERVAL:
            return best.num_drafts
        at, turn = numbers.index(best.num_drafts), self._num_drafted // VARY_INTERVAL
        hoped = self._most_hoped(bucket, num_decoding, worth, best, numbers)
        if hoped:
            return hoped
        near = numbers[max(0, at - 1)], numbers[min(at + 1, len(numbers) - 1)]
        untried = next((number for number in near if not self._costs.is_tried(bucket, number)), best.num_drafts)
        return (
            near[turn // KNOWN_INTERVAL % 2] if untried == best.num_drafts and turn % KNOWN_INTERVAL == 0 else untried
        )

    def _most_hoped(
        self,
        bucket: LoadBucket,
        num_decoding: int,
        worth: np.ndarray | list[float],
        best: DraftBudget,
        numbers: tuple[int, ...],
    ) -> int:
        """Of all numbers, that which would gain most over the best one if it cost as little as may be; 0 = none.

        Fewer drafts than the best may cost no more than still fewer do, more of them no more each. Costs that have
        steps are found so: a number measured below a step hides those before it, and one above it those behind.
        """
        at = numbers.index(best.num_drafts)
        least_s = [
            *self._costs.least_seconds(bucket, num_decoding, numbers[:at]), None,
            *self._costs.hoped_seconds(bucket, num_decoding, best.num_drafts, numbers[at + 1 :]),
        ]  # fmt: skip
        untried = [(number, step_s) for number, step_s in zip(numbers, least_s, strict=True) if step_s is not None]
        if not untried:
            return 0
        proposing_s = self._proposing_s(bucket)
        plain_s = self._costs.turned_down_seconds(bucket, num_decoding) + proposing_s
        seconds = [plain_s, *(step_s + proposing_s for _, step_s in untried)]
        hoped = best_budget(worth, num_decoding, [number for number, _ in untried], seconds)
        return hoped.num_drafts if hoped.gain > MIN_GAIN * best.gain else 0

    def _probe(self, num_rows: int, numbers: tuple[int, ...]) -> int:
        """No draft is worth it; now and then a few all the same."""
        self._num_gainless += 1
        if self._num_gainless < PROBE_INTERVAL or not self._guard.may_spend():
            self._reasons[Reason.NO_GAIN] += 1
            return 0
        self._num_gainless, self._is_probe = 0, True
        self._reasons[Reason.PROBE] += 1
        wanted = 1 + num_rows // PROBED_SHARE
        return next((number for number in numbers if number >= wanted), numbers[-1])

    def observe(self, load: StepLoad, proposals: Proposals, accepted: np.ndarray) -> None:
        """Learn from drafts that were looked at: [n] of each row those that would have stood."""
        bucket = bucket_of(load.num_decoding, load.num_other_tokens, load.max_seq_len)
        watch = self._watches.get(bucket) or self._enter(bucket)
        # What a few rows show holds for all.
        scale = max(1, load.num_decoding // max(1, len(proposals.counts)))
        plain_s, _ = seconds = self._costs.decode_seconds(bucket, load.num_decoding, (1,))
        number, gained = 0, 1.0
        if len(proposals.token_ids):
            worth, ranked = self._ranked(proposals)
            budgets = common_budgets(load.num_decoding, scale * len(proposals.token_ids))
            of_all = np.repeat(worth, scale)
            best = best_budget(of_all, load.num_decoding, budgets, self._seconds(bucket, load.num_decoding, budgets))
            number = best.num_drafts
            kept = counts_of(ranked[: -(-number // scale)], proposals.counts)
            gained = math.exp(scale * np.log1p(np.minimum(kept, accepted)).sum() / load.num_decoding)
            self._survival.record(proposals, proposals.counts, accepted)
        if number:
            seconds = self._costs.decode_seconds(bucket, load.num_decoding, (number,))
        watch.observe(plain_s * gained, seconds[bool(number)] + self._proposing_s(bucket))
        # What was set when the look was recorded did not have its outcome.
        rest_s = watch.pause_s(plain_s, may_hurry=self._guard.may_trust(bucket))
        watch.rest_s = min(watch.rest_s, rest_s)

    def record(self, step: SpeculatedStep) -> None:
        """Learn from a step that was taken in."""
        load, accepted = step.load, step.accepted.tolist()  # lists: sums of few numbers take less than of an array
        num_drafts = sum(step.kept.tolist())
        self._num_proposed += 0 if step.proposals is None else len(step.proposals.token_ids)
        self._total_proposing_s += step.proposing_s
        bucket = bucket_of(load.num_decoding, load.num_other_tokens, load.max_seq_len)
        if step.proposals is None:
            self._record_plain(bucket, step)
            return
        seconds = step.seconds + step.proposing_s
        plain_s = self._costs.plain_seconds(bucket, load.num_decoding, load.num_other_tokens)
        if step.is_capture:
            self._guard.record_capture(bucket, plain_s, seconds)
        else:
            if not num_drafts:
                self._costs.record_turned_down(bucket, load.num_decoding, load.num_other_tokens, step.seconds)
            elif self._is_worth_measuring(bucket, num_drafts):
                self._costs.record(bucket, load.num_decoding, load.num_other_tokens, num_drafts, step.seconds)
            share = self._guard.plain_share(bucket, plain_s, step.seconds, num_drafts)
            plain_s = share * (plain_s + sum(accepted) * self._costs.token_seconds(bucket, load.num_decoding))
            self._guard.record(bucket, True, plain_s, seconds, self._is_probe)
            self._note_proposing(bucket, step.proposing_s)
        self._is_probe = False
        if num_drafts:
            self._survival.record(step.proposals, step.kept, step.accepted)
            self._deepen(bucket, max(accepted))
        elif not len(step.proposals.token_ids):
            self._reasons[Reason.NO_PROPOSALS] += 1
        guarded = self._guard.buckets[bucket]
        if guarded.is_closed:
            self._watches[bucket].disappoint(guarded.ratio)
            self._depths[bucket] = self._first_depth

    def _is_worth_measuring(self, bucket: LoadBucket, num_drafts: int) -> bool:
        """Of steps whose costs are known some are enough."""
        return self._num_drafted % MEASURED_INTERVAL == 0 or not self._costs.is_known(bucket, num_drafts)

    def _record_plain(self, bucket: LoadBucket, step: SpeculatedStep) -> None:
        """A step for which nothing was asked, or in which drafts were looked at."""
        load = step.load
        plain_s = self._costs.plain_seconds(bucket, load.num_decoding, load.num_other_tokens)
        if step.proposing_s:
            self._guard.pass_time(step.proposing_s)
            self._guard.note_look(bucket)
            self._watch.note_time(step.proposing_s)
            self._watch.rest_s = self._watch.pause_s(plain_s, may_hurry=self._guard.may_trust(bucket))
            self._newest_look_s = self._guard.busy_s
        if step.is_capture or self._guard.passes(bucket, step.seconds):
            return
        self._costs.record(bucket, load.num_decoding, load.num_other_tokens, 0, step.seconds)
        plain_s = self._costs.plain_seconds(bucket, load.num_decoding, load.num_other_tokens)
        self._guard.record(bucket, False, plain_s, step.seconds, is_probe=False)

    def _note_proposing(self, bucket: LoadBucket, seconds: float) -> None:
        count, known_s = self._proposing.get(bucket, (0, seconds))
        bounded_s = min(seconds, MOST_TIMES_PROPOSING * known_s)
        known_s += max(PROPOSING_SHARE, 1 / (count + 1)) * (bounded_s - known_s)
        self._proposing[bucket], self._newest_proposing_s = (count + 1, known_s), known_s

    def _deepen(self, bucket: LoadBucket, most_accepted: int) -> None:
        """Ask for twice as many where most of those that were asked for stood, and for fewer bit by bit."""
        depth = self._asked
        if 4 * most_accepted >= 3 * self._asked:
            depth *= 2
        elif 2 * most_accepted < self._asked:
            depth -= 1
        self._depths[bucket] = min(max(depth, self._first_depth), self._most_drafts)

    def stats(self) -> ControllerStats:
        """What was decided since the engine started."""
        buckets = tuple(
            BucketStats(str(bucket), guarded.ratio, guarded.is_closed, guarded.num_closings)
            for bucket, guarded in self._guard.buckets.items()
        )
        return ControllerStats(
            dict(self._reasons), self._costs.prediction_ratio, self._guard.debt_s, self._guard.num_closings,
            self._num_proposed, self._total_proposing_s, buckets,
        )  # fmt: skip
