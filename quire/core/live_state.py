"""EngineState: what an engine core is doing at one moment, for people and dashboards. Values only.

Collected by `quire.scheduler.live_state` when someone asks, between two steps; sent to the front end as the answer of a
`UtilityCall`, and written as JSON by `/debug/state`. Every list is bounded, whatever the load; the counts beside a list
say how much there is. Holds no text and no token.
"""

from __future__ import annotations

import msgspec

MAX_ROWS = 256
MAX_QUEUED = 128
MAX_CELLS = 1024
MAX_PREFIXES = 64
FREE, CACHED, SHARED, OTHER = -1, -2, -3, -4
"""Owners in a `BlockMap` that are not rows: empty; findable and in use by no request; in use by several
rows; in use by something else (blocks on their way to a tier, or kept for a sibling)."""


class RowState(msgspec.Struct, frozen=True):
    """A request that has a row.

    Attributes:
        id: the engine's name of the request.
        phase: "prefill" while more than its newest token is to be computed, else "decode".
        num_blocks: KV-cache blocks, of all groups, shared ones included.
        max_tokens: of prompt and output together.
        age_s: seconds since the request arrived.
    """

    row: int
    handle: int
    id: str
    tenant: str
    phase: str
    prompt_tokens: int
    computed_tokens: int
    output_tokens: int
    max_tokens: int
    cached_tokens: int
    num_blocks: int
    preemptions: int
    priority: int
    age_s: float


class QueuedRequest(msgspec.Struct, frozen=True):
    """A request without a row, in the order of service.

    Attributes:
        phase: "waiting" (it never ran), "preempted" (it computes its tokens again), "swapped" (its blocks return).
        max_tokens: of its output; None = as many as fit.
        reason: name of the `WaitReason`, lower case; "arrived" = no step was planned since it came.
        why: the same in words.
        behind: id of the request that was refused in its place; "" = it was refused itself.
        missing_blocks: that were lacking for that request.
        predicted_wait_s: seconds until its turn, as the server estimates; None = nothing was measured yet.
    """

    handle: int
    id: str
    tenant: str
    phase: str
    prompt_tokens: int
    max_tokens: int | None
    preemptions: int
    priority: int
    waited_s: float
    reason: str
    why: str
    behind: str
    missing_blocks: int
    predicted_wait_s: float | None = None


class BlockMap(msgspec.Struct, frozen=True):
    """The blocks of one pool as at most `MAX_CELLS` cells.

    Attributes:
        num_blocks: without the null block; used + cached + free.
        used: in use by requests; cached: findable, in use by none; free: empty.
        blocks_per_cell: a cell shows the first of so many blocks.
        owners: a row, or one of `FREE`, `CACHED`, `SHARED`, `OTHER`.
        ages: 0 (newest) to 100 (oldest): of a row by the time of its placement, of cached blocks by their place in the
            order of eviction (100 = the next to be evicted).
    """

    num_blocks: int
    used: int
    cached: int
    free: int
    blocks_per_cell: int
    owners: list[int]
    ages: list[int]


class PrefixNode(msgspec.Struct, frozen=True):
    """A run of blocks that follow one another without a branch.

    Attributes:
        id: of its last block in the tree; parent: of the node that it follows, 0 = the empty prefix.
        num_blocks: of the run; cached_blocks: those of them that can be found.
        users: rows, cached blocks, remembered misses and children that refer to its last block.
        num_children: runs after it, shown or not.
        is_salted: a cache salt or a tenant is part of its name.
    """

    id: int
    parent: int
    num_blocks: int
    cached_blocks: int
    users: int
    num_children: int
    is_salted: bool


class PrefixMap(msgspec.Struct, frozen=True):
    """The prefix tree, nodes with many users first; `is_cut` where not all of it is shown."""

    num_nodes: int
    num_cached_blocks: int
    nodes: list[PrefixNode]
    is_cut: bool


class TenantService(msgspec.Struct, frozen=True):
    """A tenant as the fair policy sees it.

    Attributes:
        served: its virtual counter: cost of the tokens it got over its weight, relative to the tenant served least.
    """

    name: str
    weight: float
    served: float
    running: int
    waiting: int


class StepRecord(msgspec.Struct, frozen=True, array_like=True):
    """A step that ran while someone looked: number, end (monotonic seconds), seconds, requests, tokens, of prompts."""

    step: int
    end_s: float
    seconds: float
    num_reqs: int
    num_tokens: int
    num_prompt_tokens: int


class ChunkRecord(msgspec.Struct, frozen=True, array_like=True):
    """A part of a prompt that such a step computed (`kind` "prefill"), or a row that it swapped out ("swapped").

    Times are monotonic seconds; `first` is the first of its `num_tokens` tokens.
    """

    step: int
    handle: int
    kind: str
    start_s: float
    end_s: float
    first: int
    num_tokens: int


class ProcessState(msgspec.Struct, frozen=True):
    """The process of an engine core.

    Attributes:
        rss_bytes: resident memory.
        cpu_s: user and system time since its start, of all threads.
    """

    pid: int
    rss_bytes: int
    cpu_s: float
    num_threads: int


class EngineState(msgspec.Struct, frozen=True):
    """One engine core between two steps.

    Attributes:
        index: of the core in its server.
        time_s: monotonic seconds when this was collected; collect_s: of CPU that it took.
        num_running, num_waiting, num_swapped: requests; `batch` and `queue` have the first of them.
        tenants: of the fair policy; empty under others.
        swap_blocks, swap_blocks_used: of the swap space, in host memory.
        tier: name of the class of the tier behind the cache; "" = there is none.
        steps, chunks: of the last seconds; what ran before the first look is not there.
    """

    index: int
    time_s: float
    collect_s: float
    num_running: int
    num_waiting: int
    num_swapped: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    batch: list[RowState]
    queue: list[QueuedRequest]
    blocks: list[BlockMap]
    prefixes: PrefixMap
    tenants: list[TenantService]
    swap_blocks: int
    swap_blocks_used: int
    tier: str
    process: ProcessState
    steps: list[StepRecord] = []
    chunks: list[ChunkRecord] = []
