"""MooncakeStoreConnector: blocks in Mooncake's distributed store, which engines share; by its package.

A master keeps account of who has what; every engine gives `global_segment_size` bytes of memory to the store. The keys
of the settings are those of Mooncake's own configuration. A block is one value with a checksum, as in `redis`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from quire.config.kv_transfer import FIELD
from quire.errors import ConfigError
from quire.kv_transfer.block_values import key_of, pack, unpack
from quire.kv_transfer.connector import KVConnectorRole
from quire.kv_transfer.layout import KVCacheLayout
from quire.kv_transfer.server_pause import ServerPause
from quire.kv_transfer.stored_blocks import StoredBlocks
from quire.logger import get_logger
from quire.utils.checks import shown

logger = get_logger(__name__)

MIB = 1 << 20
LOOKUP_BUFFER_BYTES = 16 * MIB
"""Of the scheduler's half, which reads no blocks."""
RPC_FAIL = -900
"""What a call returns when the master does not answer, which may take it seconds."""
NUM_AT_ONCE = 256
"""Names that are looked up at once."""


class MooncakeStoreConnector(StoredBlocks):
    """Blocks in the store whose master is at `master_server_address`."""

    quire_contract = 1
    extra_config_keys = (
        "master_server_address", "metadata_server", "local_hostname", "protocol", "device_name", "global_segment_size",
        "local_buffer_size",
    )  # fmt: skip

    def open_storage(self) -> MooncakeBlocks:
        """As `StoredBlocks`."""
        try:
            from mooncake.store import MooncakeDistributedStore
        except ImportError as error:
            raise ConfigError(
                f"{FIELD}: MooncakeStoreConnector needs the package mooncake-transfer-engine: {error}",
                hint="pip install mooncake-transfer-engine-non-cuda==0.3.13.post1, apt-get install libibverbs1",
                field=FIELD,
            ) from error
        is_worker = self.role is KVConnectorRole.WORKER
        master = self._text("master_server_address", "127.0.0.1:50051")
        store = MooncakeDistributedStore()
        status = store.setup(
            self._text("local_hostname", self.config.kv_ip), self._text("metadata_server", "P2PHANDSHAKE"),
            self._size("global_segment_size", 1024 * MIB) if is_worker else 0,
            self._size("local_buffer_size", 128 * MIB) if is_worker else LOOKUP_BUFFER_BYTES,
            self._text("protocol", "tcp"), self._text("device_name", ""), master,
        )  # fmt: skip
        if status:
            raise ConfigError(
                f"{FIELD}: Mooncake's store cannot be used with the master at {master} ({status})",
                hint="start it: mooncake_master --rpc_address=127.0.0.1 --rpc_port=50051", field=FIELD,
            )  # fmt: skip
        return MooncakeBlocks(store, self.layout)

    def _text(self, name: str, default: str) -> str:
        value = self.config.kv_connector_extra_config.get(name, default)
        if not isinstance(value, str):
            raise ConfigError(
                f"{FIELD}: {name}={shown(value)} is not a string", hint=f"for example {default!r}", field=FIELD
            )
        return value

    def _size(self, name: str, default: int) -> int:
        value = self.config.kv_connector_extra_config.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 1 << 50:
            raise ConfigError(
                f"{FIELD}: {name}={shown(value)} is not a number of bytes",
                hint=f"leave it out for {default}",
                field=FIELD,
            )
        return value


class MooncakeBlocks:
    """Blocks in a store; used by one thread.

    Args:
        store: a `MooncakeDistributedStore`, set up.
    """

    def __init__(self, store: Any, layout: KVCacheLayout) -> None:
        self._store = store
        self._digest = layout.digest
        self._pause = ServerPause()

    def num_first(self, names: Sequence[bytes]) -> int:
        """As `BlockStorage`; a store that does not answer has none."""
        num_found = 0
        for start in range(0, len(names), NUM_AT_ONCE):
            try:
                keys = [key_of(self._digest, name) for name in names[start : start + NUM_AT_ONCE]]
                found = self._exist(keys)
            except OSError as error:
                logger.warning("blocks cannot be looked up: %s", error)
                break
            num_found += next((number for number, is_there in enumerate(found) if is_there != 1), len(found))
            if num_found < start + len(keys):
                break
        return num_found

    def _exist(self, keys: list[str]) -> list[int]:
        """1 = it is there. Raises OSError when the master does not answer."""
        found: list[int] = self._call(self._store.batch_is_exist, keys)
        if RPC_FAIL in found:
            self._pause.begin()
            raise ConnectionError("the master of the store does not answer")
        return found

    def store(self, name: bytes, tensors: Sequence[np.ndarray]) -> None:
        """As `BlockStorage`."""
        key = key_of(self._digest, name)
        status = self._call(self._store.put, key, pack(key, tensors).tobytes())
        if status == RPC_FAIL:
            self._pause.begin()
        if status:
            raise OSError(f"block {name.hex()[:16]}: the store did not take it ({status})")

    def load(self, name: bytes, shapes: Sequence[tuple[int, ...]]) -> list[np.ndarray]:
        """As `BlockStorage`."""
        key = key_of(self._digest, name)
        value = self._call(self._store.get, key) if self._exist([key]) == [1] else b""
        if not value:
            raise OSError(f"block {name.hex()[:16]} is not in the store any longer")
        return unpack(key, np.frombuffer(value, dtype=np.uint8), shapes)

    def remove(self, name: bytes) -> None:
        """As `BlockStorage`; a block that is leased stays a while."""
        try:
            status = self._call(self._store.remove, key_of(self._digest, name))
        except OSError as error:
            status = error
        if status:
            logger.warning("Mooncake's store did not remove a damaged block: %s", status)

    def _call(self, call: Any, *args: Any) -> Any:
        self._pause.check()
        try:
            return call(*args)
        except Exception as error:  # a binding may raise anything
            self._pause.begin()
            raise OSError(f"{type(error).__name__}: {error}") from error
