"""KeptResponses: the responses of one server: the store, those that run in the background, and what is said of them.

Made once for a server, whatever models it has; used by the routes of responses. Owns the store and the background.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from quire.config.server import ResponsesConfig
from quire.logger import get_logger
from quire.server.api.responses.background import Background
from quire.server.api.responses.envelope import CUT_OFF, ENDED, FAILED, NOT_KEPT, with_status
from quire.server.api.responses.history import Turn
from quire.server.api.responses.keeping import open_store
from quire.server.api.responses.store import Key, ResponseStore, ShelfError, StoreBackend, StoredResponse
from quire.server.http.errors import NOT_FOUND, STORE_FAILED, ApiError
from quire.utils.checks import shown

logger = get_logger(__name__)

STORE_MESSAGE = "the response store cannot be read or written; see the server's log"
RETRY_AFTER_S = 5.0


class KeptResponses:
    """Responses that outlive their requests.

    Args:
        config: where they are kept.
        shelf: kept there instead; None = as the settings say.

    Attributes:
        store: None = nowhere.
        background: those that run.

    Raises:
        ConfigError: the file of the store cannot be used.
    """

    def __init__(self, config: ResponsesConfig, shelf: StoreBackend | None = None) -> None:
        self.store = open_store(config) if shelf is None else ResponseStore(shelf)
        self.background = Background()

    async def close(self) -> None:
        """End what runs in the background, and the store."""
        await self.background.close()
        if self.store is not None:
            await self.store.close()

    async def find(self, tenant: str, response_id: str) -> StoredResponse:
        """A response of this tenant.

        Raises:
            ApiError: there is no such.
        """
        key = tenant, response_id
        stored = await self.stored(key)
        if stored is None:
            raise unknown(response_id)
        live = self.background.get(key)
        if live is not None:
            stored.response = live.response
        elif stored.response.get("status") not in ENDED and not self.background.is_taken(key):
            why = CUT_OFF if self.background.could_be_kept(key) else NOT_KEPT  # or the process that made it is gone
            stored.response = with_status(stored.response, FAILED, why)
        return stored

    async def stored(self, key: Key) -> StoredResponse | None:
        """What the store has.

        Raises:
            ApiError: it cannot be read.
        """
        with store_failures():
            return None if self.store is None else await self.store.get(*key)

    async def save(self, tenant: str, turn: Turn, response: dict[str, Any]) -> None:
        """Keep a response; if that fails the client has its answer all the same, and the log says why."""
        try:
            await self.put(tenant, turn, response)
        except ShelfError as error:
            logger.error("response %s could not be stored: %s", response["id"], error)

    async def put(self, tenant: str, turn: Turn, response: dict[str, Any]) -> None:
        """Keep a response; raises `ShelfError`."""
        assert self.store is not None, "it is known to be kept"
        await self.store.put(tenant, StoredResponse(response=response, input=turn.items))


@contextmanager
def store_failures() -> Iterator[None]:
    """Failures of the store are returned to the client, and their reasons logged."""
    try:
        yield
    except ShelfError as error:
        logger.error("the response store: %s", error)
        raise ApiError(STORE_FAILED, STORE_MESSAGE, retry_after_s=RETRY_AFTER_S) from None


def unknown(response_id: str) -> ApiError:
    """There is no such response."""
    return ApiError(NOT_FOUND, f"there is no response {shown(response_id)}", param="response_id")
