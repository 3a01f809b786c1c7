"""KeyWatch: reads the key file again when it has changed. Owns its task and what it last saw of the file.

A file is read once it looks the same at two looks in a row, so that one that is being written is left alone. One that
cannot be used changes nothing: its error is logged, and the keys from before stay valid.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from quire.errors import QuireClientError
from quire.logger import get_logger
from quire.server.http.keys import ApiKeys
from quire.server.http.tenants import Tenants

logger = get_logger(__name__)

INTERVAL_S = 1.0
Signature = tuple[int, int, int] | None


class KeyWatch:
    """Watches one file while `run` runs.

    Args:
        path: of the key file.
        read: reads and checks all keys.
        tenants: updated with them.
    """

    def __init__(self, path: str, read: Callable[[], ApiKeys], tenants: Tenants) -> None:
        self._path = Path(path)
        self._read = read
        self._tenants = tenants
        self._known = self._seen = self._signature()

    async def run(self, interval_s: float = INTERVAL_S) -> None:
        """Look every `interval_s` seconds, until cancelled."""
        while True:
            await asyncio.sleep(interval_s)
            if self.is_due():
                self.use(await asyncio.to_thread(self.read))

    def is_due(self) -> bool:
        """Look at the file; True when it has changed and looks as it did at the last look."""
        signature, before = self._signature(), self._seen
        self._seen = signature
        return signature != self._known and signature == before

    def read(self) -> ApiKeys | None:
        """The keys as they are now; None, and a line in the log, when they cannot be used."""
        self._known = self._seen
        try:
            return self._read()
        except QuireClientError as error:
            logger.error("keeping the previous keys: %s", error)
            return None

    def use(self, keys: ApiKeys | None) -> None:
        """Put keys in force."""
        if keys is not None:
            self._tenants.replace(keys)
            logger.info("reloaded %s: keys of %d tenants", self._path, keys.num_tenants)

    def _signature(self) -> Signature:
        try:
            stat = self._path.stat()
        except OSError:
            return None
        return stat.st_mtime_ns, stat.st_size, stat.st_ino
