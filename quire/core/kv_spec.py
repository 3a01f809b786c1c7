"""What a layer needs from the KV cache, by kind, and how the cache is divided.

Specs are made by the models (data plane), read by `kv_cache.planning` (control plane), and the resulting
`KVCacheConfig` is given to both. Values only. A new kind is a class here, an entry of `KINDS` if recordings are to hold
it, and a line in `kv_cache.single_type.managers`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import msgspec


class KVCacheSpec(ABC):
    """What one layer needs from the KV cache.

    Attributes:
        block_size: tokens per block; one for all layers of a model.
        keeps_sequence: blocks are kept for the whole sequence, so memory grows with it.
        can_take_back: what it holds of a sequence can be cut back to fewer tokens.
    """

    __slots__ = ()

    block_size: int
    keeps_sequence = True
    can_take_back = True

    @property
    @abstractmethod
    def page_size_bytes(self) -> int:
        """Bytes of one block."""

    @abstractmethod
    def most_blocks(self, max_chunk_tokens: int) -> int | None:
        """Most blocks that a request holds at once, when a step computes at most `max_chunk_tokens` of it; None = all.

        Blocks are freed once neither the newest computed query saw them nor a later one does, so a request holds what
        that query saw and the step's own tokens, wherever these begin in a block.
        """

    @abstractmethod
    def describe(self) -> str:
        """What it is, for a message."""

    def first_block_needed(self, num_blocks: int) -> int:
        """Of a prefix of `num_blocks` blocks (at least one), the first that a request which begins with it needs.

        All from there on are needed; the last one in any case, as it is what shows that the prefix is there.
        """
        return 0

    def unwindowed(self) -> KVCacheSpec:
        """What the layer needs when windows are only masked and no block is freed behind them."""
        return self

    def within(self, max_model_len: int) -> KVCacheSpec:
        """What the layer needs of requests of at most `max_model_len` tokens: a window as long is none."""
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec(KVCacheSpec):
    """Keys and values by head: the base of the kinds of attention that differ in which tokens a query sees.

    Attributes:
        block_size: tokens per block.
        num_kv_heads: key/value heads on this rank.
        head_size: elements per head.
        dtype_bytes: bytes per element.
    """

    block_size: int
    num_kv_heads: int
    head_size: int
    dtype_bytes: int

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block: keys and values."""
        return 2 * self.block_size * self.num_kv_heads * self.head_size * self.dtype_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class FullAttentionSpec(AttentionSpec):
    """A query sees every token before it."""

    def most_blocks(self, max_chunk_tokens: int) -> int | None:
        """As `KVCacheSpec`."""
        return None

    def describe(self) -> str:
        """As `KVCacheSpec`."""
        return "full attention"


class LocalAttentionSpec(AttentionSpec):
    """A query sees only nearby tokens: the base of windows and chunks."""

    __slots__ = ()

    keeps_sequence = False

    @property
    @abstractmethod
    def num_tokens_seen(self) -> int:
        """Most tokens that a query sees, itself included."""

    def most_blocks(self, max_chunk_tokens: int) -> int:
        """As `KVCacheSpec`."""
        return max_blocks_touched(self.num_tokens_seen + max_chunk_tokens, self.block_size)

    def unwindowed(self) -> KVCacheSpec:
        """As `KVCacheSpec`."""
        return FullAttentionSpec(
            block_size=self.block_size, num_kv_heads=self.num_kv_heads, head_size=self.head_size,
            dtype_bytes=self.dtype_bytes,
        )  # fmt: skip

    def within(self, max_model_len: int) -> KVCacheSpec:
        """As `KVCacheSpec`."""
        return self if self.num_tokens_seen < max_model_len else self.unwindowed()


