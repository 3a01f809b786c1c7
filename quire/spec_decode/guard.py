"""DraftGuard: keeps steps with drafts from being slower than steps without, whatever proposers and estimates say.

Called by the draft controller. Owns, for each class of load, the measured progress of both kinds of steps. At least one
step in CONTROL_INTERVAL of a class is plain; where speculation is slower than those, or has lost MOST_DRAWDOWN_STEPS
since it last gained, the class is closed. It is tried again

- on evidence, if drafts that were only looked at (`draft_watch`) promise a gain: after 1, 4, 16, ... seconds, counted
  by trials on such promises that lost (less where steps are short); after 4 at most if the gain is large;
- without, since costs may have changed: after 1, 2, 4, ... MOST_CLOSED_S, and when all is paid.

Trials that are lost are paid for: their loss, and what capturing their steps took, is a debt, of which each second of
steps pays PAID_SHARE. While there is one, nothing is tried without evidence, in any class. So whatever happens, at most
that share of the time, a first trial, those that were promised to gain and a step in CONTROL_INTERVAL of what is gained
are lost.

Time is that of the steps themselves: seconds in which nothing runs do not count. So what is decided follows from what
was measured alone. Progress is counted in the seconds that plain steps would have needed for the same tokens, so
steps of a few rows more or less compare.

Source: Wu, Shariff, Lattimore, Szepesvari 2016, Conservative Bandits (a budget for exploration beside a baseline).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import IntEnum

from quire.spec_decode.load import LoadBucket

# Of so many steps one is plain where drafts at least double the speed. Where they gain less, plain steps cost less and
# are more frequent in proportion, up to one of LEAST_CONTROL_INTERVAL: on a machine whose speed changes drafts seem
# better or worse than they are until plain steps are measured again.
CONTROL_INTERVAL, LEAST_CONTROL_INTERVAL = 64, 6
# Plain steps come several in a row, of which the first are not measured: what proposers and steps with drafts do drives
# out of the caches what a plain step needs, and what they gave is handed out in the time of the next step. So these
# alone take longer than plain decoding does; and so do the first steps of a load, behind prompts.
CONTROL_RUN, NUM_COLD = 6, 2
# Of a class that is new: plain steps before the first trial; the control arm comes more often until there are some.
FIRST_PLAIN_STEPS = 2
FIRST_INTERVAL, FIRST_RUN, NUM_EARLY_CONTROLS = 8, NUM_COLD + 1, 4
# What closes a class: after MIN_STEPS, or at a loss of MIN_LOST_STEPS, a mean loss of CERTAINTY times its standard
# error; or a loss of MOST_LOST_STEPS. Of a small model these are less than a machine is away now and then, so nothing
# is concluded from a smaller loss in seconds.
MIN_STEPS, MIN_LOST_STEPS, CERTAINTY, MOST_LOST_STEPS, MIN_LOST_S = 16, 1.0, 1.5, 4.0, 0.006
# Plain steps, or seconds, lost since drafts last gained that close a class too, however much they gained before.
MOST_DRAWDOWN_STEPS, MOST_DRAWDOWN_S = 8.0, 0.02
# Or, if it is more, so much of what was gained, at most so many seconds: one slow moment of the machine is to close
# nothing that gains.
DRAWDOWN_SHARE, MOST_DRAWDOWN_OF_GAIN_S = 0.1, 0.1
# Steps after which a class that is still open counts as proven: the next closing is a short one again.
PROVEN_STEPS = 128
# Steps of each kind that estimates remember; a step counts for no more than so many times what is usual (of drafts that
# gain: what plain steps take), or, if it is the first, what a plain one takes.
SPECULATED_KEPT, PLAIN_KEPT = 1 - 1 / 64, 1 - 1 / 16
MOST_TIMES_USUAL, MOST_TIMES_PLAIN = 3.0, 10.0
# The first closing: these seconds, or so many plain steps if these are shorter. Each is twice as long as the last.
CLOSED_S, CLOSED_STEPS, MOST_CLOSED_S = 1.0, 128, 64.0
PAID_SHARE = 0.005


class Arm(IntEnum):
    """What a step is, as far as the guard is concerned."""

    CLOSED = 0
    CONTROL = 1
    OPEN = 2


class Promise(IntEnum):
    """What drafts of a closed class that were only looked at would gain."""

    NONE = 0
    SOME = 1
    STRONG = 2


class Progress:
    """How fast steps of one kind are: predicted plain seconds of what they did, over the seconds that they took."""

    def __init__(self, kept_share: float) -> None:
        self._kept_share = kept_share
        self.reset()

    def reset(self) -> None:
        """Forget what was measured."""
        self._plain_s = 0.0
        self._seconds = 0.0
        self.num_steps = 0

    def record_many(self, num_steps: int, plain_s: float, seconds: float) -> None:
        """Take in steps of one kind: the mean of each figure."""
        kept = self._kept_share**num_steps
        weight = (1.0 - kept) / (1.0 - self._kept_share)
        self._plain_s = kept * self._plain_s + weight * plain_s
        self._seconds = kept * self._seconds + weight * seconds
        self.num_steps += num_steps

    def record(self, plain_s: float, seconds: float) -> float:
        """Take in a step: predicted seconds of plain steps that do the same, and its own; the seconds that counted."""
        most = MOST_TIMES_USUAL if self.num_steps else MOST_TIMES_PLAIN
        # Not of what gainful steps take: where drafts have become wrong, a step takes a plain one's time, at least.
        seconds = min(seconds, most * plain_s / min(self.speed, 1.0))
        self._plain_s = self._kept_share * self._plain_s + plain_s
        self._seconds = self._kept_share * self._seconds + seconds
        self.num_steps += 1
        return seconds

    @property
    def speed(self) -> float:
        """1 = as predicted for plain steps; also where nothing was measured."""
        return self._plain_s / self._seconds if self._seconds else 1.0


@dataclass(slots=True)
class GuardedBucket:
    """One class of load.

    Attributes:
        is_closed: nothing is proposed before `closed_until_s`, on the guard's clock, and until a trial is afforded; or
            before `promised_until_s`, if a gain is promised, `strong_until_s` if it is a large one.
        is_promised: it was opened on a promise.
        num_closings: since it was last proven; each is twice as long as the one before.
        num_broken: closings of those that were promises.
        since_control: steps with drafts since the last plain ones.
        num_controls: plain steps that are left of a row of them.
        num_cold: next plain steps that are not measured, as they follow steps of another kind.
        lost_s: seconds lost since it was opened; negative = gained.
        squares: sum of the squares of each step's loss since then.
        drawdown_s: seconds lost since the time when least was.
        captured_s: seconds that capturing its steps took since it was opened.
    """

    plain: Progress = field(default_factory=lambda: Progress(PLAIN_KEPT))
    speculated: Progress = field(default_factory=lambda: Progress(SPECULATED_KEPT))
    is_closed: bool = True
    closed_until_s: float = 0.0
    promised_until_s: float = 0.0
    strong_until_s: float = 0.0
    is_promised: bool = False
    num_closings: int = 0
    num_broken: int = 0
    since_control: int = 0
    num_controls: int = 0
    num_cold: int = NUM_COLD
    lost_s: float = 0.0
    squares: float = 0.0
    drawdown_s: float = 0.0
    captured_s: float = 0.0

    @property
    def ratio(self) -> float:
        """Tokens per second with drafts over those without; 1.0 where nothing was measured."""
        return self.speculated.speed / self.plain.speed if self.speculated.num_steps else 1.0

    @property
    def control_interval(self) -> int:
        """Steps with drafts between two rows of plain ones."""
        gain = min(self.ratio - 1.0, 1.0)
        return round(CONTROL_RUN * (max(CONTROL_INTERVAL * gain, LEAST_CONTROL_INTERVAL) - 1.0))


class DraftGuard:
    """Which steps may have drafts.

    Attributes:
        busy_s: seconds of all steps so far.
        debt_s: seconds that trials lost and that are not paid for yet.
        num_closings: of all classes, in total.
        buckets: by class.
    """

    def __init__(self) -> None:
        self.busy_s = 0.0
        self.debt_s = 0.0
        self.num_closings = 0
        self.buckets: dict[LoadBucket, GuardedBucket] = {}
        self._newest: GuardedBucket | None = None

    def next_arm(self, bucket: LoadBucket, *, promise: Promise, may_try: bool) -> Arm:
        """What the next step of this class is to be.

        Args:
            promise: what drafts that were looked at would have gained.
            may_try: it may be tried without a promise, when that is due.
        """
        guarded = self._newest = self.buckets.get(bucket) or self._enter(bucket)
        if guarded.is_closed:
            is_due = may_try and guarded.closed_until_s <= self.busy_s and self.debt_s <= 0.0
            until_s = guarded.strong_until_s if promise is Promise.STRONG else guarded.promised_until_s
            is_promised = promise is not Promise.NONE and until_s <= self.busy_s
            if not is_due and not is_promised:
                return Arm.CLOSED
            if guarded.plain.num_steps < FIRST_PLAIN_STEPS:
                return Arm.CONTROL
            self._open(guarded, is_promised)
        if guarded.num_controls > 0:
            guarded.num_controls -= 1
            return Arm.CONTROL
        is_new = guarded.plain.num_steps < FIRST_PLAIN_STEPS + NUM_EARLY_CONTROLS
        if guarded.since_control < (FIRST_INTERVAL if is_new else guarded.control_interval):
            return Arm.OPEN
        guarded.num_controls = (FIRST_RUN if is_new else CONTROL_RUN) - 1
        guarded.since_control = 0
        return Arm.CONTROL

    def may_spend(self) -> bool:
        """Whether a step may be tried that is expected to lose."""
        return self.debt_s <= 0.0

    def may_trust(self, bucket: LoadBucket) -> bool:
        """Whether the class would be opened on a promise, be it a large one."""
        guarded = self.buckets.get(bucket)
        return guarded is None or guarded.strong_until_s <= self.busy_s

    def pass_time(self, seconds: float) -> None:
        """Steps took so long; closed classes come nearer to their next trial."""
        self.busy_s += seconds
        self.debt_s = max(0.0, self.debt_s - PAID_SHARE * seconds)

    def plain_share(self, bucket: LoadBucket, plain_s: float, seconds: float, num_drafts: int) -> float:
        """What a plain step would have taken in place of one that was recorded, over what is predicted.

        Without drafts it is what it took; with them no more than that. What plain steps took a while ago would make
        drafts seem to gain on a machine that has become faster since.
        """
        guarded = self.buckets.get(bucket)
        share = seconds / plain_s * (1.0 if guarded is None else guarded.plain.speed)
        return min(1.0, share) if num_drafts else share

    def record_skipped(self, bucket: LoadBucket, num_steps: int, plain_s: float, seconds: float) -> None:
        """Plain steps of a class: predicted and measured seconds of one, on an average. Time is passed apart."""
        guarded = self.buckets.get(bucket) or self._enter(bucket)
        guarded.plain.record_many(num_steps, plain_s, seconds)

    def note_look(self, bucket: LoadBucket) -> None:
        """In the plain step that is recorded next, drafts were looked at."""
        guarded = self.buckets.get(bucket) or self._enter(bucket)
        guarded.num_cold = NUM_COLD

    def passes(self, bucket: LoadBucket, seconds: float) -> bool:
        """Whether a plain step of this class, that took so long, follows steps of another kind and is not measured."""
        guarded = self.buckets.get(bucket)
        if guarded is None or not guarded.num_cold:
            return False
        guarded.num_cold -= 1
        self.pass_time(seconds)
        return True

    def record(self, bucket: LoadBucket, is_open: bool, plain_s: float, seconds: float, is_probe: bool) -> None:
        """Take in a step.

        Args:
            is_open: drafts were asked for, whether or not there were any.
            plain_s: predicted seconds of plain steps that do what it did.
            seconds: that it took, the proposer's included.
            is_probe: it was expected to lose.
        """
        self.pass_time(seconds)
        guarded = self.buckets.get(bucket) or self._enter(bucket)  # a step without room is plain, and not asked about
        if not is_open:
            guarded.plain.record(plain_s, seconds)
            return
        guarded.since_control += 1
        guarded.num_cold = NUM_COLD
        lost_s = guarded.speculated.record(plain_s, seconds) - plain_s / guarded.plain.speed
        guarded.lost_s += lost_s
        guarded.squares += lost_s * lost_s
        guarded.drawdown_s = max(0.0, guarded.drawdown_s + lost_s)
        if is_probe:
            self.debt_s += max(0.0, lost_s)
        self._judge(guarded, plain_s)

    def record_capture(self, bucket: LoadBucket, plain_s: float, seconds: float) -> None:
        """A step with drafts was captured: seconds of a plain one, and that it took. It says nothing of later ones."""
        self.pass_time(seconds)
        guarded = self.buckets.get(bucket) or self._enter(bucket)
        guarded.captured_s += max(0.0, seconds - plain_s)
        guarded.num_cold = NUM_COLD

    def _judge(self, guarded: GuardedBucket, plain_s: float) -> None:
        num_steps, lost_s = guarded.speculated.num_steps, guarded.lost_s
        has_evidence = num_steps >= MIN_STEPS or lost_s > max(MIN_LOST_STEPS * plain_s, MIN_LOST_S)
        variance = max(0.0, guarded.squares - lost_s * lost_s / num_steps)  # times the number of steps
        is_slower = has_evidence and lost_s > CERTAINTY * math.sqrt(variance)
        has_lost = lost_s > max(MOST_LOST_STEPS * plain_s, MIN_LOST_S)
        gained_s = guarded.drawdown_s - lost_s  # when least was lost
        of_gain_s = min(DRAWDOWN_SHARE * gained_s, MOST_DRAWDOWN_OF_GAIN_S)
        is_falling = guarded.drawdown_s > max(MOST_DRAWDOWN_STEPS * plain_s, MOST_DRAWDOWN_S, of_gain_s)
        if is_slower or has_lost or is_falling:
            self._close(guarded, min(CLOSED_S, CLOSED_STEPS * plain_s))
        elif num_steps == PROVEN_STEPS:
            guarded.num_closings = guarded.num_broken = 0

    def _open(self, guarded: GuardedBucket, is_promised: bool) -> None:
        guarded.is_closed, guarded.is_promised = False, is_promised
        guarded.lost_s = guarded.squares = guarded.drawdown_s = guarded.captured_s = 0.0
        guarded.speculated.reset()
        guarded.since_control = guarded.num_controls = 0

    def _close(self, guarded: GuardedBucket, first_s: float) -> None:
        guarded.is_closed = True
        guarded.closed_until_s = self.busy_s + min(first_s * 2.0**guarded.num_closings, MOST_CLOSED_S)
        guarded.promised_until_s = self.busy_s + min(first_s * 4.0**guarded.num_broken, MOST_CLOSED_S)
        guarded.strong_until_s = min(guarded.promised_until_s, self.busy_s + 4.0 * first_s)
        guarded.num_closings += 1
        guarded.num_broken += guarded.is_promised
        self.num_closings += 1
        self.debt_s += max(0.0, guarded.lost_s + guarded.captured_s)

    def _enter(self, bucket: LoadBucket) -> GuardedBucket:
        """A class that is new takes over from the last one whether it is closed, and for how long."""
        guarded = GuardedBucket()
        newest = self._newest
        if newest is not None and newest.is_closed:
            guarded.closed_until_s, guarded.num_closings = newest.closed_until_s, newest.num_closings
            guarded.promised_until_s, guarded.num_broken = newest.promised_until_s, newest.num_broken
            guarded.strong_until_s = newest.strong_until_s
        self.buckets[bucket] = guarded
        return guarded
