"""What layers need to know of a step: one metadata per KV cache group, shared by the group's layers.

Called by the model runner once per step. Owns the order of the layers; the tensors belong to the runner.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch

from quire.attention.context import ForwardContext
from quire.attention.metadata import AttentionMetadata, StateMetadata
from quire.core.kv_spec import KVCacheConfig, MambaSpec
from quire.core.scheduler_output import BlockCopies, StateBlocks
from quire.worker.block_tables import BlockTables
from quire.worker.draft_trees import TreeBlocks, place_segments
from quire.worker.input_batch import InputBatch
from quire.worker.kv_cache_tensors import CachePool

_NO_SCRATCH = np.empty((1, 0), dtype=np.int32)


class AttentionGroups:
    """Builds the forward context of a step.

    Args:
        kv_cache_config: the groups.
        layer_names: every layer with a cache, in the model's order.
        kv_caches: the cache tensor of each layer, in the same order.
        pools: the blocks.
        scratch_ids: [num_steps, num_scratch_blocks] integers; blocks of the one pool that no request has, for trees of
            drafts of as many steps as are in flight.

    Attributes:
        groups: numbers of the groups that these layers are in; of others nothing is looked at.
        state_numbers: of those with states, numbers among all that have such.
    """

    def __init__(
        self,
        kv_cache_config: KVCacheConfig,
        layer_names: Sequence[str],
        kv_caches: Sequence[torch.Tensor],
        pools: Sequence[CachePool],
        scratch_ids: np.ndarray = _NO_SCRATCH,
    ) -> None:
        group_of = {name: i for i, group in enumerate(kv_cache_config.groups) for name in group.layer_names}
        self._group_of_layer = [group_of[name] for name in layer_names]
        self.groups = frozenset(self._group_of_layer)
        self._kv_caches = tuple(kv_caches)
        self._pools = tuple(pools)
        self._scratch_ids = scratch_ids
        self._block_size = kv_cache_config.block_size
        with_state = [i for i, group in enumerate(kv_cache_config.groups) if isinstance(group.spec, MambaSpec)]
        # Of each group with states that these layers are in: its number among all that have states.
        self._state_numbers = {group: number for number, group in enumerate(with_state) if group in self.groups}
        self.state_numbers = tuple(self._state_numbers.values())
        self._state_pools = [pools[kv_cache_config.groups[group].pool] for group in self._state_numbers]

    @property
    def num_blocks(self) -> int:
        """Of the smallest of these layers' caches."""
        return min((len(kv_cache) for kv_cache in self._kv_caches), default=0)

    def copy_pages(self, copies: BlockCopies) -> None:
        """Copy blocks onto others, in every layer."""
        for pool in self._pools:
            is_here = pool.find(copies.source_ids)
            if is_here.any():
                pool.copy(copies.source_ids[is_here] - pool.first_id, copies.target_ids[is_here] - pool.first_id)

    def remember_states(self, states: Sequence[StateBlocks]) -> Callable[[], None]:
        """Copy the states that a step reads and overwrites; what is returned puts them back.

        Args:
            states: of those groups of these layers that have such.
        """
        saved: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        for pool, blocks in zip(self._state_pools, states, strict=True):
            ids = blocks.write_block_ids[blocks.write_block_ids == blocks.read_block_ids]
            index = torch.from_numpy(ids.astype(np.int64)).to(pool.tensors[0].device)
            saved += [(tensor, index, tensor.index_select(0, index)) for tensor in pool.tensors]

        def put_back() -> None:
            for tensor, index, copy in saved:
                tensor.index_copy_(0, index, copy)

        return put_back

    def forward_context(self, batch: InputBatch, block_tables: BlockTables) -> ForwardContext:
        """The context of a step of at least one request."""
        return self.context_of(
            {
                group: self._state_metadata(batch, self._state_numbers[group])
                if group in self._state_numbers
                else self._metadata(group, batch, block_tables)
                for group in self.groups
            }
        )

    def kept_slots(self, batch: InputBatch, block_tables: BlockTables, tokens: np.ndarray) -> np.ndarray:
        """What brings keys and values of accepted drafts to where their rows' tokens are: [2, n] int64, from and to.

        Args:
            batch: with trees.
            tokens: [num_kept] integers; of the step, the accepted ones.
        """
        assert batch.trees is not None, "called for trees"
        segments = np.searchsorted(batch.trees.start_loc, tokens, "right") - 1
        tokens = tokens[~batch.trees.is_first[segments]]
        if not len(tokens):
            return np.empty((2, 0), dtype=np.int64)
        (group,) = self.groups
        own = block_tables.slots(group, batch.token_rows[tokens], batch.token_positions[tokens])
        return np.stack([self.place_trees(batch, block_tables).slots[tokens], own])

    def copy_slots(self, slots: np.ndarray) -> None:
        """Copy keys and values of tokens in every layer: [2, n] int64, from and to; for trees of drafts."""
        backend = self._pools[0].backend
        assert backend is not None, "trees are for keys and values"
        on_device = torch.from_numpy(slots).to(self._kv_caches[0].device)
        for kv_cache in self._kv_caches:
            backend.copy_slots(kv_cache, self._block_size, on_device)

    def place_trees(self, batch: InputBatch, block_tables: BlockTables) -> TreeBlocks:
        """Where the segments of a step's trees lie; layers with trees are in one group."""
        assert batch.trees is not None, "called for trees"
        (group,) = self.groups
        table, block_size = block_tables.tables[group], block_tables.block_sizes[group]
        scratch_ids = self._scratch_ids[batch.trees.step % len(self._scratch_ids)]
        return place_segments(batch.trees, batch.token_positions, table, block_size, scratch_ids)

    def placed_context(
        self, num_tokens: int, start_loc: np.ndarray, seq_lens: np.ndarray, placed: TreeBlocks, device: torch.device
    ) -> ForwardContext:
        """The context of a step whose tokens lie in given places, by its segments: [num_segments + 1], [num_segments]
        int32; the layers are in one group.
        """
        (group,) = self.groups
        return self.context_of({group: _placed_metadata(num_tokens, start_loc, seq_lens, placed, device)})

    def context_of(self, per_group: Mapping[int, AttentionMetadata | StateMetadata]) -> ForwardContext:
        """The context of a step, from the metadata of each of `groups`."""
        return ForwardContext(tuple(per_group[group] for group in self._group_of_layer), self._kv_caches)

    def _metadata(self, group: int, batch: InputBatch, block_tables: BlockTables) -> AttentionMetadata:
        if batch.trees is not None:
            placed, trees = self.place_trees(batch, block_tables), batch.trees
            return _placed_metadata(batch.num_tokens, trees.start_loc, trees.seq_lens, placed, batch.input_ids.device)
        device = batch.input_ids.device
        max_seq_len = int(batch.seq_lens.max())
        return AttentionMetadata(
            num_reqs=batch.num_reqs,
            num_tokens=batch.num_tokens,
            query_start_loc=torch.from_numpy(batch.query_start_loc).to(device),
            seq_lens=torch.from_numpy(batch.seq_lens).to(device),
            block_table=torch.from_numpy(block_tables.gather(group, batch.rows, max_seq_len)).to(device),
            slot_mapping=torch.from_numpy(block_tables.slots(group, batch.token_rows, batch.token_positions)).to(
                device
            ),
            query_start_loc_np=batch.query_start_loc,
            seq_lens_np=batch.seq_lens,
            max_query_len=int(np.diff(batch.query_start_loc).max()),
            max_seq_len=max_seq_len,
        )

    @staticmethod
    def _state_metadata(batch: InputBatch, number: int) -> StateMetadata:
        device, blocks = batch.input_ids.device, batch.states[number]
        metadata = make_state_metadata(batch.query_start_loc, batch.num_computed_tokens, blocks, device)
        if not batch.token_state_blocks:
            return metadata
        return dataclasses.replace(metadata, token_block=torch.from_numpy(batch.token_state_blocks[number]).to(device))


