"""What drafts came to, per request: in vLLM's form, whatever the lengths of the drafts were."""

from __future__ import annotations

import numpy as np

from quire.core.draft_stats import DraftOutcomes, DraftStats, accepted_by_position, merged_drafts
from quire.core.stats import RequestStateStats, merged_stats


def some(*steps: tuple[int, int], keeps_steps: bool = False) -> DraftStats:
    stats = DraftStats(steps=[] if keeps_steps else None)
    for step in steps:
        stats.add(*step)
    return stats


def test_the_summary_has_the_form_of_vllm() -> None:
    assert some((3, 3), (3, 0), (2, 1), (3, 0)).content(4) == {
        "mean_acceptance_length": 2.0,
        "draft_acceptance_rate": 4 / 11,
        "acceptance_histogram": [2, 1, 0, 1, 0],
        "acceptance_histogram_by_draft_length": {"2": [0, 1, 0], "3": [2, 0, 0, 1]},
        "num_spec_steps": 4,
        "num_accepted_draft_tokens": 4,
        "num_draft_tokens": 11,
        "num_spec_tokens": 4,
    }


def test_a_request_without_drafts_has_zeros() -> None:
    content = DraftStats().content(2)
    assert content["mean_acceptance_length"] == 1.0 and content["draft_acceptance_rate"] == 0.0
    assert content["acceptance_histogram"] == [0, 0, 0] and content["acceptance_histogram_by_draft_length"] == {}
    assert "per_step_accepted" not in content


def test_details_are_the_steps_in_order() -> None:
    content = some((3, 1), (1, 1), keeps_steps=True).content(3)
    assert content["per_step_accepted"] == [1, 1] and content["per_step_drafted"] == [3, 1]


def test_sequences_of_one_request_add_up() -> None:
    one, other = some((3, 1), (2, 2)), some((3, 1))
    one.num_steps_saved, other.num_steps_saved = 2, 1
    expected = some((3, 1), (2, 2), (3, 1))
    expected.num_steps_saved = 3
    assert merged_drafts([one, None, other]) == expected and merged_drafts([None]) is None
    merged = merged_stats([RequestStateStats(drafts=one), RequestStateStats(), RequestStateStats(drafts=other)])
    assert merged.drafts == expected


def test_positions_count_the_drafts_that_stood_there() -> None:
    outcomes = DraftOutcomes(np.arange(4), np.array([3, 3, 1, 2], np.int32), np.array([0, 3, 1, 1], np.int32))
    assert accepted_by_position(outcomes.num_accepted) == [3, 1, 1]
    assert accepted_by_position(np.zeros(3, np.int32)) == []
    assert list(outcomes.items())[1] == (1, 3, 3)
