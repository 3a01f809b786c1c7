"""LMCacheMPConnector: keeps blocks in an LMCache server, through LMCache's own adapters for engines.

The names and settings are vLLM's (`lmcache.mp.host`, `lmcache.mp.port`); the server is `lmcache server`, as it is.
LMCache names what it keeps by tokens, salt and model, in chunks of some blocks: the model's name here is the digest of
the layout, so what another build or model stored is not found. It moves memory by itself, so it is given `StagedBlocks`
and never the cache. A server that is gone costs computations: LMCache's heartbeat notices it, and when it is back.
"""

from __future__ import annotations

import importlib
import os
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from quire.config.kv_transfer import FIELD, KVTransferConfig
from quire.core.kv_transfer import KVConnectorOutput
from quire.errors import ConfigError
from quire.kv_transfer.connector import BlockAccess, KVConnectorRole, Tensor
from quire.kv_transfer.layout import KVCacheLayout
from quire.kv_transfer.requests import ConnectorRequest
from quire.kv_transfer.staged_blocks import StagedBlocks, staged_width
from quire.kv_transfer.staged_transfers import (
    NOT_WANTED,
    STAGED_BYTES,
    StagedTransfers,
    TokenBlocks,
    hashed_salt,
)
from quire.logger import get_logger
from quire.utils.checks import shown

logger = get_logger(__name__)

ADAPTERS = "lmcache.integration.vllm.vllm_multi_process_adapter"
"""Of LMCache; despite its name it does not need vLLM."""
PREFIX = "lmcache.mp."
DEFAULTS: Mapping[str, Any] = {
    "host": "tcp://localhost", "port": 5555, "mq_timeout": 5.0, "heartbeat_interval": 5.0,
    "mp_transfer_mode": "lmcache_driven", "isolated_ipc": False, "hash_algorithm": "blake3",
}  # fmt: skip
"""Settings, without `PREFIX`. A server that is started without options moves memory by itself (lmcache_driven)."""
TRANSFER_MODES = ("lmcache_driven", "engine_driven", "auto")


@dataclass(slots=True)
class _Lookup:
    """What the server has of a request, whose chunks it keeps (a lock) until they are loaded or let go.

    Attributes:
        num_found: tokens; 0 until that is known.
        is_over: nothing more is loaded for the request.
    """

    session: str
    token_ids: list[int]
    salt: str
    num_found: int = 0
    is_over: bool = False


