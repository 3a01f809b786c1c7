"""Step: one step that was scheduled, as a value that goes from hand to hand until it is taken in or abandoned.

Made by `Scheduler.schedule`. Passed to the code that executes, masks, samples, takes in or abandons a step; neither the
scheduler nor the worker keeps it, so several may be in flight. No state: what it holds is as it was when it was made.

    step = scheduler.schedule()                                  # None: nothing can compute
    computed = executor.execute_model(step.output)
    masks = grammars.begin_masks(step.sampling_handles, step.sampling_drafts())
    output = executor.sample_tokens(computed, masks)
    outputs = scheduler.update_from_output(step, output)         # or scheduler.abandon_step(step)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from quire.core.draft_stats import DraftOutcomes
from quire.core.runner_output import ModelRunnerOutput
from quire.core.scheduler_output import DraftTokens, SchedulerOutput
from quire.scheduler.step_plan import StepPlan


@dataclass(frozen=True, slots=True)
class Step:
    """A scheduled step.

    Attributes:
        output: the message to the worker.
        plan: what it was made from.
        handles: [num_reqs] int64; the requests that owned the rows of `output` when it was made.
        swapped_out: handles of the requests whose blocks it copies to the swap space.
        num_first_tokens: of the tokens that it samples, those that end a prompt.
        placements: [num_reqs] int64; `RequestTable.placement` of its rows, where several steps may be in flight.
    """

    output: SchedulerOutput
    plan: StepPlan
    handles: np.ndarray
    swapped_out: tuple[int, ...] = ()
    num_first_tokens: int = 0
    placements: np.ndarray | None = None

    @property
    def rows(self) -> np.ndarray:
        """[num_reqs] intp; the rows of `output`."""
        return self.plan.rows

    @property
    def made_room(self) -> bool:
        """Whether requests were preempted for one that waited."""
        return self.plan.preempting is not None

    def sampling_handles(self) -> np.ndarray:
        """[num_sampling] int64; the requests that get a token, in the order of the batch."""
        handles: np.ndarray = self.handles[self.output.is_sampling]
        return handles

    def sampling_drafts(self) -> DraftTokens | None:
        """The drafts, with counts of the requests that get a token: [num_sampling]."""
        drafts = self.output.drafts
        return None if drafts is None else DraftTokens(drafts.counts[self.output.is_sampling], drafts.token_ids)

    def draft_outcomes(self, output: ModelRunnerOutput) -> DraftOutcomes:
        """What the worker found of the step's drafts; it has some."""
        assert self.output.drafts is not None, "called for steps with drafts"
        counts, handles = self.output.drafts.counts, self.handles
        if len(output.rows) < len(handles):
            counts, handles = counts[self.output.is_sampling], handles[self.output.is_sampling]
        starts = output.sampled_start_loc
        num_accepted = np.zeros_like(counts) if starts is None else np.maximum(starts[1:] - starts[:-1] - 1, 0)
        num_accepted = num_accepted.astype(counts.dtype, copy=False)
        if np.count_nonzero(counts) == len(counts):
            return DraftOutcomes(handles, counts, num_accepted)
        at = np.flatnonzero(counts)
        return DraftOutcomes(handles[at], counts[at], num_accepted[at])

    def counts(self, num_bytes: Callable[[np.ndarray], int]) -> dict[str, Any]:
        """What the step adds to `SchedulerStats`.

        Args:
            num_bytes: of blocks of the cache, all layers together.
        """
        plan, output = self.plan, self.output
        return {
            "num_scheduled_tokens": output.total_num_scheduled_tokens,
            "num_first_tokens": self.num_first_tokens,
            "num_preemptions": plan.num_preemptions,
            "num_swap_preemptions": plan.num_swap_preemptions,
            "swapped_out_bytes": num_bytes(output.swap_outs.source_ids),
            "swapped_in_bytes": num_bytes(output.swap_ins.target_ids),
            "prefix_cache_queries": plan.num_prefix_queries,
            "prefix_cache_hits": plan.num_prefix_hits,
            "external_prefix_cache_queries": plan.num_external_queries,
            "external_prefix_cache_hits": plan.num_external_hits,
        }
