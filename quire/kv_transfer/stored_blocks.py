"""StoredBlocks: a connector that keeps the blocks of ended requests in a storage of blocks by name.

The base of `shared_files` and `hicache`, which open the storage. With `kv_transfer_params` it hands a prompt from a
prefill engine (max_tokens=1, `do_remote_decode`) to a decode engine (`do_remote_prefill`). Both halves use the storage
on a thread of their own: no step waits for it. Owns the lookups and jobs under way.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from quire.config.kv_transfer import KVTransferConfig
from quire.errors import QuireError
from quire.kv_transfer.background import BackgroundTransfers
from quire.kv_transfer.connector import KVConnectorRole
from quire.kv_transfer.layout import KVCacheLayout
from quire.kv_transfer.requests import ConnectorRequest
from quire.logger import get_logger

logger = get_logger(__name__)

Blocks = tuple[tuple[bytes, int], ...]
"""(name, number in the cache) of blocks."""


@dataclass(slots=True)
class _Lookup:
    """How many blocks there are behind the first ones, of which so many were announced until a deadline."""

    first: int
    num_wanted: int
    deadline: float
    found: Future[int]


class BlockStorage(Protocol):
    """Where blocks are kept; used by one thread of each half."""

    def num_first(self, names: Sequence[bytes]) -> int:
        """How many of these blocks are there, up to the first that is not."""

    def store(self, name: bytes, tensors: Sequence[np.ndarray]) -> None:
        """Keep a block: per tensor of the layout uint8. Raises OSError when that is not possible."""

    def load(self, name: bytes, shapes: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
        """A block that was kept, in arrays that may be written.

        Raises:
            OSError: it is not there, or cannot be read.
            DamagedBlockError: it is not this block, or not whole.
        """

    def remove(self, name: bytes) -> None:
        """Forget a damaged block."""


class StoredBlocks(BackgroundTransfers):
    """Blocks in a storage."""

    def open_storage(self) -> BlockStorage:
        """The storage; called once for each half.

        Raises:
            ConfigError: it cannot be used.
        """
        raise NotImplementedError

    def __init__(self, config: KVTransferConfig, role: KVConnectorRole, layout: KVCacheLayout) -> None:
        super().__init__(config, role, layout)
        self._storage = self.open_storage()
        self._lookups: dict[str, _Lookup] = {}

    # --- the scheduler's half ---

    def get_num_new_matched_tokens(
        self, request: ConnectorRequest, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """As `KVConnector`; the storage is looked at on the thread, again while announced blocks are being written."""
        first = num_computed_tokens // self.layout.block_size
        names = list(request.block_hashes[first:])
        if not names:
            return 0, False
        lookup = self._lookups.get(request.request_id)
        if lookup is None or lookup.first != first:
            num_wanted = self._num_announced(request.kv_transfer_params) - first
            deadline = time.monotonic() + (self.config.kv_load_timeout_s or math.inf)
            lookup = _Lookup(first, min(num_wanted, len(names)), deadline, self._look(names))
            self._lookups[request.request_id] = lookup
        if not lookup.found.done():
            return None, True
        num_found = lookup.found.result()
        if num_found < lookup.num_wanted and time.monotonic() < lookup.deadline:
            lookup.found = self._look(names)
            return None, True
        return num_found * self.layout.block_size, True

    def _look(self, names: list[bytes]) -> Future[int]:
        return self.threads.submit(self._storage.num_first, names)

    def _num_announced(self, params: Mapping[str, Any]) -> int:
        """Blocks from the first on that a prefill engine has or will have written."""
        if not params.get("do_remote_prefill"):
            return 0
        if params.get("remote_layout") != self.layout.digest:
            logger.warning("blocks of another layout were announced; the prompt is computed")
            return 0
        num_tokens = params.get("remote_num_tokens")
        return num_tokens // self.layout.block_size if isinstance(num_tokens, int) else 0

    def update_state_after_alloc(
        self, request: ConnectorRequest, block_ids: Sequence[int], num_external_tokens: int
    ) -> None:
        """As `KVConnector`."""
        first = len(block_ids) - num_external_tokens // self.layout.block_size
        names = request.block_hashes[first : len(block_ids)]
        self.loads[request.request_id] = tuple(zip(names, block_ids[first:], strict=True))
        self._lookups.pop(request.request_id, None)

    def request_finished(
        self, request: ConnectorRequest, block_ids: Sequence[int]
    ) -> tuple[bool, Mapping[str, Any] | None]:
        """As `KVConnector`; a request that another engine decodes is given what that engine needs."""
        self._lookups.pop(request.request_id, None)
        if not block_ids or not self.config.is_kv_producer:
            return False, None
        self.saves[request.request_id] = tuple(zip(request.block_hashes, block_ids, strict=False))
        if not request.kv_transfer_params.get("do_remote_decode"):
            return True, None
        return True, {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self.config.engine_id,
            "remote_request_id": request.external_req_id,
            "remote_num_tokens": len(block_ids) * self.layout.block_size,
            "remote_layout": self.layout.digest,
        }

    # --- the worker's half ---

    def load(self, request_id: str, what: Blocks) -> set[int]:
        """As `BackgroundTransfers`."""
        assert self.blocks is not None, "the cache is registered before the first step"
        if not what:
            return set()
        import torch  # late: the scheduler's half does without

        shapes = [tuple(part.shape) for part in self.blocks.read([what[0][1]])]
        lost = set()
        for name, block_id in what:
            try:
                arrays = self._storage.load(name, shapes)
                self.blocks.write([block_id], [torch.from_numpy(array) for array in arrays])
            except (OSError, QuireError) as error:
                logger.warning("a KV block cannot be loaded and is computed: %s", error)
                lost.add(block_id)
                if isinstance(error, QuireError):
                    self._storage.remove(name)
        return lost

    def save(self, request_id: str, what: Blocks) -> bool:
        """As `BackgroundTransfers`."""
        assert self.blocks is not None, "the cache is registered before the first step"
        for name, block_id in what:
            try:
                if not self._storage.num_first([name]):
                    self._storage.store(name, [np.asarray(part) for part in self.blocks.read([block_id])])
            except OSError as error:
                logger.warning("a KV block cannot be saved: %s", error)
                return False
        return True
