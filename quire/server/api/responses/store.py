"""Where responses are kept: `ResponseStore` over a shelf, which is memory (here) or a file (`sqlite_shelf`).

A response belongs to a tenant and is not found by others. When there are too many, or too many bytes, the tenant that
has most loses what it has not used for longest; what is older than the limit goes, too. Owned by the routes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import msgspec

from quire.logger import get_logger
from quire.server.api.responses.items import Item

logger = get_logger(__name__)

T = TypeVar("T")
Key = tuple[str, str]
"""(tenant, id of the response)."""

FORMAT = 1
RECORD_BYTES = 1024
"""What a response takes besides its record, in the comparison of tenants."""


class StoredResponse(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """A response as it is kept.

    Attributes:
        response: the object as clients get it.
        input: items of the request, earlier turns left out.
        format: of this record.
    """

    response: dict[str, Any]
    input: list[Item]
    format: int = FORMAT

    @property
    def response_id(self) -> str:
        """Its id."""
        return str(self.response["id"])

    @property
    def previous_id(self) -> str | None:
        """Id of the turn before; None = it is the first."""
        previous = self.response.get("previous_response_id")
        return previous if isinstance(previous, str) else None


encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(StoredResponse).decode


@dataclass(frozen=True, slots=True)
class ShelfLimits:
    """How much is kept: responses, bytes of them, and for how many seconds (0 = for ever)."""

    max_responses: int
    max_bytes: int
    max_age_s: int

    def check(self, record: bytes) -> None:
        """Raise `ShelfError` when `record` does not fit by itself."""
        if len(record) > self.max_bytes:
            raise ShelfError(f"it has {len(record)} bytes, more than response_store_max_bytes={self.max_bytes}")

    def is_old(self, created_s: float, now_s: float) -> bool:
        """True for what is kept no longer."""
        return bool(self.max_age_s) and now_s - created_s > self.max_age_s


class ShelfError(Exception):
    """A record cannot be kept, read or deleted."""


class StoreBackend(Protocol):
    """Keeps bytes by key. Called from one thread at a time."""

    def put(self, key: Key, record: bytes, now_s: float) -> None:
        """Keep `record`, in place of what `key` had; others go if there are too many.

        Raises:
            ShelfError: it could not be kept.
        """

    def get(self, key: Key, now_s: float) -> bytes | None:
        """The record, which is used by that; None = there is none.

        Raises:
            ShelfError: it cannot be read.
        """

    def delete(self, key: Key) -> bool:
        """Forget a record; False = there was none.

        Raises:
            ShelfError: it could not be deleted.
        """

    def close(self) -> None:
        """Nothing more is asked."""


class TenantUsage:
    """What each tenant has on a shelf."""

    def __init__(self) -> None:
        self.num_responses = self.num_bytes = 0
        self._by_tenant: dict[str, int] = {}

    def add(self, tenant: str, num_bytes: int, num_responses: int = 1) -> None:
        """Responses were put there."""
        self.num_responses += num_responses
        self.num_bytes += num_bytes
        weight = self._by_tenant.get(tenant, 0) + num_bytes + num_responses * RECORD_BYTES
        self._by_tenant[tenant] = weight
        if not weight:
            del self._by_tenant[tenant]

    def remove(self, tenant: str, num_bytes: int) -> None:
        """A response was taken away."""
        self.add(tenant, -num_bytes, -1)

    def copy(self) -> TenantUsage:
        """The same, apart."""
        other = TenantUsage()
        other.num_responses, other.num_bytes = self.num_responses, self.num_bytes
        other._by_tenant = dict(self._by_tenant)
        return other

    def is_over(self, limits: ShelfLimits) -> bool:
        """True when something has to go."""
        return self.num_responses > limits.max_responses or self.num_bytes > limits.max_bytes

    def largest(self) -> str:
        """The tenant that has most, which gives way: no tenant can fill the store alone."""
        return max(self._by_tenant, key=self._by_tenant.__getitem__)


@dataclass(slots=True)
class _Record:
    data: bytes
    created_s: float


class MemoryShelf:
    """Keeps records until the process ends.

    Args:
        limits: of what is kept.
    """

    def __init__(self, limits: ShelfLimits) -> None:
        self._limits = limits
        self._records: dict[str, dict[str, _Record]] = {}  # by tenant, longest unused first
        self._shares = TenantUsage()

    def put(self, key: Key, record: bytes, now_s: float) -> None:
        """As `StoreBackend.put`."""
        self._limits.check(record)
        self.delete(key)
        tenant, name = key
        self._records.setdefault(tenant, {})[name] = _Record(record, now_s)
        self._shares.add(tenant, len(record))
        while self._shares.is_over(self._limits):
            largest = self._shares.largest()
            self.delete((largest, next(iter(self._records[largest]))))

    def get(self, key: Key, now_s: float) -> bytes | None:
        """As `StoreBackend.get`."""
        records = self._records.get(key[0], {})
        record = records.pop(key[1], None)
        if record is None:
            return None
        records[key[1]] = record
        if self._limits.is_old(record.created_s, now_s):
            self.delete(key)
            return None
        return record.data

    def delete(self, key: Key) -> bool:
        """As `StoreBackend.delete`."""
        tenant, name = key
        record = self._records.get(tenant, {}).pop(name, None)
        if record is None:
            return False
        self._shares.remove(tenant, len(record.data))
        if not self._records[tenant]:
            del self._records[tenant]
        return True

    def close(self) -> None:
        """As `StoreBackend.close`."""
        self._records.clear()


class BrokenChainError(Exception):
    """An earlier turn cannot be had.

    Args:
        response_id: of the turn; `is_too_long`: there are more turns, or more bytes of them, than are read.
    """

    def __init__(self, response_id: str, *, is_too_long: bool = False) -> None:
        super().__init__(response_id)
        self.response_id = response_id
        self.is_too_long = is_too_long


class ResponseStore:
    """Responses by tenant and id.

    Args:
        shelf: keeps them; asked in a thread of its own, so that no stream waits for it.
        clock: Unix time, seconds.
    """

    def __init__(self, shelf: StoreBackend, clock: Callable[[], float] = time.time) -> None:
        self._shelf = shelf
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="responses")

    async def put(self, tenant: str, stored: StoredResponse) -> None:
        """Keep a response.

        Raises:
            ShelfError: it could not be kept.
        """
        await self._run(lambda: self._shelf.put((tenant, stored.response_id), encode(stored), self._clock()))

    async def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        """A response; None = this tenant has no such."""
        return await self._run(lambda: self._read((tenant, response_id)))

    async def chain(self, tenant: str, response_id: str, max_turns: int, max_bytes: int) -> list[StoredResponse]:
        """A response and the turns before it, first turn first.

        Raises:
            BrokenChainError: one of them is gone, or they are too many or too long.
        """
        return await self._run(lambda: self._read_chain(tenant, response_id, max_turns, max_bytes))

    async def delete(self, tenant: str, response_id: str) -> bool:
        """Forget a response; False = this tenant has no such."""
        return await self._run(lambda: self._shelf.delete((tenant, response_id)))

    async def close(self) -> None:
        """Nothing more is asked."""
        await self._run(self._shelf.close)
        self._thread.shutdown(wait=False)

    def _read(self, key: Key) -> StoredResponse | None:
        record = self._shelf.get(key, self._clock())
        return None if record is None else _checked(record)

    def _read_chain(self, tenant: str, response_id: str, max_turns: int, max_bytes: int) -> list[StoredResponse]:
        turns: list[StoredResponse] = []
        num_bytes = 0
        wanted: str | None = response_id
        while wanted is not None:
            record = self._shelf.get((tenant, wanted), self._clock())
            stored = None if record is None else _checked(record)
            if record is None or stored is None:
                raise BrokenChainError(wanted)
            num_bytes += len(record)
            if len(turns) == max_turns or num_bytes > max_bytes:
                raise BrokenChainError(wanted, is_too_long=True)
            turns.append(stored)
            wanted = stored.previous_id
        return turns[::-1]

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def _checked(record: bytes) -> StoredResponse | None:
    """A record as it was kept; None when it was not made by us."""
    try:
        stored = _decode(record)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        logger.error("a stored response cannot be read: %s", error)
        return None
    if stored.format != FORMAT or not isinstance(stored.response.get("id"), str):
        logger.error("a stored response has format %d, not %d", stored.format, FORMAT)
        return None
    return stored