@dataclass(frozen=True, slots=True, kw_only=True)
class SlidingWindowSpec(LocalAttentionSpec):
    """A query sees itself and the `sliding_window - 1` tokens before it."""

    sliding_window: int

    @property
    def num_tokens_seen(self) -> int:
        """As `LocalAttentionSpec`."""
        return self.sliding_window

    def first_block_needed(self, num_blocks: int) -> int:
        """As `KVCacheSpec`."""
        first_token = max(0, num_blocks * self.block_size - (self.sliding_window - 1))
        return min(first_token // self.block_size, num_blocks - 1)

    def describe(self) -> str:
        """As `KVCacheSpec`."""
        return f"a sliding window of {self.sliding_window} tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkedLocalAttentionSpec(LocalAttentionSpec):
    """A query sees only tokens of its own chunk, of `attention_chunk_size` tokens."""

    attention_chunk_size: int

    @property
    def num_tokens_seen(self) -> int:
        """As `LocalAttentionSpec`."""
        return self.attention_chunk_size

    def first_block_needed(self, num_blocks: int) -> int:
        """As `KVCacheSpec`."""
        num_tokens = num_blocks * self.block_size
        return min((num_tokens - num_tokens % self.attention_chunk_size) // self.block_size, num_blocks - 1)

    def describe(self) -> str:
        """As `KVCacheSpec`."""
        return f"attention within chunks of {self.attention_chunk_size} tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class MLAAttentionSpec(KVCacheSpec):
    """Latent attention: one vector a token, from which every head's keys and values are made; all are seen.

    Attributes:
        block_size: tokens per block.
        head_size: elements of the vector, those that carry the position included.
        dtype_bytes: bytes per element.
    """

    block_size: int
    head_size: int
    dtype_bytes: int

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block."""
        return self.block_size * self.head_size * self.dtype_bytes

    def most_blocks(self, max_chunk_tokens: int) -> int | None:
        """As `KVCacheSpec`."""
        return None

    def describe(self) -> str:
        """As `KVCacheSpec`."""
        return "latent attention"


STATE_ALIGNMENT = 64
"""Bytes at multiples of which the tensors of a state begin, and its block ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaSpec(KVCacheSpec):
    """Recurrent layers: a state of constant size per sequence, each in one block, whatever the number of tokens.

    A step reads the block of the state before its tokens and leaves the state after them in another one, or in the
    same. A state that is kept for other sequences is a block that is not written any longer
    (`kv_cache.single_type.state`).

    Attributes:
        block_size: tokens per block of the prefixes at whose ends states can be kept.
        shapes: of the tensors that make up the state of one sequence.
        dtype_bytes: bytes per element, of each tensor.
    """

    block_size: int
    shapes: tuple[tuple[int, ...], ...]
    dtype_bytes: tuple[int, ...]

    keeps_sequence = False
    can_take_back = False

    @property
    def tensor_bytes(self) -> tuple[int, ...]:
        """Bytes that each tensor of a state takes, what aligns the next one included."""
        sizes = (math.prod(shape) * size for shape, size in zip(self.shapes, self.dtype_bytes, strict=True))
        return tuple(-(-size // STATE_ALIGNMENT) * STATE_ALIGNMENT for size in sizes)

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block: a state."""
        return sum(self.tensor_bytes)

    def most_blocks(self, max_chunk_tokens: int) -> int | None:
        """As `KVCacheSpec`: the state that a step reads, and the one that it writes."""
        return 2

    def first_block_needed(self, num_blocks: int) -> int:
        """As `KVCacheSpec`: the state at the end alone."""
        return num_blocks - 1

    def describe(self) -> str:
        """As `KVCacheSpec`."""
        return f"a recurrent state of {self.page_size_bytes} bytes"


KINDS: tuple[type[Any], ...] = (
    FullAttentionSpec, SlidingWindowSpec, ChunkedLocalAttentionSpec, MLAAttentionSpec, MambaSpec,
)  # fmt: skip
"""The kinds that messages hold. Each has fields of its own: a spec crosses as its fields, which say what it is."""


def spec_from_fields(fields: Any) -> KVCacheSpec:
    """The spec that has these decoded fields. Fields that are None count as absent, as older recordings have them.

    Raises:
        ValueError: no kind has them.
    """
    given = {name: value for name, value in fields.items() if value is not None} if isinstance(fields, dict) else {}
    for kind in KINDS:
        own = dataclasses.fields(kind)
        required = {field.name for field in own if field.default is dataclasses.MISSING}
        if required <= given.keys() <= {field.name for field in own}:
            spec: KVCacheSpec = msgspec.convert(given, kind)
            return spec
    raise ValueError("not a known type of KV cache spec")


def max_blocks_touched(num_tokens: int, block_size: int) -> int:
    """Blocks that `num_tokens` (at least one) consecutive tokens lie in, at worst."""
    return -(-(num_tokens - 1) // block_size) + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheGroupSpec:
    """Layers that share one block table.

    `spec` says which blocks are kept: a window of its own is only set where blocks that left it may be freed. Its
    blocks are those of pool number `pool`.
    """

    layer_names: tuple[str, ...]
    spec: KVCacheSpec
    pool: int = 0

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block id in every layer of the group."""
        return self.spec.page_size_bytes * len(self.layer_names)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSize:
    """Blocks of one pool, its null block included, and those of the swap space that take their contents."""

    num_blocks: int
    num_swap_blocks: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheConfig:
    """The divided cache: pools of block ids. The first id of a pool is its null block and never given out.

    Ids are numbered through, so that an id says which pool it is of: pools of 100 and 8 blocks have the ids 0 .. 99 and
    100 .. 107. In block tables 0 stands for the null block of any pool. Host blocks of the swap space are numbered
    alike.

    A block id belongs to one group of its pool at a time. Layer j of every group of a pool keeps its blocks in the same
    tensor (slot j), so a block id is one block in each slot; a group of fewer layers leaves the last slots of its
    blocks unused. All layers of a pool have blocks of equally many bytes. Groups that keep whole sequences come first.

    Attributes:
        num_blocks, num_swap_blocks: of all pools together; blocks of the swap space are all usable.
        pools: the size of each; empty = there is one.
    """

    num_blocks: int
    groups: tuple[KVCacheGroupSpec, ...]
    num_swap_blocks: int = 0
    pools: tuple[PoolSize, ...] = ()

    def with_num_blocks(self, num_blocks: int) -> KVCacheConfig:
        """The cache with so many blocks in its first pool."""
        if not self.pools:
            return dataclasses.replace(self, num_blocks=num_blocks)
        first, *more = self.pools
        first = dataclasses.replace(first, num_blocks=num_blocks)
        num_all = num_blocks + sum(pool.num_blocks for pool in more)
        return dataclasses.replace(self, num_blocks=num_all, pools=(first, *more))

    def of_layers(self, layer_names: Collection[str]) -> KVCacheConfig:
        """The cache of some of the layers: groups and block ids are the same, groups may be without layers."""
        groups = (
            dataclasses.replace(group, layer_names=tuple(name for name in group.layer_names if name in layer_names))
            for group in self.groups
        )
        return dataclasses.replace(self, groups=tuple(groups))

    def pool_sizes(self) -> tuple[PoolSize, ...]:
        """The size of each pool."""
        return self.pools or (PoolSize(num_blocks=self.num_blocks, num_swap_blocks=self.num_swap_blocks),)

    def first_block_ids(self) -> tuple[int, ...]:
        """Per pool: its null block."""
        return tuple(itertools.accumulate((pool.num_blocks for pool in self.pool_sizes()[:-1]), initial=0))

    def first_swap_block_ids(self) -> tuple[int, ...]:
        """Per pool: its first block of the swap space."""
        return tuple(itertools.accumulate((pool.num_swap_blocks for pool in self.pool_sizes()[:-1]), initial=0))

    def groups_of(self, pool: int) -> tuple[KVCacheGroupSpec, ...]:
        """The groups whose blocks are those of a pool."""
        return tuple(group for group in self.groups if group.pool == pool)

    def pool_page_bytes(self) -> tuple[int, ...]:
        """Per pool: bytes of one block id, all slots together."""
        pools = range(len(self.pool_sizes()))
        return tuple(max(group.page_size_bytes for group in self.groups_of(pool)) for pool in pools)

    @property
    def total_bytes(self) -> int:
        """Bytes of all blocks of the cache."""
        sizes = zip(self.pool_sizes(), self.pool_page_bytes(), strict=True)
        return sum(pool.num_blocks * page_bytes for pool, page_bytes in sizes)

    @property
    def swap_bytes(self) -> int:
        """Bytes of all blocks of the swap space."""
        sizes = zip(self.pool_sizes(), self.pool_page_bytes(), strict=True)
        return sum(pool.num_swap_blocks * page_bytes for pool, page_bytes in sizes)

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block id of the first pool, all slots together."""
        return self.pool_page_bytes()[0]

    @property
    def block_size(self) -> int:
        """Tokens per block."""
        return self.groups[0].spec.block_size
