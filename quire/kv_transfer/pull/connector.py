"""PullConnector: prefill in one engine, decode in another, which reads the blocks of the first.

The base of `TCPConnector`, `NixlConnector` and `MooncakeConnector`, which differ in their transport. The prefill engine
computes a request with `do_remote_decode`, keeps its blocks and answers where they are; the decode engine is sent that
with `do_remote_prefill`, waits for the blocks and releases them. Owns what begins with the next step (scheduler's half)
and the server, the leases and the links (worker's half).
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.config.kv_transfer import FIELD, KVTransferConfig
from quire.core.kv_transfer import KVConnectorOutput
from quire.errors import ConfigError, ValidationError
from quire.kv_transfer.connector import BlockAccess, KVConnector, KVConnectorRole, Tensor
from quire.kv_transfer.layout import KVCacheLayout
from quire.kv_transfer.pull.counts import Counts
from quire.kv_transfer.pull.leases import Leases
from quire.kv_transfer.pull.link import Job, Link, Local
from quire.kv_transfer.pull.params import AllowedHosts, RemotePrefill, is_loopback, parse_remote_prefill
from quire.kv_transfer.pull.server import Identity, PrefillServer, Served
from quire.kv_transfer.pull.transport import CacheMemory, Transport
from quire.kv_transfer.requests import ConnectorRequest, ConnectorStep
from quire.logger import get_logger
from quire.utils.checks import shown

logger = get_logger(__name__)

PULL_KEYS = ("lease_s", "max_leased_fraction", "allowed_hosts", "key_file", "advertised_host")
"""Settings in `kv_connector_extra_config` that every transport has."""
MAX_LINKS = 64
"""Prefill engines at once; above it those without a job are left."""
MIN_KEY_BYTES = 16
CLOSE_S = 5.0
"""Most seconds for which the end of an engine waits for each of its threads."""


@dataclass(frozen=True, slots=True)
class Kept:
    """Blocks of an ended request that decode engines may read."""

    names: tuple[bytes, ...]
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Load:
    """Blocks of a request that waits for them; `first` is the number of the first one in its prompt."""

    remote: RemotePrefill
    first: int
    names: tuple[bytes, ...]
    block_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PullStep:
    """What begins with a step, by request; `counts` are those of the scheduler's half."""

    kept: Mapping[str, Kept]
    loads: Mapping[str, Load]
    releases: Mapping[str, RemotePrefill]
    counts: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class PullSettings:
    """`kv_connector_extra_config`, checked.

    Attributes:
        lease_s: seconds for which blocks are kept after they were last asked for.
        max_leased_fraction: of the cache, that may be kept at once; the oldest are given up above it.
        allowed_hosts: of prefill engines.
        key: that both engines have to have.
        advertised_host: by which decode engines reach this one.
    """

    lease_s: float
    max_leased_fraction: float
    allowed_hosts: AllowedHosts
    key: bytes
    advertised_host: str


