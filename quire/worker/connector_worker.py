"""ConnectorWorker: the worker's half of a KV connector, as a tier's half.

Called by the model runner with every step. Owns which transfers are under way, by request: the connector reports
requests and blocks, the scheduler accounts for transfers. `start_load_kv` that raises makes the transfers of its step
fail, so what they should have loaded is computed; others stay in use until they are reported.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from quire.core.kv_transfer import (
    BlockTransfer,
    ConnectorMessage,
    KVConnectorOutput,
    KVTransferMeta,
    KVTransferResults,
)
from quire.kv_transfer.connector import KVConnector
from quire.logger import get_logger
from quire.worker.kv_tier import AnyBlocks, KVTierWorker, PooledBlocks
from quire.worker.layer_hooks import LayerHooks

logger = get_logger(__name__)


class ConnectorWorker(KVTierWorker):
    """A connector beside the model.

    Args:
        connector: its worker half.
        kv_caches: the cache of each layer, by name, in the order of the model; those of a drafting model behind.
    """

    def __init__(self, connector: KVConnector, kv_caches: Mapping[str, torch.Tensor]) -> None:
        self._connector = connector
        self._kv_caches = kv_caches
        self._layer_names = list(kv_caches)
        self._name = connector.config.kv_connector
        self._loads: dict[int, BlockTransfer] = {}  # for which requests wait
        self._saves: dict[int, BlockTransfer] = {}
        self._step_loads: tuple[BlockTransfer, ...] = ()  # that the step under way needs
        self._failed: set[int] = set()
        self._finished_req_ids: frozenset[str] = frozenset()
        self._has_metadata = False
        self._num_errors = 0

    def register_kv_caches(self, blocks: AnyBlocks) -> None:
        """As `KVTierWorker`. Raises what the connector raises: an engine that cannot use it does not start."""
        assert not isinstance(blocks, PooledBlocks), "connectors are refused where there are several pools"
        self._connector.register_kv_caches(self._kv_caches, blocks)

    def begin_step(self) -> None:
        """As `KVTierWorker`: nothing is left of a step that failed."""
        self._end_metadata()
        self._step_loads = ()

    def start_transfers(self, meta: KVTransferMeta) -> None:
        """As `KVTierWorker`. Of transfers that are repeated, those that the connector never saw will never begin."""
        known = self._loads.keys() | self._saves.keys()
        repeated = [one.transfer_id for one in (*meta.loads, *meta.saves) if one.is_repeated]
        self._failed.update(number for number in repeated if number not in known)
        loads = [one for one in meta.loads if not one.is_repeated]
        self._step_loads = tuple(one for one in loads if not one.is_async)
        self._loads.update((one.transfer_id, one) for one in loads if one.is_async)
        self._saves.update((one.transfer_id, one) for one in meta.saves if not one.is_repeated)
        message = meta.connector or ConnectorMessage()
        self._finished_req_ids |= message.finished_req_ids
        if message.metadata is None:
            self._failed.update(one.transfer_id for one in (*loads, *(meta.saves if message.has_failed else ())))
        elif not self._start_load(message.metadata):
            self._failed.update(one.transfer_id for one in (*loads, *meta.saves))

    def _start_load(self, metadata: Any) -> bool:
        self._has_metadata = True
        try:
            self._connector.bind_connector_metadata(metadata)
            self._connector.start_load_kv()
        except Exception:  # a foreign class may raise anything
            self._note_error("start_load_kv")
            return False
        return True

    def layer_hooks(self) -> LayerHooks | None:
        """As `KVTierWorker`: where the connector asks for them, and the step carries metadata."""
        if not self._has_metadata or not self._connector.has_layer_hooks:
            return None
        return LayerHooks(self._connector, self._layer_names, self._fail_step)

    def _fail_step(self, call: str) -> None:
        self._note_error(call)
        self._failed.update(one.transfer_id for one in self._step_loads)

    @property
    def reads_step(self) -> bool:
        """As `KVTierWorker`: where the step carries metadata, which may name its blocks."""
        return self._has_metadata

    def finish_forward(self) -> None:
        """As `KVTierWorker`."""
        if self._has_metadata:
            try:
                self._connector.wait_for_save()
            except Exception:  # as in `_start_load`
                self._note_error("wait_for_save")

    def get_finished(self) -> KVTransferResults:
        """As `KVTierWorker`."""
        finished, self._finished_req_ids = self._finished_req_ids, frozenset()
        sent: set[str] = set()
        received: set[str] = set()
        invalid: set[int] = set()
        unsaved: set[str] = set()
        worker_meta: Any = None
        stats: dict[str, float] = {}
        try:
            sent, received = self._connector.get_finished(finished)
            invalid = self._connector.get_block_ids_with_load_errors()
            unsaved = self._connector.get_failed_saves() & sent
            worker_meta = self._connector.build_connector_worker_meta()
            stats = dict(self._connector.get_kv_connector_stats())
        except Exception:  # as in `_start_load`; what is under way stays so, until it is reported
            self._note_error("get_finished")
        self._end_metadata()
        failed, self._failed = self._failed, set()
        failed.update(one.transfer_id for one in self._step_loads if _overlaps(one, invalid))
        failed.update(one.transfer_id for one in self._saves.values() if one.request_id in unsaved)
        self._step_loads = ()
        done: list[int] = []
        for transfers, names in ((self._loads, received), (self._saves, sent)):
            for one in [one for one in transfers.values() if one.request_id in names]:
                del transfers[one.transfer_id]
                if one.transfer_id in failed:
                    continue
                (failed.add if _overlaps(one, invalid) and transfers is self._loads else done.append)(one.transfer_id)
        for number in failed:
            self._loads.pop(number, None)
            self._saves.pop(number, None)
        if self._num_errors:
            stats["errors"] = stats.get("errors", 0) + self._num_errors
            self._num_errors = 0
        report = KVConnectorOutput(
            finished_sending=frozenset(sent), finished_recving=frozenset(received),
            invalid_block_ids=frozenset(invalid), worker_meta=worker_meta, stats=stats,
        )  # fmt: skip
        return KVTransferResults(tuple(done), tuple(sorted(failed)), report)

    def shutdown(self) -> None:
        """As `KVTierWorker`."""
        self._connector.shutdown()

    def _end_metadata(self) -> None:
        if self._has_metadata:
            self._has_metadata = False
            try:
                self._connector.clear_connector_metadata()
            except Exception:  # as in `_start_load`
                self._note_error("clear_connector_metadata")

    def _note_error(self, call: str) -> None:
        self._num_errors += 1
        logger.exception("KV connector %s failed in %s", self._name, call)


def _overlaps(transfer: BlockTransfer, block_ids: Iterable[int]) -> bool:
    return not set(transfer.block_ids.tolist()).isdisjoint(block_ids)
