"""What rank 0 tells the other ranks of its group. Values only; encoded by `core.serial`.

Other ranks keep weights and their part of the cache, and nothing of requests: a step comes with all that its
computation needs.
"""

from __future__ import annotations

import msgspec
import numpy as np

from quire.core.engine_messages import EngineCoreOutputs
from quire.core.kv_spec import KVCacheConfig, KVCacheSpec
from quire.core.worker_call import WorkerCall


class StageReport(msgspec.Struct, frozen=True, tag="stage"):
    """What each other pipeline stage sends rank 0 first.

    Attributes:
        specs: layer name -> what it needs from the KV cache, in layer order.
        kv_cache_bytes: what they may take together.
    """

    specs: dict[str, KVCacheSpec]
    kv_cache_bytes: int


class InitCache(msgspec.Struct, frozen=True, tag="init_cache"):
    """Allocate the KV cache, and warm up."""

    kv_cache: KVCacheConfig


class TreeSegments(msgspec.Struct, frozen=True):
    """Of a step with trees of drafts, each segment as a request of its own; tables and slots are theirs.

    Attributes:
        start_loc: [num_segments + 1] int32.
        seq_lens: [num_segments] int32.
        copied_slots: [2, num_copies] int64; as of `worker.draft_trees.TreeBlocks`.
    """

    start_loc: np.ndarray
    seq_lens: np.ndarray
    copied_slots: np.ndarray


class ForwardStep(msgspec.Struct, frozen=True, tag="forward"):
    """Compute a step: see `InputBatch` for the arrays.

    Attributes:
        tables: for each KV cache group [num_reqs, num_blocks] int32; empty for those of recurrent layers.
        slots: likewise [num_tokens] int64.
        read_blocks, write_blocks: of each group with states.
        wants_all: the hidden states of all tokens are needed.
        segments: of trees of drafts; None = there are none.
    """

    rows: np.ndarray
    num_computed_tokens: np.ndarray
    query_start_loc: np.ndarray
    seq_lens: np.ndarray
    input_ids: np.ndarray
    token_rows: np.ndarray
    token_positions: np.ndarray
    logits_indices: np.ndarray
    tables: list[np.ndarray]
    slots: list[np.ndarray]
    read_blocks: list[np.ndarray]
    write_blocks: list[np.ndarray]
    token_state_blocks: list[np.ndarray]
    wants_all: bool
    segments: TreeSegments | None = None


class SampleLogits(msgspec.Struct, frozen=True, tag="logits"):
    """Compute this rank's logits of hidden states [num_rows, size], which follow; rank 0 gets them.

    For the ranks of the first pipeline stage.
    """

    num_rows: int
    size: int


class CopyBlocks(msgspec.Struct, frozen=True, tag="copy"):
    """Copy blocks onto others in every layer."""

    source_ids: np.ndarray
    target_ids: np.ndarray


class SwapBlocks(msgspec.Struct, frozen=True, tag="swap"):
    """Copy blocks of every layer to the swap space, then others from there."""

    out_source_ids: np.ndarray
    out_target_ids: np.ndarray
    in_source_ids: np.ndarray
    in_target_ids: np.ndarray


class CopySlots(msgspec.Struct, frozen=True, tag="copy_slots"):
    """Copy keys and values of tokens, in every layer of the target: [2, n] int64, from and to."""

    slots: np.ndarray


class DraftForward(msgspec.Struct, frozen=True, tag="draft"):
    """A pass of the model that drafts.

    Attributes:
        width: of what it is given beside tokens, [num_tokens, width], which follows; 0 = nothing.
        are_states: what follows are states of the target, which features are made from.
    """

    step: ForwardStep
    width: int
    are_states: bool


class DraftLogits(msgspec.Struct, frozen=True, tag="draft_logits"):
    """Compute this rank's logits of the drafting model, of hidden states [num_rows, size], which follow.

    Attributes:
        num_places: tokens that each row drafts at once.
    """

    num_rows: int
    size: int
    num_places: int


class Meet(msgspec.Struct, frozen=True, tag="meet"):
    """Wait for the others: then rank 0 may read and write the caches of all, until it sends the next message."""


class ProfileSteps(msgspec.Struct, frozen=True, tag="profile"):
    """Record what is computed; or, where there is a name for the profile's files, stop, and send what was recorded."""

    name: str


class CallWorker(msgspec.Struct, frozen=True, tag="call_worker"):
    """Run a function, and send rank 0 what it returns (`worker.group_calls`)."""

    call: WorkerCall


class EndCall(msgspec.Struct, frozen=True, tag="end_call"):
    """Nothing more is computed for this call of the scripts, which run on every rank (`engine.launched`).

    Attributes:
        outputs: of a step; None = there are none.
        value: what another call returns.
        is_last: it may be: rank 0 waits until the others have it.
    """

    outputs: EngineCoreOutputs | None = None
    value: bool | None = None
    is_last: bool = False


class JoinPass(msgspec.Struct, frozen=True, tag="join"):
    """Take part in a pass of other replicas, without tokens: this one has none."""


GroupMessage = (
    InitCache | ForwardStep | SampleLogits | CopyBlocks | SwapBlocks | Meet | CopySlots | DraftForward | DraftLogits
    | ProfileSteps | CallWorker | EndCall | JoinPass
)  # fmt: skip
