"""What the ranks of a machine share, opened by its first rank for the others, and where other machines reach it.

Called by executors whose ranks are not children of one process (`on_ray`, `launched`). Ranks of one machine open memory
without a name by the path of the first one's descriptor in /proc.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import msgspec

from quire.config.engine import QuireConfig
from quire.distributed.host_links import HostListener, HostPlan, connect_hosts, new_key, number_hosts
from quire.distributed.seat import Seat
from quire.distributed.shared_memory import make_region, make_stage_regions
from quire.distributed.shared_pages import make_shared_pages
from quire.errors import CommunicationError, UnsupportedError

CONNECT_TIMEOUT_S = 60.0


class HostInfo(msgspec.Struct, frozen=True):
    """What the first rank of a machine has opened for the others.

    Attributes:
        region: path of the memory that the ranks of the machine share.
        stages: likewise of the ranks of each pipeline stage; None = they share that of all ranks, or are one.
        port: where it listens for ranks of other machines; 0 = there are none.
        caches: likewise of the KV cache of each rank; empty = every cache is private.
    """

    region: str
    stages: list[str | None]
    port: int
    caches: list[str] = []


class RankPlace(msgspec.Struct, frozen=True):
    """What a rank needs to join its group.

    Attributes:
        region: `HostInfo.region` of its machine.
        stage: the one of `HostInfo.stages` that is its own.
        timeout_s: for which a rank waits for another.
        plan: of a group on several machines; None = all are here.
        caches: `HostInfo.caches`.
    """

    rank: int
    size: int
    num_stages: int
    region: str
    stage: str | None
    timeout_s: float
    plan: HostPlan | None
    caches: list[str] = []


class OpenHost(NamedTuple):
    """What is open on a machine, in the process of its first rank, which closes the descriptors."""

    region: int
    stages: list[int | None]
    caches: tuple[int, ...]
    listener: HostListener | None
    info: HostInfo

    @property
    def fds(self) -> list[int]:
        """The descriptors."""
        return [fd for fd in (self.region, *self.stages, *self.caches) if fd is not None]


def open_host(size: int, num_stages: int, address: str | None, *, shares_caches: bool = False) -> OpenHost:
    """The memory that the ranks of this machine share, as descriptors and as paths for its other processes; and a
    listener where ranks of other machines come to `address`.
    """
    region, stages = make_region(size), make_stage_regions(size, num_stages)
    caches = make_shared_pages(size) if shares_caches else ()
    listener = None if address is None else HostListener(address)
    info = HostInfo(
        _path_of(region), [None if fd is None else _path_of(fd) for fd in stages],
        0 if listener is None else listener.port, [_path_of(fd) for fd in caches],
    )  # fmt: skip
    return OpenHost(region, stages, caches, listener, info)


def _path_of(fd: int) -> str:
    return f"/proc/{os.getpid()}/fd/{fd}"


class OpenGroup:
    """The memory of all machines of a group. Made by rank 0.

    Args:
        config: of the model that the group computes.
        machines: a name for the machine of each rank.
        addresses: of each rank's machine, as the others reach it.
        open_on: lets the first rank of another machine open it.
        timeout_s: for which a rank waits for another.

    Raises:
        UnsupportedError: blocks are kept outside of the KV cache, and the ranks are on several machines.
    """

    def __init__(
        self, config: QuireConfig, machines: Sequence[str], addresses: Sequence[str],
        open_on: Callable[[int], HostInfo], timeout_s: float,
    ) -> None:  # fmt: skip
        self._size, self._num_stages = len(machines), config.parallel.pipeline_parallel_size
        self._hosts, self._timeout_s = number_hosts(list(machines)), timeout_s
        several = max(self._hosts) > 0
        if several and config.has_kv_tier:
            raise UnsupportedError(
                "blocks cannot be kept outside of the KV cache where ranks are on several machines "
                f"({max(self._hosts) + 1} here): rank 0 does not see the caches of the others",
                hint="leave out kv_disk, kv_offloading_size and kv_transfer_config, or have all ranks on one machine",
                field="distributed_executor_backend",
            )  # fmt: skip
        own = self.own = open_host(
            self._size, self._num_stages, addresses[0] if several else None, shares_caches=config.has_kv_tier
        )
        try:
            firsts = [self._hosts.index(host) for host in range(1, max(self._hosts) + 1)]
            self._infos = [own.info, *(open_on(rank) for rank in firsts)]
        except BaseException:
            for fd in own.fds:
                os.close(fd)
            raise
        ports = [(addresses[rank], info.port) for rank, info in zip((0, *firsts), self._infos, strict=True)]
        self.plan = HostPlan(self._hosts, ports, new_key()) if several else None

    def place(self, rank: int) -> RankPlace:
        """Of a rank."""
        info = self._infos[self._hosts[rank]]
        stage = info.stages[rank // (self._size // self._num_stages)]
        return RankPlace(
            rank, self._size, self._num_stages, info.region, stage, self._timeout_s, self.plan, info.caches
        )

    def own_seat(self) -> Seat:
        """Of rank 0, once its machine is connected to the others.

        Raises:
            CommunicationError: another machine cannot be reached.
        """
        own, sockets = self.own, None
        if self.plan is not None:
            sockets = connect_hosts(self.plan, 0, own.listener, CONNECT_TIMEOUT_S)
        return Seat(
            rank=0, size=self._size, fd=own.region, num_stages=self._num_stages, stage_fd=own.stages[0],
            timeout_s=self._timeout_s, plan=self.plan, sockets=sockets, cache_fds=own.caches,
        )  # fmt: skip


@contextmanager
def open_seat(place: RankPlace, listener: HostListener | None) -> Iterator[Seat]:
    """The seat of a rank other than 0; its descriptors are open inside, until it has its KV cache.

    Args:
        listener: where this rank is the first of its machine, and there are others.

    Raises:
        CommunicationError: the memory of this machine's ranks cannot be opened, or another machine not be reached.
    """
    sockets = None
    if place.plan is not None:
        sockets = connect_hosts(place.plan, place.rank, listener, CONNECT_TIMEOUT_S)
    fds: list[int] = []
    try:
        paths = [path for path in (place.region, place.stage, *place.caches) if path is not None]
        fds.extend(os.open(path, os.O_RDWR | os.O_CLOEXEC) for path in paths)
    except OSError as error:
        for fd in fds:
            os.close(fd)
        raise CommunicationError(
            f"rank {place.rank} cannot open the memory that the ranks of this machine share: {error}",
            hint="let the ranks of a machine run as one user, in one container",
        ) from error
    first_cache = 1 + (place.stage is not None)
    try:
        yield Seat(
            rank=place.rank, size=place.size, fd=fds[0], num_stages=place.num_stages,
            stage_fd=None if place.stage is None else fds[1], timeout_s=place.timeout_s, plan=place.plan,
            sockets=sockets, cache_fds=tuple(fds[first_cache:]),
        )  # fmt: skip
    finally:
        for fd in fds:
            os.close(fd)
