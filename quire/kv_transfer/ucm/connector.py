"""UCMConnector: keeps blocks in the stores of UCM (Unified Cache Manager), through its own `UCMConnector`, unmodified.

UCM 0.8.1 has programs for Python 3.12 alone and imports vLLM, so it runs in a process of its own (`side`) with names of
vLLM that exist there only; blocks travel through memory that both map. Each half has such a process: the scheduler's
for lookups, the worker's for loads and saves. Blocks carry names and checksums (`StagedBlocks`).
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from quire.config.kv_transfer import FIELD, KVTransferConfig
from quire.core.kv_transfer import KVConnectorOutput
from quire.errors import ConfigError
from quire.kv_transfer.connector import BlockAccess, KVConnectorRole, Tensor
from quire.kv_transfer.layout import KVCacheLayout
from quire.kv_transfer.requests import ConnectorRequest
from quire.kv_transfer.staged_blocks import StagedBlocks, staged_width
from quire.kv_transfer.staged_transfers import STAGED_BYTES, StagedTransfers, TokenBlocks, hashed_salt
from quire.kv_transfer.ucm.link import SideProcess
from quire.logger import get_logger

logger = get_logger(__name__)

OWN = {"side_python": "python3.12", "side_timeout_s": 30.0, "side_log": None}
"""Settings that are not UCM's, and their defaults."""
PAGE_BYTES = 4096
"""UCM's stores read and write multiples of it."""


@dataclass(slots=True)
class _Lookup:
    """What UCM has of a request: `found` is tokens from the first on."""

    found: Future[int]
    num_found: int = 0
    is_over: bool = False


