"""What holds for blocks, rows and queues of a scheduler between any two calls."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire.kv_cache.single_type.row_blocks import NO_IDS
from quire.scheduler.scheduler import Scheduler
from quire.scheduler.scheduling_policy import RankOrder
from quire.scheduler.swapping import Swapping
from tests.unit.scheduler.cache_groups import FULL, Group, first_token_seen
from tests.unit.scheduler.check_prefixes import check_prefixes


def check_invariants(scheduler: Scheduler, groups: Sequence[Group] = (FULL,)) -> None:
    """No block owned twice beyond sharing; free + used = total; rows and queue hold each request once."""
    pool, table, kv = scheduler._kv._pool, scheduler._table, scheduler._kv
    rows = scheduler._running.rows.tolist()
    owners = np.zeros(len(pool.ref_counts()), dtype=np.int32)
    for row in rows:
        held = []
        num_computed = int(table.num_computed_tokens[row])
        for group, blocks in zip(groups, kv.get_block_ids(row), strict=True):
            if group[0] == "state":
                continue
            first = first_token_seen(group, num_computed) // kv.block_size
            assert blocks[first:].all(), "a page that a query sees is missing"
            first = first_token_seen(group, max(num_computed - 1, 0)) // kv.block_size
            assert not blocks[:first].any(), "a page that was passed is held"
            held.extend(blocks[blocks > 0].tolist())
        for manager in kv._coordinator._states:
            being_read = [block_id for _, block_id in manager._being_read.get(row, [])]
            held += [*being_read, *(int(one[row]) for one in (manager._own, manager._source) if one[row])]
            held += manager._before_drafts.get(row, NO_IDS).tolist()
        assert len(set(held)) == len(held), "a request holds a page twice"
        owners[held] += 1
    np.add.at(owners, kv._copies.source_ids(), 1)
    for pinned in scheduler._groups.pinned():
        owners[pinned.all_block_ids()] += 1
    null_ids = [free.null_id for free in (pool._free, *pool._more_free)]
    assert not owners[null_ids].any(), "a null page has an owner"
    check_prefixes(pool.prefix_index, [kv._coordinator._rows._nodes[row] for row in rows], scheduler._groups.pinned())
    assert np.array_equal(pool.ref_counts(), owners), "reference counts differ from the number of owners"
    num_used = [np.count_nonzero(part) for part in np.split(owners, null_ids[1:])]
    for used, free, usable in zip(num_used, pool.free_counts(), pool.usable_counts, strict=True):
        assert used + free == usable, "free + used != total"
    assert sorted(rows) == np.flatnonzero(table.handle >= 0).tolist()
    if isinstance(scheduler._order, RankOrder):
        assert table.rank[rows].tolist() == sorted(table.rank[rows].tolist())
    assert len(rows) + table.num_free_rows == len(table.handle)
    assert len(rows) + len(scheduler._order.queue) + len(scheduler._tiers.swapping) == len(scheduler._requests)
    check_swap_space(scheduler._tiers.swapping, scheduler._admission.returning.handles())


def check_swap_space(swapping: Swapping, returning: Sequence[int]) -> None:
    """No host block owned twice, free + used = total; who is swapped has blocks, and nobody else."""
    blocks = swapping._blocks
    held = np.concatenate([np.empty(0, dtype=np.int32), *(one.held() for one in blocks.values())])
    free = np.concatenate([pool._stack[: pool.num_free_blocks] for pool in swapping._pools])
    num_blocks = sum(pool.num_blocks for pool in swapping._pools)
    assert sorted([*held.tolist(), *free.tolist()]) == list(range(num_blocks)), "a host page is lost or owned twice"
    assert blocks.keys() == {*returning}
