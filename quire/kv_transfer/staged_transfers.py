"""StagedTransfers: what connectors share whose other side moves memory by itself, in terms of tokens.

The base of `lmcache` and `ucm`. Blocks pass through `StagedBlocks`, in parts that there is room for: never the cache
itself. A block that another program lost, mixed up or tore is computed; whatever fails is counted and logged.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from quire.config.kv_transfer import KVTransferConfig
from quire.kv_transfer.background import BackgroundTransfers
from quire.kv_transfer.block_files import DamagedBlockError
from quire.kv_transfer.connector import KVConnectorRole
from quire.kv_transfer.layout import KVCacheLayout
from quire.kv_transfer.requests import ConnectorRequest
from quire.kv_transfer.staged_blocks import StagedBlocks
from quire.logger import get_logger

logger = get_logger(__name__)

STAGED_BYTES = 32 << 20
"""Most memory through which blocks pass, unless the least part needs more."""
NOT_WANTED = -1
"""In place of a block's number: this block is not loaded."""


@dataclass(frozen=True, slots=True)
class TokenBlocks:
    """Blocks of one request, which are loaded or saved.

    Attributes:
        token_ids: from the request's first token to the end of the last block.
        salt: keeps tenants apart.
        names, block_ids: of the last blocks.
        session: the other side's name of the request, if it has one.
    """

    token_ids: list[int]
    salt: str | None
    names: Sequence[bytes]
    block_ids: Sequence[int]
    session: str = ""


class StagedTransfers(BackgroundTransfers):
    """Loads and saves through `staged`, which the worker's half makes with the cache.

    Attributes:
        program: the other side, in messages; in lower case, the first word of its counts.
        first_slot: number of the first slot that is used.
    """

    program: str
    first_slot = 0

    def __init__(self, config: KVTransferConfig, role: KVConnectorRole, layout: KVCacheLayout) -> None:
        super().__init__(config, role, layout)
        self.staged: StagedBlocks | None = None
        self._counts: dict[str, float] = {}

    def fetch(self, part: TokenBlocks) -> Collection[int]:
        """Have the other side write a part's blocks to the slots from `first_slot` on; on the thread.

        Returns:
            Slots in which nothing arrived, as far as the other side says.

        Raises:
            OSError: it did not do so.
        """
        raise NotImplementedError

    def give(self, part: TokenBlocks) -> None:
        """Have the other side keep the blocks in the slots; on the thread. Raises OSError when it did not."""
        raise NotImplementedError

    def first_token(self, part: TokenBlocks) -> int:
        """Tokens before the first of its blocks."""
        return len(part.token_ids) - len(part.names) * self.layout.block_size

    def slots(self, part: TokenBlocks) -> range:
        """Where its blocks are while it is moved."""
        return range(self.first_slot, self.first_slot + len(part.names))

    def load(self, request_id: str, what: TokenBlocks) -> set[int]:
        """As `BackgroundTransfers`."""
        lost = {block_id for block_id in what.block_ids if block_id != NOT_WANTED}
        try:
            for part in self._parts(what):
                lost.difference_update(self._load(part))
        except Exception as error:  # of another program, or a socket; what is lost is computed
            self.count("failed_loads")
            logger.warning("request %s: KV blocks cannot be loaded from %s: %s", request_id, self.program, error)
        return lost

    def save(self, request_id: str, what: TokenBlocks) -> bool:
        """As `BackgroundTransfers`."""
        try:
            for part in self._parts(what):
                self._save(part)
                self.count("saved_blocks", len(part.names))
        except Exception as error:  # as above
            self.count("failed_saves")
            logger.warning("request %s: KV blocks cannot be saved to %s: %s", request_id, self.program, error)
            return False
        return True

    def _parts(self, what: TokenBlocks) -> Iterator[TokenBlocks]:
        """`what` in parts that the staged memory has room for."""
        assert self.staged is not None, "made with the cache"
        step, size, num = len(self.staged.tensor) - self.first_slot, self.layout.block_size, len(what.names)
        for first in range(0, num, step):
            end = min(first + step, num)
            token_ids = what.token_ids[: len(what.token_ids) - (num - end) * size]
            yield replace(what, token_ids=token_ids, names=what.names[first:end], block_ids=what.block_ids[first:end])

    def _load(self, part: TokenBlocks) -> list[int]:
        """The blocks that came, each in its place in the cache."""
        assert self.staged is not None and self.blocks is not None, "made with the cache"
        for slot in self.slots(part):
            self.staged.clear(slot)
        lost, loaded = self.fetch(part), []
        for slot, name, block_id in zip(self.slots(part), part.names, part.block_ids, strict=True):
            if block_id == NOT_WANTED or slot in lost:
                continue
            try:
                self.blocks.write([block_id], self.staged.take(slot, name))
                loaded.append(block_id)
            except DamagedBlockError as error:
                self.count("damaged_blocks")
                logger.warning("%s: %s; it is computed", self.program, error)
        return loaded

    def _save(self, part: TokenBlocks) -> None:
        assert self.staged is not None and self.blocks is not None, "made with the cache"
        for slot, name, block_id in zip(self.slots(part), part.names, part.block_ids, strict=True):
            self.staged.put(slot, name, self.blocks.read([block_id]))
        self.give(part)

    def count(self, what: str, number: float = 1) -> None:
        """Add to one of the connector's counters."""
        name = f"{self.program.lower()}_{what}"
        self._counts[name] = self._counts.get(name, 0) + number

    def get_kv_connector_stats(self) -> Mapping[str, float]:
        """As `KVConnector`."""
        counts, self._counts = self._counts, {}
        return counts


def hashed_salt(request: ConnectorRequest) -> str | None:
    """A request's salt for other programs: they are not given the salt itself, and may not allow its characters."""
    salt = request.cache_salt
    return None if salt is None else hashlib.blake2b(salt.encode(), digest_size=16).hexdigest()
