"""BackgroundTransfers: what connectors share that move whole requests' blocks on a thread of their own.

The base of `stored_blocks` and `staged_transfers`. The scheduler's half collects what begins with the next step, per
request; the worker's half does it on the thread, so no step waits for a store or a network. Owns the jobs under way.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

from quire.config.kv_transfer import KVTransferConfig
from quire.kv_transfer.connector import KVConnector, KVConnectorRole
from quire.kv_transfer.layout import KVCacheLayout
from quire.kv_transfer.requests import ConnectorStep

CLOSE_S = 5.0
"""Most seconds for which the end of an engine waits for what is being moved."""


@dataclass(frozen=True, slots=True)
class Transfers:
    """What begins with a step: request -> its blocks, in the connector's own words."""

    loads: Mapping[str, Any]
    saves: Mapping[str, Any]


@dataclass(slots=True)
class _Job:
    """Blocks of one request on their way; `work` returns what `load` or `save` does."""

    request_id: str
    is_save: bool
    work: Future[Any]


class BackgroundTransfers(KVConnector):
    """Loads and saves of requests, on one thread of each half.

    Attributes:
        threads: that thread.
        loads, saves: of the next step, by request; the scheduler's half adds to them.
    """

    def __init__(self, config: KVTransferConfig, role: KVConnectorRole, layout: KVCacheLayout) -> None:
        super().__init__(config, role, layout)
        self.threads = ThreadPoolExecutor(1, thread_name_prefix="KV blocks")
        self.loads: dict[str, Any] = {}
        self.saves: dict[str, Any] = {}
        self._jobs: list[_Job] = []
        self._errors: set[int] = set()
        self._unsaved: set[str] = set()

    def load(self, request_id: str, what: Any) -> set[int]:
        """Put a request's blocks into the cache; on the thread. Returns the numbers of those that could not be."""
        raise NotImplementedError

    def save(self, request_id: str, what: Any) -> bool:
        """Keep a request's blocks, as far as that is possible; on the thread. Returns whether all are kept."""
        raise NotImplementedError

    def build_connector_meta(self, step: ConnectorStep) -> Transfers | None:
        """As `KVConnector`."""
        if not self.loads and not self.saves:
            return None
        meta = Transfers(self.loads, self.saves)
        self.loads, self.saves = {}, {}
        return meta

    def start_load_kv(self) -> None:
        """As `KVConnector`; blocks belong to their job until `get_finished` names the request."""
        meta: Transfers = self.metadata
        for request_id, what in meta.loads.items():
            self._jobs.append(_Job(request_id, False, self.threads.submit(self.load, request_id, what)))
        for request_id, what in meta.saves.items():
            self._jobs.append(_Job(request_id, True, self.threads.submit(self.save, request_id, what)))

    def get_finished(self, finished_req_ids: frozenset[str]) -> tuple[set[str], set[str]]:
        """As `KVConnector`."""
        sent, received = set[str](), set[str]()
        for job in [job for job in self._jobs if job.work.done()]:
            self._jobs.remove(job)
            if job.is_save:
                sent.add(job.request_id)
                self._unsaved.update(() if job.work.result() else (job.request_id,))
            else:
                received.add(job.request_id)
                self._errors |= job.work.result()
        return sent, received

    def get_block_ids_with_load_errors(self) -> set[int]:
        """As `KVConnector`."""
        errors, self._errors = self._errors, set()
        return errors

    def get_failed_saves(self) -> set[str]:
        """As `KVConnector`."""
        unsaved, self._unsaved = self._unsaved, set()
        return unsaved

    def shutdown(self) -> None:
        """As `KVConnector`; what is being saved is saved, unless the store hangs."""
        wait([job.work for job in self._jobs], timeout=CLOSE_S)
        self.threads.shutdown(wait=False, cancel_futures=True)