def _placed_metadata(
    num_tokens: int, start_loc: np.ndarray, seq_lens: np.ndarray, placed: TreeBlocks, device: torch.device
) -> AttentionMetadata:
    """Each segment is a request of its own."""
    copied = placed.copied_slots
    return AttentionMetadata(
        num_reqs=len(seq_lens),
        num_tokens=num_tokens,
        query_start_loc=torch.from_numpy(start_loc).to(device),
        seq_lens=torch.from_numpy(seq_lens).to(device),
        block_table=torch.from_numpy(placed.table).to(device),
        slot_mapping=torch.from_numpy(placed.slots).to(device),
        query_start_loc_np=start_loc,
        seq_lens_np=seq_lens,
        max_query_len=int(np.diff(start_loc).max()),
        max_seq_len=int(seq_lens.max()),
        copied_slots=None if copied is None else torch.from_numpy(copied).to(device),
    )


def make_state_metadata(
    query_start_loc: np.ndarray, num_computed_tokens: np.ndarray, blocks: StateBlocks, device: torch.device
) -> StateMetadata:
    """The metadata of a state group, from arrays on the host: [num_reqs + 1] and [num_reqs], int32."""
    read_block, write_block = blocks.read_block_ids, blocks.write_block_ids
    start_loc, num_computed, read, write = (
        torch.from_numpy(array).to(device) for array in (query_start_loc, num_computed_tokens, read_block, write_block)
    )
    return StateMetadata(
        num_reqs=len(write_block),
        num_tokens=int(query_start_loc[-1]),
        query_start_loc=start_loc,
        num_computed_tokens=num_computed,
        read_block=read,
        write_block=write,
        query_start_loc_np=query_start_loc,
        num_computed_tokens_np=num_computed_tokens,
        read_block_np=read_block,
        write_block_np=write_block,
        max_query_len=int(np.diff(query_start_loc).max()),
    )
