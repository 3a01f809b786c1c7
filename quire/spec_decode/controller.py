"""SpeculationController: how many drafts each step verifies, so that speculation is never slower than plain decoding.

Called by the scheduler's drafts: before a step is drafted for, when there are proposals, and when the step was taken
in. Owns a cost table of this machine, what became of earlier drafts, and the guard. A step of a plan:

    most_tokens(rows, prompt tokens, longest)   the guard: closed, a plain step for comparison, or open
    choose(load, proposals)                     chances of the drafts, cost of the step -> the best budget, perhaps 0
    record(step)                                seconds and accepted drafts: all three learn from them

What is decided follows from what was recorded alone; no clock is read and nothing is drawn.
"""

from __future__ import annotations

import numpy as np

from quire.core.drafts import Proposals, SpeculatedStep, StepLoad
from quire.core.speculation_stats import BucketStats, ControllerStats, Reason
from quire.spec_decode.cost_table import CostTable
from quire.spec_decode.draft_budget import best_budget, counts_of, rank_drafts
from quire.spec_decode.guard import Arm, DraftGuard
from quire.spec_decode.load import LoadBucket, bucket_of
from quire.spec_decode.survival import Survival

# Most drafts of a row that are asked for at first; as many again where all of them were worth verifying.
FIRST_DEPTH = 4
# Steps in which no draft was worth it after which a few are verified anyway, as what was learned may be out of date.
PROBE_INTERVAL = 32
# Of the rows, the part of which one draft is then verified.
PROBED_SHARE = 8
# Of so many steps with drafts one may have a draft less or more than is best, to learn what that costs.
VARY_INTERVAL = 16
# Of a class that is closed, one step of so many is asked about.
CLOSED_INTERVAL = 16
# Weight of the newest of a proposer's durations.
PROPOSING_SHARE = 1 / 16


class SpeculationController:
    """Implements `DraftController`.

    Args:
        most_drafts: most drafts of a row in a step, at least 1.
    """

    def __init__(self, most_drafts: int = 32) -> None:
        self._most_drafts = most_drafts
        self._costs = CostTable()
        self._survival = Survival()
        self._guard = DraftGuard()
        self._depths: dict[LoadBucket, int] = {}
        self._proposing_s: dict[LoadBucket, float] = {}
        self._asked = 0
        self._num_gainless = 0
        self._num_drafted = 0
        self._num_proposed = 0
        self._total_proposing_s = 0.0
        self._is_probe = self._is_closed = False
        self._reasons = dict.fromkeys(Reason, 0)

    def most_tokens(self, num_rows: int, num_other_tokens: int, max_seq_len: int) -> int:
        """Most drafts of a row that are worth proposing for the step that is planned; 0 = it is to be plain."""
        bucket = bucket_of(num_rows, num_other_tokens, max_seq_len)
        arm = self._guard.next_arm(bucket)
        self._is_closed = arm is Arm.CLOSED
        if arm is Arm.OPEN:
            self._asked = self._depths.get(bucket, min(FIRST_DEPTH, self._most_drafts))
            return self._asked
        self._reasons[Reason.CLOSED if arm is Arm.CLOSED else Reason.CONTROL] += 1
        return 0

    def num_skipped(self) -> int:
        """Of a class that is closed, all steps but one in CLOSED_INTERVAL: plain steps are to cost nothing."""
        return CLOSED_INTERVAL - 1 if self._is_closed else 0

    def record_skipped(self, num_steps: int, seconds: float) -> None:
        """As `DraftController`."""
        self._reasons[Reason.CLOSED] += num_steps
        self._guard.pass_time(seconds)

    def choose(self, load: StepLoad, proposals: Proposals) -> np.ndarray:
        """[n] int32; how many of each row's drafts are verified, the first ones."""
        counts = proposals.counts
        most = min(len(proposals.token_ids), load.num_left)
        if not most:
            return np.zeros(len(counts), dtype=np.int32)
        bucket = bucket_of(load.num_decoding, load.num_other_tokens, load.max_seq_len)
        most = min(most, max(FIRST_DEPTH, len(counts), 2 * self._costs.most_tried(bucket)))
        chances = self._survival.chances(proposals)
        ranked = rank_drafts(chances)[:most]
        seconds = self._costs.decode_seconds(bucket, load.num_decoding, most) + self._proposing_s.get(bucket, 0.0)
        best = best_budget(chances[ranked], load.num_decoding, seconds)
        number = self._vary(bucket, best.num_drafts, most) if best.num_drafts else self._probe(len(counts), most)
        kept = counts_of(ranked[:number], counts)
        if best.num_drafts:
            self._deepen(bucket, int(kept.max()))
        return kept

    def _deepen(self, bucket: LoadBucket, longest: int) -> None:
        """Ask for twice as many where the most that were asked for were worth it, and for fewer bit by bit."""
        depth = max(FIRST_DEPTH, 2 * longest if longest >= self._asked else self._asked - 1)
        self._depths[bucket] = min(depth, self._most_drafts)

    def _vary(self, bucket: LoadBucket, best: int, most: int) -> int:
        """Now and then one draft less or more, where it is not known what that costs: costs may have steps."""
        self._num_gainless = 0
        self._num_drafted += 1
        self._reasons[Reason.DRAFTED] += 1
        if self._num_drafted % VARY_INTERVAL:
            return best
        untried = [n for n in (best - 1, best + 1) if 0 < n <= most and not self._costs.is_tried(bucket, n)]
        return untried[0] if untried else best

    def _probe(self, num_rows: int, most: int) -> int:
        """No draft is worth it; now and then a few all the same."""
        self._num_gainless += 1
        if self._num_gainless < PROBE_INTERVAL or not self._guard.may_spend():
            self._reasons[Reason.NO_GAIN] += 1
            return 0
        self._num_gainless, self._is_probe = 0, True
        self._reasons[Reason.PROBE] += 1
        return min(most, 1 + num_rows // PROBED_SHARE)

    def record(self, step: SpeculatedStep) -> None:
        """Learn from a step that was taken in."""
        load, num_drafts = step.load, int(step.kept.sum())
        self._num_proposed += 0 if step.proposals is None else len(step.proposals.token_ids)
        self._total_proposing_s += step.proposing_s
        bucket = bucket_of(load.num_decoding, load.num_other_tokens, load.max_seq_len)
        seconds, is_open = step.seconds + step.proposing_s, step.proposals is not None
        if not is_open and self._guard.passes(bucket, seconds):
            return
        self._costs.record(bucket, load.num_decoding, load.num_other_tokens, num_drafts, step.seconds)
        plain_s = self._costs.plain_seconds(bucket, load.num_decoding, load.num_other_tokens)
        plain_s += int(step.accepted.sum()) * self._costs.token_seconds(bucket, load.num_decoding)
        self._guard.record(bucket, is_open, plain_s, seconds, self._is_probe)
        self._is_probe = False
        if step.proposals is not None:
            known_s = self._proposing_s.get(bucket, step.proposing_s)
            self._proposing_s[bucket] = known_s + PROPOSING_SHARE * (step.proposing_s - known_s)
            if num_drafts:
                self._survival.record(step.proposals, step.kept, step.accepted)
            elif not len(step.proposals.token_ids):
                self._reasons[Reason.NO_PROPOSALS] += 1

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
