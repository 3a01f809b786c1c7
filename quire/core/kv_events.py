"""Events of the prefix cache for other programs: blocks stored, removed, all cleared. Values only.

The form is that of vLLM 0.31: a batch is a msgpack array, each event in it a map with its name under "type".
"""

from __future__ import annotations

import msgspec

BlockHash = int
"""The last 64 bits of a block's name, unsigned."""

MEDIUM = "GPU"
"""Where the blocks are: the tier that the model computes from, whatever the device is. Consumers know this word."""


class BlockStored(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Blocks that follow one another can be found.

    Attributes:
        block_hashes: names of the blocks, in order.
        parent_block_hash: name of the block before the first; None = it is the first of its prompt.
        token_ids: of all blocks together.
        block_size: tokens per block.
        lora_id, lora_name: adapter.
        medium: where they are.
        extra_keys: for each block what else decides its content, such as ["cache_salt", ...]; None = nothing for any.
        group_idx: KV cache group, where there are several.
    """

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[list[str] | None] | None = None
    group_idx: int | None = None


class BlockRemoved(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Blocks can no longer be found."""

    block_hashes: list[BlockHash]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True):
    """No block can be found any longer."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, frozen=True, array_like=True):
    """The events of a step, in order.

    Attributes:
        ts: seconds, wall clock.
        data_parallel_rank: whose they are.
    """

    ts: float
    events: list[KVEvent]
    data_parallel_rank: int | None = 0
