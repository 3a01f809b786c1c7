"""Offloading: the worker's half of a tier that keeps blocks in a store of ours (host memory, a disk).

A `KVTierWorker`, called by the model runner: it hands transfers to the store, whose threads copy, and reports them.
"""

from __future__ import annotations

from quire.core.kv_transfer import KVTransferMeta, KVTransferResults
from quire.kv_offload.store import BlockStore
from quire.worker.kv_tier import AnyBlocks, KVTierWorker


class OffloadingWorker(KVTierWorker):
    """Transfers are jobs of the store, shared with the scheduler's half, under the same ids."""

    def __init__(self, store: BlockStore) -> None:
        self._store = store

    def register_kv_caches(self, blocks: AnyBlocks) -> None:
        """As `KVTierWorker`."""
        self._store.start(blocks)

    def start_transfers(self, meta: KVTransferMeta) -> None:
        """As `KVTierWorker`; all loads are asynchronous, and what the step takes is copied before they begin."""
        for save in meta.saves:
            if save.is_async:
                self._store.submit_store(save.transfer_id, save.keys, save.block_ids.tolist())
            else:
                self._store.copy_now(save.keys, save.block_ids.tolist())
        for load in meta.loads:
            self._store.submit_load(load.transfer_id, load.keys, load.block_ids.tolist(), load.time_limit_s)

    def get_finished(self) -> KVTransferResults:
        """As `KVTierWorker`."""
        finished = self._store.get_finished()
        return KVTransferResults(finished.done, finished.failed)
