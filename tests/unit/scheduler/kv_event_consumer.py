"""A consumer of KV events, for the tests of the scheduler."""

from __future__ import annotations

import numpy as np

from quire.core.kv_events import AllBlocksCleared, BlockRemoved, KVEvent
from quire.kv_cache.event_recorder import KVEventRecorder, external_hash
from quire.kv_cache.prefix_tree import ROOT
from quire.scheduler.scheduler import Scheduler


class KVEventConsumer:
    """Applies all KV events, as another program does, and compares what it believes with what can be found."""

    def __init__(self, scheduler: Scheduler) -> None:
        kv = scheduler._kv
        self._index = kv._pool.prefix_index
        self._recorder = KVEventRecorder(kv.block_size)
        self._blocks: dict[int, tuple[int | None, list[int]]] = {}
        scheduler.watch_blocks(self._recorder)

    def check(self) -> None:
        for event in self._recorder.take():
            self._apply(event)
        tree, blocks = self._index.tree, self._index.blocks[0] if self._index._is_whole[0] else {}
        names = {external_hash(tree.hash_of(node)): node for node in blocks}
        assert self._blocks.keys() == names.keys(), "a consumer of events believes in other pages than can be found"
        for name, (parent, tokens) in self._blocks.items():
            node = names[name]
            assert np.frombuffer(tree.tokens(node), dtype=np.int32).tolist() == tokens
            before = tree.parent(node)
            assert parent == (None if before == ROOT else external_hash(tree.hash_of(before)))
            assert parent is None or parent in self._blocks, "a page without the page before it"

    def _apply(self, event: KVEvent) -> None:
        if isinstance(event, AllBlocksCleared):
            self._blocks.clear()
        elif isinstance(event, BlockRemoved):
            for name in event.block_hashes:
                del self._blocks[name]
        else:
            parent, size = event.parent_block_hash, event.block_size
            for i, name in enumerate(event.block_hashes):
                assert name not in self._blocks, "a page is stored twice"
                self._blocks[name] = (parent, event.token_ids[i * size : (i + 1) * size])
                parent = name
