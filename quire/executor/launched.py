"""Ranks that a launcher has started, each with the user's script: how they become a group, and rank 0's executor.

Rank 0 leads as `MultiprocExecutor` does. The connection of each other rank to it lasts as long as the engine: its end
is the end of that rank, noticed at once whatever either is doing. Called by `engine.launched`.
"""

from __future__ import annotations

import os
import socket
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, TypeVar

import msgspec

from quire import envs
from quire.config.engine import QuireConfig
from quire.core.expert_group import ExpertGroup
from quire.core.wire import ErrorInfo
from quire.distributed.host_links import HostListener, HostPlan, join_host, new_key
from quire.distributed.launch import Launch
from quire.distributed.rank_link import RankLink, Unexpected, watch_links
from quire.distributed.rendezvous import LeadAddress, Rendezvous
from quire.distributed.seat import Seat
from quire.errors import CommunicationError, ConfigError, EngineDeadError, QuireError
from quire.executor.host_memory import CONNECT_TIMEOUT_S, HostInfo, OpenGroup, open_host, open_seat
from quire.executor.launch_messages import (
    Failed,
    FromLead,
    Hello,
    Join,
    Loaded,
    Opened,
    OpenHere,
    Start,
    ToLead,
)
from quire.executor.multiproc import MultiprocExecutor
from quire.logger import get_logger
from quire.platforms.interface import Platform
from quire.sample.logits_processor import ProcessorSource
from quire.utils.checks import shown
from quire.version import __version__
from quire.worker.group_messages import EndCall
from quire.worker.worker import Worker

logger = get_logger(__name__)

T = TypeVar("T")

RENDEZVOUS_TIMEOUT_S = 300.0
"""For which a rank may not have come; scripts may load something else before."""
LOAD_TIMEOUT_S = 3600.0
OWN_SETTINGS = ("model_path", "observability.", "device.num_threads", "device.kernel_tier")
"""What may differ between ranks: results do not depend on it."""


def comparable_settings(config: QuireConfig) -> dict[str, Any]:
    """The settings that all ranks must have alike, as values by dotted names."""
    found: dict[str, Any] = {}

    def add(prefix: str, value: Any) -> None:
        if isinstance(value, dict) and prefix != "arch.":
            for name, one in value.items():
                add(f"{prefix}{name}.", one)
        elif not prefix.startswith(OWN_SETTINGS):
            found[prefix[:-1]] = value

    add("", msgspec.msgpack.decode(msgspec.msgpack.encode(config)))  # as it is after a way
    return found


def _machine() -> str:
    """What processes that can open each other's memory in /proc have in common."""
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot = file.read().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')} {os.getuid()}"


def _hello(config: QuireConfig, address: str) -> Hello:
    return Hello(__version__, _machine(), address, socket.gethostname(), os.getpid(), comparable_settings(config))


def _plan(size: int, lead: LeadAddress) -> HostPlan:
    """Of the connections from all other ranks to rank 0."""
    return HostPlan(list(range(size)), [(lead.address, lead.port)] * size, lead.key)