class LMCacheConnector(StagedTransfers):
    """Blocks in an LMCache server."""

    program = "LMCache"
    quire_contract = 1
    extra_config_keys = tuple(f"{PREFIX}{name}" for name in DEFAULTS)

    def __init__(self, config: KVTransferConfig, role: KVConnectorRole, layout: KVCacheLayout) -> None:
        super().__init__(config, role, layout)
        self._settings = _checked(config)
        self._timeout_s = float(self._settings["mq_timeout"])
        self._lookups: dict[str, _Lookup] = {}
        self._engine = uuid.uuid4().hex
        self._saving: set[str] = set()  # requests whose session ends when that has been reported
        self._lmcache = _import_adapters()
        kinds = {KVConnectorRole.SCHEDULER: self._connect_scheduler, KVConnectorRole.WORKER: self._connect_worker}
        self._adapter = self._asked(kinds[role])
        self._chunk_size = int(self._adapter.lmcache_tokens_per_chunk)

    def _connect_scheduler(self, **common: Any) -> Any:
        return self._lmcache.LMCacheMPSchedulerAdapter([self._url], **common)

    def _connect_worker(self, **common: Any) -> Any:
        return self._lmcache.LMCacheMPWorkerAdapter(self._url, **common)

    @property
    def _url(self) -> str:
        host = str(self._settings["host"])
        return f"{host if '://' in host else f'tcp://{host}'}:{self._settings['port']}"

    def _asked(self, connect: Any) -> Any:
        """An adapter, which asks the server for the size of its chunks.

        Raises:
            ConfigError: the server does not answer, or its chunks are not whole blocks.
        """
        import zmq

        strategy = self._lmcache.ParallelStrategy(
            mla_only=False, vllm_world_size=1, vllm_worker_id=0, tp_size=1, pp_size=1, n_servers=1
        )
        try:
            return connect(
                context=zmq.Context.instance(), model_name=f"quire-{self.layout.digest[:32]}",
                vllm_block_size=self.layout.block_size, parallel_strategy=strategy,
                extra_config={f"{PREFIX}{name}": value for name, value in self._settings.items()},
            )  # fmt: skip
        except ConnectionError:
            raise self._unreachable() from None
        except ValueError as error:
            raise ConfigError(
                f"{FIELD}: the LMCache server at {self._url}: {error}",
                hint=f"start it with --chunk-size, a multiple of {self.layout.block_size}", field=FIELD,
            ) from None  # fmt: skip

    def _unreachable(self) -> ConfigError:
        return ConfigError(
            f"{FIELD}: the LMCache server at {self._url} does not answer within {self._timeout_s:g} s",
            hint=f"start it (lmcache server --host 127.0.0.1 --port 5555), or give {PREFIX}host and {PREFIX}port",
            field=FIELD,
        )

    # --- the scheduler's half ---

    def on_new_request(self, request: ConnectorRequest) -> None:
        """As `KVConnector`: the server begins to look before the request is asked for."""
        if self.config.is_kv_consumer:
            self._look(request)

    def _look(self, request: ConnectorRequest) -> _Lookup | None:
        """The request's lookup; None = it has no whole chunk."""
        lookup = self._lookups.get(request.request_id)
        if lookup is None and request.num_tokens >= self._chunk_size:
            lookup = _Lookup(self._session(request.request_id), request.all_token_ids, hashed_salt(request) or "")
            self._adapter.maybe_submit_lookup_request(lookup.session, lookup.token_ids, cache_salt=lookup.salt)
            self._lookups[request.request_id] = lookup
        return lookup

    def _session(self, request_id: str) -> str:
        return f"{self._engine}-{request_id}"

    def get_num_new_matched_tokens(
        self, request: ConnectorRequest, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """As `KVConnector`; never waits for the server."""
        lookup = self._look(request)
        if lookup is None or lookup.is_over:
            return 0, False
        found = self._adapter.check_lookup_result(lookup.session)
        if found is None:
            return None, True
        lookup.num_found = int(found)
        num_tokens = lookup.num_found - num_computed_tokens // self.layout.block_size * self.layout.block_size
        if num_tokens <= 0:
            self._let_go(lookup, [(0, lookup.num_found)])
            return 0, False
        return num_tokens, True

    def update_state_after_alloc(
        self, request: ConnectorRequest, block_ids: Sequence[int], num_external_tokens: int
    ) -> None:
        """As `KVConnector`. Chunks are loaded whole; blocks of them that are computed stay as they are."""
        lookup, size = self._lookups[request.request_id], self.layout.block_size
        end = len(block_ids) * size
        first = end - num_external_tokens
        start, stop = first // self._chunk_size * self._chunk_size, -(-end // self._chunk_size) * self._chunk_size
        before, behind = [NOT_WANTED] * ((first - start) // size), [NOT_WANTED] * ((stop - end) // size)
        self.loads[request.request_id] = TokenBlocks(
            lookup.token_ids[:stop], lookup.salt, request.block_hashes[start // size : stop // size],
            [*before, *block_ids[first // size :], *behind], lookup.session,
        )  # fmt: skip
        self._let_go(lookup, [(0, start), (stop, lookup.num_found)])

    def _let_go(self, lookup: _Lookup, parts: Sequence[tuple[int, int]]) -> None:
        """Tokens from the first to the second number are not loaded; what is, lets go of itself."""
        lookup.is_over = True
        for start, end in parts:
            if start < end:
                self._adapter.free_lookup_locks(lookup.token_ids, start, end, lookup.session, cache_salt=lookup.salt)
        self._adapter.cleanup_lookup_result(lookup.session)

    def request_finished(
        self, request: ConnectorRequest, block_ids: Sequence[int]
    ) -> tuple[bool, Mapping[str, Any] | None]:
        """As `KVConnector`; chunks that were found are not saved again."""
        request_id, size = request.request_id, self.layout.block_size
        lookup = self._lookups.pop(request_id, None)
        if lookup is not None and not lookup.is_over:
            self._let_go(lookup, [(0, lookup.num_found)])
        start = 0 if lookup is None else lookup.num_found
        stop = len(block_ids) * size // self._chunk_size * self._chunk_size
        if self.config.is_kv_producer and stop > start:
            self.saves[request_id] = TokenBlocks(
                request.all_token_ids[:stop], hashed_salt(request) or "",
                request.block_hashes[start // size : stop // size], block_ids[start // size : stop // size],
                self._session(request_id),
            )  # fmt: skip
            self._saving.add(request_id)
            return True, None
        if lookup is not None:
            self._end_session(request_id)
        return False, None

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        """As `KVConnector`. After a load that failed, the server may have lost what it said it has."""
        if output.invalid_block_ids:
            for lookup in self._lookups.values():
                lookup.num_found = 0
        for request_id in output.finished_sending & self._saving:
            self._saving.discard(request_id)
            self._end_session(request_id)

    def _end_session(self, request_id: str) -> None:
        self.threads.submit(self._adapter.end_session, self._session(request_id))  # it may wait for the server

    # --- the worker's half ---

    def register_kv_caches(self, kv_caches: Mapping[str, Tensor], blocks: BlockAccess) -> None:
        """As `KVConnector`.

        Raises:
            ConfigError: the server does not take it.
        """
        super().register_kv_caches(kv_caches, blocks)
        shapes = [tuple(part.shape[1:]) for part in blocks.read([0])]
        one = staged_width(shapes, self.layout.block_size) * self.layout.block_size
        num_blocks = self._chunk_size // self.layout.block_size
        num_chunks = max(1, STAGED_BYTES // (one * num_blocks))
        self.staged = StagedBlocks(shapes, self.layout.block_size, num_chunks * num_blocks)
        group = self._lmcache.EngineGroupInfo(0, (0,), self.layout.block_size)
        try:
            self._adapter.register_kv_caches({"layer.0": self.staged.tensor}, [group], {"kv_layout": "NHD"})
        except ConnectionError:
            raise self._unreachable() from None

    def fetch(self, part: TokenBlocks) -> tuple[()]:
        """As `StagedTransfers`; which blocks did not come is seen in their slots."""
        adapter = self._adapter
        self._check_health()
        adapter.submit_retrieve_request(
            part.session, self._operation(part), adapter.create_recorded_event(), cache_salt=part.salt
        )
        adapter.retrieve_events.pop(part.session, None)
        future, _ = adapter.retrieve_futures.pop(part.session, (None, ()))
        try:
            self._wait(future, "give the blocks out")
        finally:
            adapter.get_block_ids_with_load_errors()  # its own list of them, which is not needed
        return ()

    def give(self, part: TokenBlocks) -> None:
        """As `StagedTransfers`."""
        adapter = self._adapter
        self._check_health()
        adapter.submit_store_request(
            part.session, self._operation(part), adapter.create_recorded_event(), cache_salt=part.salt
        )
        adapter.store_events.pop(part.session, None)
        self._wait(adapter.store_futures.pop(part.session, None), "take the blocks")

    def _check_health(self) -> None:
        if not self._adapter.is_healthy:
            raise OSError("the server does not answer")

    def _wait(self, future: Any, what: str) -> None:
        if future is None or not future.result(timeout=self._timeout_s):
            raise OSError(f"the server did not {what}")

    def _operation(self, part: TokenBlocks) -> Any:
        slots = list(self.slots(part))
        return self._lmcache.LoadStoreOp(part.token_ids, [slots], self.first_token(part), len(part.token_ids))

    # --- both ---

    def shutdown(self) -> None:
        """As `KVConnector`."""
        super().shutdown()
        adapter, self._adapter = self._adapter, None
        if adapter is not None:
            adapter.shutdown()


def _import_adapters() -> ModuleType:
    """LMCache's adapters for engines.

    Raises:
        ConfigError: it is not installed, or lacks something.
    """
    os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")  # it would report to its makers
    try:
        return importlib.import_module(ADAPTERS)
    except ImportError as error:
        raise ConfigError(
            f"{FIELD}: LMCache cannot be imported: {error}",
            hint="install it into the environment of Quire (docs/how-to/connectors.md says how)", field=FIELD,
        ) from error  # fmt: skip


def _checked(config: KVTransferConfig) -> dict[str, Any]:
    """Settings without their prefix.

    Raises:
        ConfigError: one has a wrong value.
    """
    given = {name.removeprefix(PREFIX): value for name, value in config.kv_connector_extra_config.items()}
    settings = {**DEFAULTS, **given}
    checks = {
        "host": isinstance(settings["host"], str) and bool(settings["host"]),
        "port": _is_number(settings["port"], int) and 0 < settings["port"] < 1 << 16,
        "mq_timeout": _is_number(settings["mq_timeout"], int, float) and 0 < settings["mq_timeout"] <= 3600,
        "heartbeat_interval": _is_number(settings["heartbeat_interval"], int, float)
        and 0 < settings["heartbeat_interval"] <= 3600,
        "mp_transfer_mode": settings["mp_transfer_mode"] in TRANSFER_MODES,
        "isolated_ipc": isinstance(settings["isolated_ipc"], bool),
        "hash_algorithm": isinstance(settings["hash_algorithm"], str),
    }
    for name, is_right in checks.items():
        if not is_right:
            raise ConfigError(
                f"{FIELD}: {PREFIX}{name} cannot be {shown(settings[name])}",
                hint=f"the default is {DEFAULTS[name]!r}", field=FIELD,
            )  # fmt: skip
    return settings


def _is_number(value: object, *kinds: type) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)
