"""DraftWatch: what drafts would have come to in a class of load that is closed, from drafts that were only looked at.

Called by the draft controller. Now and then a few rows are drafted for in a plain step; when their next tokens are
known, these say how many drafts would have stood, and the cost table what verifying them would have taken. So a text
whose drafts have become good is noticed without a trial, and one whose drafts are bad needs none.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from quire.spec_decode.guard import Promise

# What looking takes of the time, at most: after the first look, which may have found nothing in the caches; until it is
# known what drafts come to, and while they come to something; and where they are bad. It is about twice as much: steps
# beside a look find less in the caches.
FIRST_SHARE, WATCHED_SHARE, HOPELESS_SHARE = 0.012, 0.004, 0.002
# What a look takes besides the proposer: to be asked about three or four steps instead of none, and to compare.
PLANNING_S = 0.0004
# Steps between two looks, of any class.
MIN_INTERVAL, MAX_INTERVAL = 16, 1024
# So many looks make an estimate, of which the newest counts for NEWEST_SHARE; until then, and where it is MIN_PROMISE,
# they come so many times as often, if a look takes less than so many steps. So they do behind one that alone was a
# STRONG_PROMISE, where those before it were none: a text that has begun to repeat is found by the next ones, and a
# lucky look costs one more.
ENOUGH, NEWEST_SHARE, HURRY, SHORT_LOOK, STRONG_SHORT_LOOK = 3, 0.25, 8, 2.0, 8.0
# One look counts for no more than this.
MOST_GAIN = 2.5
# What is a promise, and what a strong one; there must be a gain at the estimate less so many standard errors, too: of a
# text whose drafts are nearly all wrong three looks promise one now and then. So many looks come before a trial without
# a promise where an estimate is under BEARABLE, or made of costs that were measured.
MIN_PROMISE, STRONG_PROMISE, CERTAINTY, BEARABLE, ENOUGH_WITHOUT = 1.15, 1.5, 1.5, 0.9, 24


@dataclass(slots=True)
class DraftWatch:
    """One class of load.

    Attributes:
        num_looks: that the estimate is made of.
        gained, squares, seen: sums of the gains of late looks, of their squares, and of their number.
        newest_gain: of the newest look.
        look_s: what a look takes, with planning it.
        rest_s: seconds after a look, of this class or another one, before the next one at drafts of this class.
    """

    num_looks: int = 0
    gained: float = 0.0
    squares: float = 0.0
    seen: float = 0.0
    newest_gain: float = 0.0
    look_s: float = PLANNING_S
    rest_s: float = 0.0
    _newest_s: float = 0.0

    @property
    def ratio(self) -> float:
        """Estimated tokens per second with drafts over those without."""
        return self.gained / self.seen if self.seen else 1.0

    @property
    def promise(self) -> Promise:
        """Whether drafts would gain."""
        if self.num_looks < ENOUGH or self.ratio < MIN_PROMISE or self.ratio - CERTAINTY * self._error < 1.0:
            return Promise.NONE
        return Promise.STRONG if self.ratio >= STRONG_PROMISE else Promise.SOME

    @property
    def _error(self) -> float:
        """Standard error of `ratio`."""
        if self.seen <= 1.0:
            return math.inf
        return math.sqrt(max(0.0, self.squares / self.seen - self.ratio**2) / (self.seen - 1.0))

    def may_try(self, *, knows_costs: bool) -> bool:
        """Whether there were enough looks for drafts to be tried without a promise, as estimates may be wrong.

        Args:
            knows_costs: what drafts cost was measured at start; otherwise a trial is what tells it.
        """
        is_open = self.ratio >= BEARABLE and not knows_costs
        return self.num_looks >= (ENOUGH if is_open else ENOUGH_WITHOUT)

    def observe(self, plain_s: float, seconds: float) -> None:
        """Drafts would have given in `seconds` what plain steps give in `plain_s`."""
        self.num_looks += 1
        kept = 1.0 - NEWEST_SHARE
        self.newest_gain = gain = min(plain_s / seconds, MOST_GAIN)  # each look counts the same
        self.gained, self.seen = kept * self.gained + gain, kept * self.seen + 1.0
        self.squares = kept * self.squares + gain * gain

    def note_time(self, proposing_s: float) -> None:
        """A look took so long; of the last two the shorter one counts, as a machine may be away for a while."""
        newest_s = PLANNING_S + proposing_s
        self.look_s = min(newest_s, self._newest_s or newest_s)
        self._newest_s = newest_s

    def disappoint(self, ratio: float) -> None:
        """A trial has shown this ratio: what was seen before is no promise any more."""
        self.num_looks, self.gained, self.seen, self.newest_gain = 0, min(ratio, 1.0), 1.0, 0.0
        self.squares = self.gained * self.gained

    def pause_s(self, step_s: float, *, may_hurry: bool) -> float:
        """Seconds of plain steps, of `step_s` each, until the next look."""
        share = WATCHED_SHARE if self.num_looks else FIRST_SHARE
        if self.num_looks >= ENOUGH and self.ratio < BEARABLE:
            share = HOPELESS_SHARE
        pause_s = min(max(self.look_s / share, MIN_INTERVAL * step_s), MAX_INTERVAL * step_s)
        is_few = self.num_looks < ENOUGH
        is_strong = not is_few and self.newest_gain >= STRONG_PROMISE and self.promise is Promise.NONE
        is_wanted = is_few or is_strong or self.ratio >= MIN_PROMISE
        if may_hurry and is_wanted and self.look_s < (STRONG_SHORT_LOOK if is_strong else SHORT_LOOK) * step_s:
            pause_s /= HURRY
        return pause_s