class LeadGroup:
    """Rank 0's connections to the other ranks of its engine.

    Args:
        config: resolved.

    Raises:
        CommunicationError: a rank did not come, or has ended.
        ConfigError: a rank has other settings, or another version of Quire.
    """

    def __init__(self, config: QuireConfig, rendezvous: Rendezvous, size: int, timeout_s: float) -> None:
        self.config, self.size = config, size
        self.links: list[RankLink] = []
        self.hellos = [_hello(config, rendezvous.own_address)]
        self.lost: str | None = None
        self._is_closing = False
        self._executor: Callable[[], LaunchedExecutor | None] = lambda: None
        listener = HostListener(rendezvous.own_address)
        lead = LeadAddress(listener.address, listener.port, new_key())
        rendezvous.publish(lead)
        try:
            peers = listener.accept(_plan(size, lead), 0, timeout_s, note_missing)
        finally:
            listener.close()
        self.links = [RankLink(peer, rank, ToLead) for rank, peer in sorted(peers.items())]
        try:
            for link in self.links:
                self.hellos.append(link.receive(Hello, "say hello", CONNECT_TIMEOUT_S))
                link.where = f" (process {self.hellos[-1].pid} on {self.hellos[-1].host_name[:80]})"
            self._check()
        except BaseException as error:
            self.fail(error)
            raise

    def _check(self) -> None:
        """All ranks must be able to compute the same."""
        own = self.hellos[0]
        for link, hello in zip(self.links, self.hellos[1:], strict=True):
            if hello.version != own.version:
                raise ConfigError(
                    f"rank {link.rank}{link.where} has Quire {hello.version[:40]}, and rank 0 has {own.version}",
                    hint="install the same version on all machines", field="distributed_executor_backend",
                )  # fmt: skip
            names = [name for name in {**own.settings, **hello.settings} if not _is_alike(name, own, hello)]
            if names:
                name = names[0]
                values = f"{shown(hello.settings.get(name))}, and that of rank 0 {shown(own.settings.get(name))}"
                raise ConfigError(
                    f"rank {link.rank}{link.where} has other settings than rank 0: its {name} is {values}",
                    hint="every rank has to create the same engine", field=name.rpartition(".")[2],
                )  # fmt: skip

    def open(self, timeout_s: float) -> OpenGroup:
        """Open all machines, and let the other ranks join."""

        def open_on(rank: int) -> HostInfo:
            link = self.links[rank - 1]
            parallel = self.config.parallel
            link.send(OpenHere(self.size, parallel.pipeline_parallel_size, self.config.has_kv_tier))
            return link.receive(Opened, "open its machine", CONNECT_TIMEOUT_S).info

        machines, addresses = [one.machine for one in self.hellos], [one.address for one in self.hellos]
        group = OpenGroup(self.config, machines, addresses, open_on, timeout_s)
        for link in self.links:
            link.send(Join(group.place(link.rank)))
        return group

    def watch(self, executor: LaunchedExecutor) -> None:
        """Tell the executor when a rank ends."""
        self._executor = weakref.ref(executor)
        watch_links(self.links, self._on_end)

    def _on_end(self, index: int) -> None:
        link, executor = self.links[index], self._executor()
        if not self._is_closing:
            self.lost = link.gone
            if executor is not None:
                executor.note_end(link.rank, link.gone)

    def fail(self, error: BaseException) -> None:
        """Say to the other ranks why the group is at an end, and close it."""
        for link in self.links:
            try:
                link.send(Failed(ErrorInfo.of(error)))
            except CommunicationError as gone:
                logger.debug("%s", gone)
        self.close()

    def parting_words(self) -> QuireError | None:
        """What a rank that has ended the group said last."""
        for link in self.links:
            found = last_words(link)
            if found is not None:
                return found
        return None

    def close(self) -> None:
        """Let go of the other ranks; harmless when repeated."""
        self._is_closing = True
        for link in self.links:
            link.close()


def last_words(link: RankLink) -> QuireError | None:
    """What the other end said before it ended, of what has come."""
    try:
        while (message := link.try_receive()) is not None:
            if isinstance(message, Failed):
                return message.error.to_error()
    except CommunicationError:
        pass
    return None


def _is_alike(name: str, own: Hello, other: Hello) -> bool:
    missing = object()
    return bool(own.settings.get(name, missing) == other.settings.get(name, missing))


def note_missing(ranks: list[int], waited_s: float) -> None:
    """Say which ranks are awaited."""
    logger.warning("waiting for rank %s to come: %.0f s", ", ".join(map(str, ranks)), waited_s)


class _LaunchedRank:
    """A rank as `MultiprocExecutor` sees it; its process is not ours to end."""

    pid: int | None = None

    def __init__(self, link: RankLink) -> None:
        self._link = link

    def wait_ready(self) -> None:
        try:
            self._link.receive(Loaded, "load its part of the model", LOAD_TIMEOUT_S)
        except Unexpected as other:
            assert isinstance(other.message, Failed), "it says one of the two"
            error = other.message.error
            name = f"rank {self._link.rank}{self._link.where}"
            raise msgspec.structs.replace(error, message=f"{name}: {error.message}").to_error() from None

    def close(self) -> None:
        """The group is closed by its client."""