class UCMConnector(StagedTransfers):
    """Blocks in a store of UCM."""

    program = "UCM"
    first_slot = 1  # the first is the null block of vLLM
    quire_contract = 1
    extra_config_keys = None  # UCM's own, which it checks

    def __init__(self, config: KVTransferConfig, role: KVConnectorRole, layout: KVCacheLayout) -> None:
        super().__init__(config, role, layout)
        self._own, self._ucm = _split(config.kv_connector_extra_config)
        self._lookups: dict[str, _Lookup] = {}
        self._side: SideProcess | None = None
        self._memory_fd = -1
        if role is KVConnectorRole.SCHEDULER:
            self._side = self._start(width=PAGE_BYTES, num_slots=1, memory_fd=-1)

    def _start(self, *, width: int, num_slots: int, memory_fd: int) -> SideProcess:
        """UCM's process. Raises ConfigError: it does not start, or UCM refuses its settings."""
        size = self.layout.block_size
        options = {
            "model": f"quire-{self.layout.digest[:32]}", "block_size": size, "width": width, "num_slots": num_slots,
            "engine_id": self.config.engine_id or f"quire-{os.getpid()}", "config": _for_store(self._ucm, size * width),
        }  # fmt: skip
        side = SideProcess(
            str(self._own["side_python"]), options, memory_fd, float(self._own["side_timeout_s"]), self._own["side_log"]
        )
        try:
            side.start()
        except (OSError, ConfigError) as error:
            side.close()
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(
                f"{FIELD}: UCM cannot be used: {error}",
                hint="give side_python, a Python 3.12 that has UCM, and side_log, a file for what it prints "
                "(docs/how-to/connectors.md)",
                field=FIELD,
            ) from None
        return side

    # --- the scheduler's half ---

    def on_new_request(self, request: ConnectorRequest) -> None:
        """As `KVConnector`: the lookup begins before the request is asked for."""
        if self.config.is_kv_consumer:
            self._look(request)

    def _look(self, request: ConnectorRequest) -> _Lookup | None:
        """The request's lookup; None = it has no whole block."""
        lookup = self._lookups.get(request.request_id)
        if lookup is None and request.num_tokens > self.layout.block_size:
            tokens, salt = request.all_token_ids, hashed_salt(request)
            lookup = self._lookups[request.request_id] = _Lookup(self.threads.submit(self._find, tokens, salt))
        return lookup

    def _find(self, token_ids: list[int], salt: str | None) -> int:
        assert self._side is not None, "of the scheduler's half"
        try:
            return int(self._side.ask("lookup", tokens=token_ids, salt=salt)["tokens"])
        except OSError as error:
            logger.warning("UCM cannot be asked for KV blocks, which are computed: %s", error)
            return 0

    def get_num_new_matched_tokens(
        self, request: ConnectorRequest, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """As `KVConnector`; the store is looked at on the thread."""
        lookup = self._look(request)
        if lookup is None or lookup.is_over:
            return 0, False
        if not lookup.found.done():
            return None, True
        lookup.num_found = lookup.found.result()
        num_tokens = lookup.num_found - num_computed_tokens // self.layout.block_size * self.layout.block_size
        return (num_tokens, True) if num_tokens > 0 else (0, False)

    def update_state_after_alloc(
        self, request: ConnectorRequest, block_ids: Sequence[int], num_external_tokens: int
    ) -> None:
        """As `KVConnector`."""
        size = self.layout.block_size
        first = len(block_ids) - num_external_tokens // size
        self._lookups[request.request_id].is_over = True
        self.loads[request.request_id] = TokenBlocks(
            request.all_token_ids[: len(block_ids) * size], hashed_salt(request),
            request.block_hashes[first : len(block_ids)], block_ids[first:],
        )  # fmt: skip

    def request_finished(
        self, request: ConnectorRequest, block_ids: Sequence[int]
    ) -> tuple[bool, Mapping[str, Any] | None]:
        """As `KVConnector`; blocks that were found are not saved again."""
        size, lookup = self.layout.block_size, self._lookups.pop(request.request_id, None)
        first = 0 if lookup is None else lookup.num_found // size
        if not self.config.is_kv_producer or len(block_ids) <= first:
            return False, None
        self.saves[request.request_id] = TokenBlocks(
            request.all_token_ids[: len(block_ids) * size], hashed_salt(request),
            request.block_hashes[first : len(block_ids)], block_ids[first:],
        )  # fmt: skip
        return True, None

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        """As `KVConnector`. What could not be loaded is saved again."""
        if output.invalid_block_ids:
            for lookup in self._lookups.values():
                lookup.num_found = 0

    # --- the worker's half ---

    def register_kv_caches(self, kv_caches: Mapping[str, Tensor], blocks: BlockAccess) -> None:
        """As `KVConnector`.

        Raises:
            ConfigError: UCM cannot be used.
        """
        super().register_kv_caches(kv_caches, blocks)
        shapes, size = [tuple(part.shape[1:]) for part in blocks.read([0])], self.layout.block_size
        width = staged_width(shapes, size, PAGE_BYTES)
        num_slots = self.first_slot + max(1, STAGED_BYTES // (width * size))
        memory_fd = os.memfd_create("quire-ucm")
        try:
            os.ftruncate(memory_fd, num_slots * width * size)
            memory = mmap.mmap(memory_fd, 0)
            self.staged = StagedBlocks(shapes, size, num_slots, width=width, memory=memory)
            self._side = self._start(width=width, num_slots=num_slots, memory_fd=memory_fd)
        except BaseException:
            os.close(memory_fd)
            raise
        self._memory_fd = memory_fd  # a process that is started again maps it, too

    def fetch(self, part: TokenBlocks) -> set[int]:
        """As `StagedTransfers`."""
        return set(self._ask("load", part)["lost"])

    def give(self, part: TokenBlocks) -> None:
        """As `StagedTransfers`."""
        if not self._ask("save", part)["is_kept"]:
            raise OSError("the store did not take the blocks")

    def _ask(self, call: str, part: TokenBlocks) -> dict[str, Any]:
        assert self._side is not None, "made with the cache"
        first, slots = self.first_token(part), list(self.slots(part))
        return self._side.ask(call, tokens=part.token_ids, salt=part.salt, first=first, slots=slots)

    # --- both ---

    def shutdown(self) -> None:
        """As `KVConnector`."""
        super().shutdown()
        if self._side is not None:
            self._side.close()
        if self._memory_fd >= 0:
            os.close(self._memory_fd)
            self._memory_fd = -1


def _split(extra: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Quire's settings, and UCM's.

    Raises:
        ConfigError: one cannot be used here.
    """
    own, ucm = {**OWN, **{name: extra[name] for name in OWN if name in extra}}, dict(extra)
    for name in OWN:
        ucm.pop(name, None)
    timeout = own["side_timeout_s"]
    wrong = {
        "side_python": not (isinstance(own["side_python"], str) and own["side_python"]),
        "side_timeout_s": isinstance(timeout, bool) or not (isinstance(timeout, int | float) and timeout > 0),
        "side_log": not (own["side_log"] is None or isinstance(own["side_log"], str)),
        "UCM_CONFIG_FILE": "UCM_CONFIG_FILE" in ucm,
        "use_layerwise": bool(ucm.get("use_layerwise", False)),
        "ucm_connectors": not (isinstance(ucm.get("ucm_connectors"), list) and len(ucm["ucm_connectors"]) == 1),
    }
    hints = {
        "UCM_CONFIG_FILE": "write what is in that file into kv_connector_extra_config",
        "use_layerwise": "leave it out: whole blocks are moved",
        "ucm_connectors": "give a list with one store, as in docs/how-to/connectors.md",
    }
    for name, is_wrong in wrong.items():
        if is_wrong:
            raise ConfigError(
                f"{FIELD}: {name} of kv_connector_extra_config cannot be used so by UCMConnector",
                hint=hints.get(name, f"the default is {OWN.get(name)!r}"), field=FIELD,
            )  # fmt: skip
    return own, {**ucm, "use_layerwise": False, "enable_event_sync": False}


def _for_store(ucm: Mapping[str, Any], num_bytes: int) -> dict[str, Any]:
    """UCM's settings, with the size of a block where its Posix store, used alone, does not set it."""
    (store,) = ucm["ucm_connectors"]
    inner = dict(store.get("ucm_connector_config") or {})
    if inner.get("store_pipeline") == "Posix":
        inner.setdefault("tensor_size", num_bytes)
        inner.setdefault("io_direct", False)
    return {**ucm, "ucm_connectors": [{**store, "ucm_connector_config": inner}]}
