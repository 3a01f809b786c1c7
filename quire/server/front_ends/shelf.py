"""Stored responses of several front ends: the owner has the shelf, `RemoteShelf` is a front end's way to it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor

from quire.config.server import ResponsesConfig
from quire.engine.front_ends.messages import OwnerAnswer, OwnerCall
from quire.engine.front_ends.remote import RemoteEngine
from quire.errors import EngineDeadError, QuireError
from quire.server.api.responses.keeping import open_shelf
from quire.server.api.responses.store import Key, ShelfError, StoreBackend

ANSWER_TIMEOUT_S = 60.0


class RemoteShelf:
    """A `StoreBackend` whose records the owner has. Called in a thread, while the loop runs.

    Args:
        owner: asked on `loop`.
    """

    def __init__(self, owner: RemoteEngine) -> None:
        self._owner = owner
        self._loop = asyncio.get_running_loop()

    def put(self, key: Key, record: bytes, now_s: float) -> None:
        """As `StoreBackend`."""
        self._ask("shelf_put", key, now_s, record)

    def get(self, key: Key, now_s: float) -> bytes | None:
        """As `StoreBackend`."""
        return self._ask("shelf_get", key, now_s).data

    def delete(self, key: Key) -> bool:
        """As `StoreBackend`."""
        return bool(self._ask("shelf_delete", key, 0.0).value)

    def close(self) -> None:
        """As `StoreBackend`; the others go on."""

    def _ask(self, method: str, key: Key, now_s: float, record: bytes = b"") -> OwnerAnswer:
        asked = asyncio.run_coroutine_threadsafe(
            self._owner.ask(method, key=key, seconds=now_s, data=record), self._loop
        )
        try:
            return asked.result(ANSWER_TIMEOUT_S)
        except (QuireError, TimeoutError) as error:
            raise ShelfError(error.message if isinstance(error, QuireError) else "the owner does not answer") from None


class OwnedShelf:
    """The shelf of all front ends, in the owner. Owns a thread, in which it is asked.

    Args:
        config: where responses are kept.

    Raises:
        ConfigError: the file cannot be used.
    """

    def __init__(self, config: ResponsesConfig) -> None:
        self._shelf: StoreBackend | None = open_shelf(config)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="responses")

    @property
    def calls(self) -> dict[str, Callable[[int, OwnerCall], Awaitable[OwnerAnswer]]]:
        """What front ends call, by name."""
        return {} if self._shelf is None else dict.fromkeys(("shelf_put", "shelf_get", "shelf_delete"), self._answer)

    async def close(self) -> None:
        """Nothing more is asked."""
        if self._shelf is not None:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._shelf.close)
        self._thread.shutdown(wait=False)

    async def _answer(self, serial: int, call: OwnerCall) -> OwnerAnswer:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._run, call)

    def _run(self, call: OwnerCall) -> OwnerAnswer:
        assert self._shelf is not None, "there are no calls without one"
        try:
            if call.method == "shelf_get":
                return OwnerAnswer(call.call_id, data=self._shelf.get(call.key, call.seconds))
            if call.method == "shelf_delete":
                return OwnerAnswer(call.call_id, value=self._shelf.delete(call.key))
            self._shelf.put(call.key, call.data, call.seconds)
        except ShelfError as error:
            raise EngineDeadError(str(error)) from None
        return OwnerAnswer(call.call_id)
