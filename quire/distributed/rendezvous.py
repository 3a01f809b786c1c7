"""Rendezvous: how processes that a launcher has started find the first of their group, over torch's key-value store.

The store is at MASTER_ADDR:MASTER_PORT: torchrun's own, else in the process of rank 0, as `torch.distributed` has it.
It carries an address and a key; everything else goes over connections that prove that key. Called by `launched`.
"""

from __future__ import annotations

import fcntl
import socket
import struct
import time
from datetime import timedelta

import msgspec
import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from quire import envs
from quire.distributed.launch import Launch
from quire.errors import CommunicationError
from quire.logger import get_logger

logger = get_logger(__name__)

WORLD_TIMEOUT = timedelta(minutes=5)  # all ranks have come; some may load longer
SIOCGIFADDR = 0x8915
POLL_S, NOTE_S = 0.01, 10.0


class LeadAddress(msgspec.Struct, frozen=True):
    """Where rank 0 of a group listens.

    Attributes:
        key: of the group; connections prove that they have it.
    """

    address: str
    port: int
    key: bytes


class Rendezvous:
    """This process at the store, which lives in rank 0 as long as this does.

    Args:
        has_store: the launcher has the store; else rank 0 has it.
        timeout_s: for which rank 0 may not have come.

    Raises:
        CommunicationError: it cannot be reached, or not be opened.
    """

    def __init__(self, launch: Launch, *, has_store: bool, timeout_s: float) -> None:
        self._launch = launch
        self._timeout = timedelta(seconds=timeout_s)
        self._where = f"MASTER_ADDR:MASTER_PORT ({launch.address}:{launch.port})"
        is_host = launch.rank == 0 and not has_store
        try:
            self.own_address = own_address(launch.address, launch.port)
            self._store = self._open(is_host)
            # Engines of a script meet one after the other, each at a place of its own.
            self._turn = self._store.add(f"quire/{launch.group}/{launch.rank}/engines", 1)
        except (OSError, RuntimeError, ValueError) as error:  # torch's own errors are RuntimeErrors
            reason = "cannot be opened" if is_host else f"cannot be reached by rank {launch.rank}"
            absent = "" if is_host or has_store else f" within {timeout_s:.0f} s; rank 0 has not come"
            raise CommunicationError(
                f"{self._where} {reason}{absent}: {str(error).splitlines()[0][:200]}",
                hint="start every rank, with the address of rank 0's machine and a port that is free there",
            ) from error

    def _open(self, is_host: bool) -> Store:
        launch, fd = self._launch, None
        if is_host:  # on that address alone, where it is of this machine; torch itself would listen on all
            try:
                fd = socket.create_server((launch.address, launch.port)).detach()
            except OSError:  # the script's process group has opened it, or torch says what is wrong
                fd = None
        return TCPStore(
            launch.address, launch.port, launch.world_size, is_host, self._timeout, wait_for_workers=False,
            multi_tenant=True, master_listen_fd=fd,
        )  # fmt: skip

    @property
    def _place(self) -> str:
        return f"quire/{self._launch.group}/{self._turn}/lead"

    def publish(self, lead: LeadAddress) -> None:
        """Rank 0 of a group: where it listens."""
        self._store.set(self._place, msgspec.json.encode(lead).decode())

    def find_lead(self) -> LeadAddress:
        """The others: where rank 0 of the group listens.

        Raises:
            CommunicationError: it has not come in time.
        """
        first = self._launch.group * self._launch.group_size
        try:
            self._store.wait([self._place], self._timeout)
            return msgspec.json.decode(self._store.get(self._place), type=LeadAddress)
        except (RuntimeError, msgspec.DecodeError) as error:
            raise CommunicationError(
                f"rank {first} did not come to the rendezvous at {self._where} within "
                f"{self._timeout.total_seconds():.0f} s: rank {self._launch.rank} waited for its engine {self._turn}",
                hint="every rank's script has to create the same engines, in the same order",
            ) from error

    def leave(self) -> None:
        """This rank needs the store no longer. Rank 0, which may have it, waits for the others.

        Raises:
            CommunicationError: some did not come, and are named.
        """
        try:
            self._store.set(self._left(self._launch.rank), "")
            if self._launch.rank == 0:
                self._await_others()
        except RuntimeError as error:
            raise CommunicationError(f"{self._where} is gone: {str(error).splitlines()[0][:200]}") from error

    def _left(self, rank: int) -> str:
        return f"quire/left/{self._turn}/{rank}"

    def _await_others(self) -> None:
        start = noted = time.monotonic()
        others = range(1, self._launch.world_size)
        while missing := [rank for rank in others if not self._store.check([self._left(rank)])]:
            waited_s, names = time.monotonic() - start, ", ".join(map(str, missing))
            if waited_s > self._timeout.total_seconds():
                raise CommunicationError(
                    f"rank {names} did not come to the rendezvous at {self._where} within {waited_s:.0f} s",
                    hint="start every rank; each has to create the same engines",
                )
            if time.monotonic() - noted > NOTE_S:
                noted = time.monotonic()
                logger.warning("waiting for rank %s to come: %.0f s", names, waited_s)
            time.sleep(POLL_S)

    def start_world(self) -> None:
        """Let `torch.distributed` know the ranks, as scripts expect it (`dist.get_rank()`); one that has been set up by
        the script stays.
        """
        if not dist.is_available() or dist.is_initialized():
            return
        interface = _interface_of(self.own_address)
        if interface is not None:  # gloo would look up the name of this machine, which may be a loopback address
            envs.prefer_gloo_interface(interface)
        try:
            dist.init_process_group(
                "gloo", store=PrefixStore("quire/world", self._store), rank=self._launch.rank,
                world_size=self._launch.world_size, timeout=WORLD_TIMEOUT,
            )  # fmt: skip
        except (RuntimeError, ValueError) as error:
            logger.warning("torch.distributed is not initialized: %s", str(error).splitlines()[0][:200])


def own_address(address: str, port: int) -> str:
    """This machine's address on the way to another, or to itself.

    Raises:
        OSError: there is no such machine, or no way to it.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # sends nothing
        probe.connect((address, port))
        return str(probe.getsockname()[0])


def _interface_of(address: str) -> str | None:
    """The network interface that has an address of this machine."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                found = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has no address
                continue
            if socket.inet_ntoa(found[20:24]) == address:
                return name
    return None