class LaunchedExecutor(MultiprocExecutor):
    """As `MultiprocExecutor`, on rank 0, with ranks that have come by themselves."""

    def __init__(
        self,
        group: LeadGroup,
        config: QuireConfig,
        platform: Platform,
        logits_processors: Sequence[ProcessorSource] = (),
    ) -> None:
        self._group = group
        super().__init__(config, platform, logits_processors)
        for link in group.links:
            link.send(Start())

    def _start_ranks(self, config: QuireConfig, size: int, timeout_s: float, experts: ExpertGroup | None) -> Seat:
        """Let the other ranks join."""
        group = self._group.open(timeout_s)
        self._region_fds += [fd for fd in (group.own.region, *group.own.stages) if fd is not None]
        self._cache_fds = group.own.caches
        self._group.watch(self)
        self._ranks += [_LaunchedRank(link) for link in self._group.links]
        return group.own_seat()

    def note_end(self, rank: int, reason: str) -> None:
        """A rank has ended: whatever waits for it ends. From a thread of its own."""
        self._fail(rank, reason)


class FollowedRank:
    """A rank other than 0: its worker, and its connection to rank 0.

    Args:
        config: resolved.
        launch: of this process.

    Raises:
        QuireError: whatever keeps it, or another rank, from joining.
    """

    def __init__(
        self, config: QuireConfig, platform: Platform, launch: Launch, rendezvous: Rendezvous, timeout_s: float
    ) -> None:
        lead = rendezvous.find_lead()
        rendezvous.leave()
        rank = launch.group_rank
        peer = join_host(_plan(config.parallel.num_ranks, lead), 0, rank, timeout_s)
        self.rank = rank
        self.link = RankLink(peer, 0, FromLead)
        self._is_closing = False
        self.worker: Worker | None = None
        try:
            self.link.send(_hello(config, rendezvous.own_address))
            self._join(config, platform, rendezvous.own_address)
        except BaseException as error:
            self.fail(error)
            raise

    def _join(self, config: QuireConfig, platform: Platform, address: str) -> None:
        listener, fds = None, []
        message = self.await_lead("let the other ranks join")
        if isinstance(message, OpenHere):
            opened = open_host(message.size, message.num_stages, address, shares_caches=message.shares_caches)
            listener, fds = opened.listener, opened.fds
            self.link.send(Opened(opened.info))
            message = self.await_lead("let the other ranks join")
        assert isinstance(message, Join), "rank 0's order of messages"
        with ExitStack() as seats:
            for fd in fds:
                seats.callback(os.close, fd)
            seat = seats.enter_context(open_seat(message.place, listener))
            self.worker = Worker(config, platform, (), seat)
            watch_links([self.link], self._on_end)
            self.link.send(Loaded())
            started = self.await_lead("start")
            assert isinstance(started, Start), "rank 0's order of messages"
            self._run(self.worker.await_cache)

    def await_lead(self, awaited: str, timeout_s: float = LOAD_TIMEOUT_S) -> Any:
        """Rank 0's next message.

        Raises:
            QuireError: the group is at an end.
        """
        message = self.link.receive(msgspec.Struct, awaited, timeout_s)
        if isinstance(message, Failed):
            raise message.error.to_error()
        return message

    def follow(self) -> EndCall:
        """Compute what rank 0 says; what a call of the scripts came to.

        Raises:
            QuireError: the group is at an end.
        """
        assert self.worker is not None, "it is there until the group ends"
        return self._run(self.worker.follow)

    def _run(self, compute: Callable[[], T]) -> T:
        try:
            return compute()
        except CommunicationError as error:
            raise last_words(self.link) or EngineDeadError(
                f"{error.message} (as rank {self.rank} sees it)", hint=error.hint
            ) from error

    def fail(self, error: BaseException) -> None:
        """Say to rank 0 why this rank is at its end, and leave."""
        try:
            self.link.send(Failed(ErrorInfo.of(error)))
        except CommunicationError as gone:
            logger.debug("%s", gone)
        self.close()

    def close(self) -> None:
        """Leave the group; harmless when repeated."""
        self._is_closing = True
        if self.worker is not None:
            self.worker.abort(self.rank)
        self.link.close()
        self.worker = None

    def _on_end(self, _: int) -> None:
        worker = self.worker
        if not self._is_closing and worker is not None:
            worker.abort(0)


def meet(launch: Launch, timeout_s: float = RENDEZVOUS_TIMEOUT_S) -> Rendezvous:
    """This process at the rendezvous of all; raises `CommunicationError`."""
    return Rendezvous(launch, has_store=envs.launcher_has_store(), timeout_s=timeout_s)
