"""When a model on the worker is asked for drafts."""

from __future__ import annotations

import numpy as np

from quire.core.drafts import DraftRows
from quire.core.scheduler_output import SchedulerOutput
from quire.executor.drafting import ModelProposer


def step(*, is_prefill: bool) -> SchedulerOutput:
    """Row 0 computes its prompt of three tokens, or its newest token."""
    of_one, none = np.ones(1, dtype=np.int32), np.zeros(0, dtype=np.int32)
    return SchedulerOutput(
        step=0, freed_rows=none, new_reqs=(), new_blocks=(), rows=0 * of_one,
        num_scheduled_tokens=3 * of_one if is_prefill else of_one, num_computed_tokens=0 * of_one,
        is_prefill=np.array([is_prefill]), is_sampling=np.array([True]), total_num_scheduled_tokens=1,
    )  # fmt: skip


def propose(proposer: ModelProposer) -> None:
    """The controller has the step that is planned drafted for."""
    of_one = np.ones(1, dtype=np.int32)
    proposer.propose(DraftRows(np.zeros(1, dtype=np.intp), of_one, of_one, of_one, np.zeros((1, 8), dtype=np.int32)))


def test_prompts_are_drafted_behind_until_steps_are_planned_without_drafts_and_from_the_next_drafts_on():
    proposer = ModelProposer("draft_model", 4)
    assert proposer.request(step(is_prefill=True)) is not None
    assert proposer.request(step(is_prefill=False)) is None  # nothing was proposed for it
    assert proposer.request(step(is_prefill=True)) is None
    propose(proposer)
    assert proposer.request(step(is_prefill=False)) is not None
    assert proposer.request(step(is_prefill=True)) is not None