class PullConnector(KVConnector):
    """Reads blocks from the engine that prefilled."""

    def make_transport(self, settings: PullSettings) -> Transport:
        """How bytes travel; called by the worker's half alone.

        Raises:
            ConfigError: it cannot be used here.
        """
        raise NotImplementedError

    def __init__(self, config: KVTransferConfig, role: KVConnectorRole, layout: KVCacheLayout) -> None:
        super().__init__(config, role, layout)
        self.settings = read_settings(config)
        self._counts = Counts()
        if role is KVConnectorRole.SCHEDULER:
            self._port = config.kv_port
            self._kept: dict[str, Kept] = {}
            self._loads: dict[str, Load] = {}
            self._releases: dict[str, RemotePrefill] = {}
            self._settled: set[str] = set()  # requests whose blocks are asked for, or given up
        else:
            self._transport = self.make_transport(self.settings)
            self._server: PrefillServer | None = None
            self._leases = Leases(self.settings.lease_s, 0)
            self._local: Local | None = None
            self._links: dict[tuple[str, int], Link] = {}
            self._jobs: dict[str, Job] = {}
            self._ended: deque[tuple[Job, set[int]]] = deque()
            self._errors: set[int] = set()
            self._is_announced = False

    # --- the scheduler's half ---

    def get_num_new_matched_tokens(
        self, request: ConnectorRequest, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """As `KVConnector`: what the prefill engine keeps beyond the prefix cache, as long as it was not asked for."""
        if request.request_id in self._settled or not request.kv_transfer_params.get("do_remote_prefill"):
            return 0, False
        remote = self._remote_of(request)
        if remote is None:
            self._settled.add(request.request_id)
            return 0, False
        size = self.layout.block_size
        num_blocks = min(len(request.block_hashes), (request.num_tokens - 1) // size, remote.remote_num_tokens // size)
        num_new = num_blocks - num_computed_tokens // size
        if num_new > 0:
            return num_new * size, True
        self._release(request, remote)
        return 0, False

    def _remote_of(self, request: ConnectorRequest) -> RemotePrefill | None:
        """Where the blocks of a request are, as far as they may be read."""
        try:
            remote = parse_remote_prefill(request.kv_transfer_params)
        except ValidationError as error:
            problem = error.message
        else:
            if remote is None:
                return None
            if remote.remote_host not in self.settings.allowed_hosts:
                problem = f"remote_host={shown(remote.remote_host)} is not one of allowed_hosts"
            elif remote.remote_layout not in ("", self.layout.digest):
                problem = "its blocks have another layout"
            else:
                return remote
        self._counts.add("refused_params")
        logger.warning("request %s is computed, not loaded: %s", request.external_req_id, problem)
        return None

    def _release(self, request: ConnectorRequest, remote: RemotePrefill) -> None:
        self._settled.add(request.request_id)
        self._releases[request.request_id] = remote

    def update_state_after_alloc(
        self, request: ConnectorRequest, block_ids: Sequence[int], num_external_tokens: int
    ) -> None:
        """As `KVConnector`."""
        remote = parse_remote_prefill(request.kv_transfer_params)
        assert remote is not None, "blocks are offered to requests that say where they are"
        first = len(block_ids) - num_external_tokens // self.layout.block_size
        names = tuple(request.block_hashes[first : len(block_ids)])
        self._loads[request.request_id] = Load(remote, first, names, tuple(block_ids[first:]))
        self._settled.add(request.request_id)

    def request_finished(
        self, request: ConnectorRequest, block_ids: Sequence[int]
    ) -> tuple[bool, Mapping[str, Any] | None]:
        """As `KVConnector`: of a request that another engine decodes the blocks stay, and the response says where."""
        is_settled = request.request_id in self._settled
        self._settled.discard(request.request_id)
        params = request.kv_transfer_params
        if self.config.is_kv_consumer and params.get("do_remote_prefill") and not is_settled:
            remote = self._remote_of(request)  # it ended before its blocks were asked for
            if remote is not None:
                self._releases[request.request_id] = remote
        if not params.get("do_remote_decode") or not self.config.is_kv_producer or request.is_aborted:
            return False, None
        if not block_ids or not self._port:
            return False, None
        self._kept[request.request_id] = Kept(tuple(request.block_hashes[: len(block_ids)]), tuple(block_ids))
        remote = RemotePrefill(
            remote_engine_id=str(self.config.engine_id), remote_request_id=request.request_id,
            remote_host=self.settings.advertised_host, remote_port=self._port,
            remote_num_tokens=len(block_ids) * self.layout.block_size, remote_layout=self.layout.digest,
        )  # fmt: skip
        return True, remote.to_params(block_ids)

    def build_connector_meta(self, step: ConnectorStep) -> PullStep | None:
        """As `KVConnector`."""
        if not self.has_pending_work() and not self._counts:
            return None
        meta = PullStep(self._kept, self._loads, self._releases, self._counts.take())
        self._kept, self._loads, self._releases = {}, {}, {}
        return meta

    def has_pending_work(self) -> bool:
        """As `KVConnector`: a release has no request that a step computes."""
        return bool(self._kept or self._loads or self._releases)

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        """As `KVConnector`: the port on which the worker's half listens, once."""
        if output.worker_meta is not None:
            self._port = output.worker_meta

    # --- the worker's half ---

    def register_kv_caches(self, kv_caches: Mapping[str, Tensor], blocks: BlockAccess) -> None:
        """As `KVConnector`: begin to listen, where this engine prefills for others."""
        super().register_kv_caches(kv_caches, blocks)
        memory = _memory_of(self.layout, kv_caches)
        identity = Identity(str(self.config.engine_id), self._transport.name, self.layout, self.settings.key)
        if self.config.is_kv_consumer:
            self._local = Local(
                identity,
                self._transport,
                blocks,
                memory,
                self._counts,
                lambda job, lost: self._ended.append((job, lost)),
            )
        if self.config.is_kv_producer:
            max_blocks = int(self.settings.max_leased_fraction * memory.num_blocks)
            self._leases = Leases(self.settings.lease_s, max_blocks)
            served = Served(blocks, memory, self._transport.expose(memory), self._transport.is_inline)
            address = (self.config.kv_ip, self.config.kv_port)
            self._server = PrefillServer(address, identity, self._leases, served, self._counts)
            logger.info("decode engines read blocks from %s:%d (%s)", address[0], self._server.port, identity.transport)

    def build_connector_worker_meta(self) -> int | None:
        """As `KVConnector`: the port, once."""
        if self._server is None or self._is_announced:
            return None
        self._is_announced = True
        return self._server.port

    def start_load_kv(self) -> None:
        """As `KVConnector`; nothing waits here."""
        meta: PullStep = self.metadata
        for name, number in meta.counts.items():
            self._counts.add(name, int(number))
        for request_id, kept in meta.kept.items():
            self._leases.add(request_id, kept.names, kept.block_ids)
        deadline = time.monotonic() + (self.config.kv_load_timeout_s or math.inf)
        for request_id, load in meta.loads.items():
            job = Job(request_id, load.remote, load.first, load.names, load.block_ids, deadline)
            self._jobs[request_id] = job
            self._submit(job)
        for request_id, remote in meta.releases.items():
            self._submit(Job(request_id, remote, deadline=deadline))

    def _submit(self, job: Job) -> None:
        link = self._link_to(job.remote.address)
        if link is None:
            self._counts.add("failed_jobs")
            self._ended.append((job, set(job.block_ids)))
        else:
            link.submit(job)

    def _link_to(self, address: tuple[str, int]) -> Link | None:
        """The way to an engine; None = there are too many already."""
        link = self._links.get(address)
        if link is not None:
            return link
        if len(self._links) >= MAX_LINKS:
            idle = next((one for one, link in self._links.items() if link.is_idle), None)
            if idle is None:
                return None
            self._links.pop(idle).close(0.0)
        assert self._local is not None, "an engine that loads nothing is given no loads"
        self._links[address] = link = Link(address, self._local)
        return link

    def get_finished(self, finished_req_ids: frozenset[str]) -> tuple[set[str], set[str]]:
        """As `KVConnector`."""
        received = set[str]()
        for request_id in finished_req_ids & self._jobs.keys():
            self._jobs[request_id].is_cancelled = True
        while self._ended:
            job, lost = self._ended.popleft()
            if self._jobs.get(job.request_id) is job:
                del self._jobs[job.request_id]
                received.add(job.request_id)
                self._errors |= lost
        if len(self._leases):
            self._counts.add("expired_leases", self._leases.expire())
        return self._leases.take_ended(), received

    def get_block_ids_with_load_errors(self) -> set[int]:
        """As `KVConnector`."""
        errors, self._errors = self._errors, set()
        return errors

    # --- both ---

    def get_kv_connector_stats(self) -> Mapping[str, float]:
        """As `KVConnector`."""
        return self._counts.take()

    def shutdown(self) -> None:
        """As `KVConnector`: what is being read is lost, what is kept is not any longer."""
        if self.role is KVConnectorRole.SCHEDULER:
            return
        if self._server is not None:
            self._server.close()
        for link in self._links.values():
            link.close(CLOSE_S)
        self._links.clear()
        self._transport.close()


def read_settings(config: KVTransferConfig) -> PullSettings:
    """`kv_connector_extra_config` of a connector.

    Raises:
        ConfigError: a value is wrong; the message names its key.
    """
    extra = config.kv_connector_extra_config
    own_host = extra.get("advertised_host") or config.kv_ip
    if not isinstance(own_host, str) or own_host in ("0.0.0.0", "::"):
        raise ConfigError(
            f"{FIELD}: decode engines cannot reach {shown(own_host)}",
            hint="give advertised_host in kv_connector_extra_config, this machine's address for them", field=FIELD,
        )  # fmt: skip
    key = _read_key(extra.get("key_file"))
    if not key and config.is_kv_producer and not is_loopback(config.kv_ip):
        logger.warning("kv_ip=%s without key_file: who reaches this address may read prompts' blocks", config.kv_ip)
    return PullSettings(
        lease_s=_number(extra, "lease_s", 120.0, 86400.0),
        max_leased_fraction=_number(extra, "max_leased_fraction", 0.5, 1.0),
        allowed_hosts=AllowedHosts(extra.get("allowed_hosts"), config.kv_ip),
        key=key,
        advertised_host=own_host,
    )


def _number(extra: Mapping[str, Any], name: str, default: float, most: float) -> float:
    value = extra.get(name, default)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= most:
        raise ConfigError(
            f"{FIELD}: {name}={shown(value)} is not a number above 0 and up to {most:g}",
            hint=f"leave it out for {default:g}", field=FIELD,
        )  # fmt: skip
    return float(value)


def _read_key(path: Any) -> bytes:
    if path is None:
        return b""
    try:
        key = Path(path).expanduser().read_bytes().strip()
    except (OSError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{FIELD}: key_file={shown(path)} cannot be read: {error}", hint="give the path of a file", field=FIELD
        ) from None
    if len(key) < MIN_KEY_BYTES:
        raise ConfigError(
            f"{FIELD}: key_file={shown(path)} has {len(key)} bytes; at least {MIN_KEY_BYTES} are needed",
            hint="for example: openssl rand -hex 32 > FILE", field=FIELD,
        )  # fmt: skip
    return key


def _memory_of(layout: KVCacheLayout, kv_caches: Mapping[str, Tensor]) -> CacheMemory:
    tensors, sizes = [], []
    for layer in layout.layers:
        tensor = kv_caches[layer.names[0]]
        tensors.append(tensor)
        sizes.append(math.prod(layer.shape) * tensor.itemsize)
    return CacheMemory(tensors, sizes)
