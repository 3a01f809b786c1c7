"""What the data plane returns for a step: made by `ModelRunner.sample_tokens`, read by `update_from_output`."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from quire.core.kv_transfer import KVTransferResults
from quire.core.logprobs import LogprobsArrays
from quire.core.model_drafts import RowDrafts


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRunnerOutput:
    """Sampled tokens of one step.

    Row i of `rows` has tokens sampled_start_loc[i] .. sampled_start_loc[i + 1] - 1: none, one or several. Each but its
    last is the draft that stands in its place, so the keys and values behind it are those of the sequence.

    Attributes:
        rows: [num_sampling] int32; `SchedulerOutput.rows[is_sampling]`, in that order.
        sampled_token_ids: [num_sampled] int32.
        sampled_start_loc: [num_sampling + 1] int32; None = every row has one token.
        logprobs: lines for the entries of `sampled_token_ids` whose rows asked for them; None when none did.
        prompt_logprobs: row -> lines for prompt positions computed in this step; `index` holds positions of
            the *predicted* prompt token, so it starts at 1.
        errors: row -> what went wrong, for sampling rows whose token means nothing (the model gave NaN, or no
            token was possible): the token is not to be used and the request ends with an error.
        swap_out_s, swap_in_s: seconds that the step's swaps took; None = it had none, or they were not measured.
        kv_transfers: blocks that were loaded or saved since the last report; None = there is no tier to do so.
        is_capture: the step was captured, or compared with its replay: later ones like it take less time.
        proposals: drafts of a model for the rows that the step asked for; None = it asked for none.
        drafting_s: seconds of the step that this model took.
    """

    rows: np.ndarray
    sampled_token_ids: np.ndarray
    sampled_start_loc: np.ndarray | None = None
    logprobs: LogprobsArrays | None = None
    prompt_logprobs: dict[int, LogprobsArrays] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    swap_out_s: float | None = None
    swap_in_s: float | None = None
    kv_transfers: KVTransferResults | None = None
    is_capture: bool = False
    proposals: RowDrafts | None = None
    drafting_s: float = 0.0
