"""A consumer of KV events, for the tests of the scheduler."""

from __future__ import annotations

from quire.core.kv_events import AllBlocksCleared, BlockRemoved, KVEvent
from quire.kv_cache.event_recorder import KVEventRecorder, external_hash
from quire.kv_cache.prefix_index import ROOT_PREFIX_ID
from quire.scheduler.scheduler import Scheduler


class KVEventConsumer:
    """Applies all KV events, as another program does, and compares what it believes with what can be found."""

    def __init__(self, scheduler: Scheduler) -> None:
        kv = scheduler._kv
        self._index = kv._pool.prefix_index
        self._recorder = KVEventRecorder(kv.block_size)
        self._pages: dict[int, tuple[int | None, list[int]]] = {}
        scheduler.watch_pages(self._recorder)

    def check(self) -> None:
        for event in self._recorder.take():
            self._apply(event)
        names = {external_hash(block_hash): block_id for block_hash, block_id in self._index._block_of_hash.items()}
        assert self._pages.keys() == names.keys(), "a consumer of events believes in other pages than can be found"
        for name, (parent, tokens) in self._pages.items():
            assert parent is None or parent in self._pages, "a page without the page before it"
            assert self._index._token_pages.tokens(names[name]) == tokens
        found = [block_id for block_id in names.values() if self._is_reachable(block_id)]
        assert len(found) == len(names), "a page is indexed and cannot be found"

    def _apply(self, event: KVEvent) -> None:
        if isinstance(event, AllBlocksCleared):
            self._pages.clear()
        elif isinstance(event, BlockRemoved):
            for name in event.block_hashes:
                del self._pages[name]
        else:
            parent, size = event.parent_block_hash, event.block_size
            for i, name in enumerate(event.block_hashes):
                assert name not in self._pages, "a page is stored twice"
                self._pages[name] = (parent, event.token_ids[i * size : (i + 1) * size])
                parent = name

    def _is_reachable(self, block_id: int) -> bool:
        parent = self._index._pages[block_id][2]
        while parent != ROOT_PREFIX_ID:
            if parent not in self._index._block_of_prefix:
                return False
            parent = self._index._pages[self._index._block_of_prefix[parent]][2]
        return True
