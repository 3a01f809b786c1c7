"""Connections between ranks of a group that is on several machines: who is where, and how they find each other.

The first rank of each machine listens; every rank of the others connects to it once, both prove that they have the
group's key, and the sockets go to the C++ library (`csrc/include/quire/host_links.h`). The key proves who connects; it
does not encrypt. Called by `shared_memory` and by executors.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from quire.errors import CommunicationError
from quire.utils.proofs import NONCE_BYTES, PROOF_BYTES, is_proof, new_nonce, proof_of

KEY_BYTES = 32
PROTOCOL = b"QGR1"
_JOIN = struct.Struct(f"<4sI{NONCE_BYTES}s{PROOF_BYTES}s")
GREETING_TIMEOUT_S = 5.0
NOTE_S = 10.0
MAX_GREETINGS = 128
"""Connections that are not proven yet, at once; more are closed."""


class HostPlan(msgspec.Struct, frozen=True):
    """A group on several machines.

    Attributes:
        hosts: the machine of each rank, numbered from 0 by their first ranks.
        addresses: of each machine: (name or address, port) where its first rank listens.
        key: of this group alone.
    """

    hosts: list[int]
    addresses: list[tuple[str, int]]
    key: bytes

    @property
    def num_hosts(self) -> int:
        """Machines."""
        return len(self.addresses)

    def first_rank(self, host: int) -> int:
        """The one that leads a machine."""
        return self.hosts.index(host)

    def is_first(self, rank: int) -> bool:
        """Whether it leads its machine."""
        return self.first_rank(self.hosts[rank]) == rank

    def elsewhere(self, rank: int) -> list[int]:
        """The ranks of other machines."""
        return [other for other, host in enumerate(self.hosts) if host != self.hosts[rank]]


def new_key() -> bytes:
    """For one group."""
    return os.urandom(KEY_BYTES)


def number_hosts(names: list[str]) -> list[int]:
    """The machine of each rank as a number, from its name."""
    order = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return [order[name] for name in names]


@dataclass(frozen=True, slots=True)
class HostSockets:
    """What a rank has to other machines, as the C++ library takes it.

    Attributes:
        leads: of each machine: a socket to its first rank; None = this machine.
        sources: from each rank of other machines, where this one leads its machine.
    """

    leads: list[socket.socket | None]
    sources: dict[int, socket.socket] = field(default_factory=dict)

    def close(self) -> None:
        """They are not needed."""
        for one in (*self.leads, *self.sources.values()):
            if one is not None:
                one.close()


class HostListener:
    """Where the first rank of a machine can be reached while the group is made.

    Args:
        address: of this machine, as the others reach it.

    Raises:
        CommunicationError: this machine does not have that address.
    """

    def __init__(self, address: str = "127.0.0.1") -> None:
        try:
            self._socket = socket.create_server((address, 0), backlog=MAX_GREETINGS)
        except OSError as error:
            raise CommunicationError(f"cannot listen on {address} for ranks of other machines: {error}") from error
        self.address, self.port = self._socket.getsockname()[:2]

    def accept(
        self, plan: HostPlan, rank: int, timeout_s: float, note: Callable[[list[int], float], None] | None = None
    ) -> dict[int, socket.socket]:
        """A proven connection from each rank of other machines.

        Args:
            note: called now and then with the ranks that have not come, and the seconds since the start.

        Raises:
            CommunicationError: names those that did not come in time.
        """
        awaited, found = set(plan.elsewhere(rank)), dict[int, socket.socket]()
        lock, greetings = threading.Lock(), list[threading.Thread]()
        start = time.monotonic()
        deadline, next_note = start + timeout_s, start + NOTE_S

        def greet(peer: socket.socket) -> None:
            with contextlib.suppress(OSError, CommunicationError):
                other = _greet(peer, plan.key, rank)
                with lock:
                    if other in awaited and other not in found:
                        found[other] = peer
                        return
            peer.close()

        while len(found) < len(awaited):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                self.close()
                raise CommunicationError(
                    f"rank {', '.join(map(str, sorted(awaited - set(found))))} did not connect to rank {rank} at "
                    f"{self.address}:{self.port} within {timeout_s:.0f} s",
                    hint="check that the machines reach each other at these addresses",
                )
            if note is not None and time.monotonic() >= next_note:
                next_note += NOTE_S
                note(sorted(awaited - set(found)), time.monotonic() - start)
            self._socket.settimeout(min(left_s, 0.1))
            with contextlib.suppress(TimeoutError):
                peer = self._socket.accept()[0]
                greetings = [one for one in greetings if one.is_alive()]
                if len(greetings) >= MAX_GREETINGS:
                    peer.close()
                    continue
                greetings.append(threading.Thread(target=greet, args=(peer,), daemon=True))
                greetings[-1].start()
        return found

    def close(self) -> None:
        """No other rank is expected."""
        self._socket.close()


def connect_hosts(plan: HostPlan, rank: int, listener: HostListener | None, timeout_s: float) -> HostSockets:
    """Connect to the other machines; where this rank leads its own, with a listener, wait for their ranks.

    Raises:
        CommunicationError: a machine cannot be reached, or a rank did not come.
    """
    sources: dict[int, socket.socket] = {}
    errors: list[CommunicationError] = []

    def accept() -> None:
        assert listener is not None, "of the first rank"
        try:
            sources.update(listener.accept(plan, rank, timeout_s))
        except CommunicationError as error:
            errors.append(error)
        except OSError:  # closed below, as another machine cannot be reached
            errors.append(CommunicationError("the group was given up"))

    accepting = threading.Thread(target=accept, name="ranks of other machines", daemon=True)
    if listener is not None:
        accepting.start()
    leads: list[socket.socket | None] = []
    try:
        for host in range(plan.num_hosts):  # one by one: those before one that fails are closed
            leads += [None if host == plan.hosts[rank] else join_host(plan, host, rank, timeout_s)]
        if listener is not None:
            accepting.join()
            listener.close()
        if errors:
            raise errors[0]
    except BaseException:
        if listener is not None:
            listener.close()
        HostSockets(leads, sources).close()
        raise
    return HostSockets(leads, sources)


def join_host(plan: HostPlan, host: int, rank: int, timeout_s: float) -> socket.socket:
    """A proven connection to the first rank of a machine.

    Raises:
        CommunicationError: it cannot be reached, or has another key.
    """
    address, lead = plan.addresses[host], plan.first_rank(host)
    where = f"rank {lead} at {address[0]}:{address[1]}"
    try:
        peer = socket.create_connection(address, timeout_s)
    except OSError as error:
        raise CommunicationError(
            f"rank {rank} cannot reach {where}: {error}", hint="check that the machines reach each other"
        ) from error
    try:
        peer.settimeout(timeout_s)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        challenge, nonce = _receive(peer, NONCE_BYTES), new_nonce()
        peer.sendall(_JOIN.pack(PROTOCOL, rank, nonce, proof_of(plan.key, f"rank {rank} to {lead}", challenge, nonce)))
        if not is_proof(_receive(peer, PROOF_BYTES), plan.key, f"rank {lead} to {rank}", challenge, nonce):
            raise CommunicationError(f"{where} is not of this group: it has another key")
    except OSError as error:
        peer.close()
        raise CommunicationError(f"rank {rank} was refused by {where}: {error}") from error
    except BaseException:
        peer.close()
        raise
    return peer


def _greet(peer: socket.socket, key: bytes, rank: int) -> int:
    """The rank that has connected, which has proven it."""
    deadline = time.monotonic() + GREETING_TIMEOUT_S  # of all of it: who sends a byte now and then holds no place
    peer.settimeout(GREETING_TIMEOUT_S)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    challenge = new_nonce()
    peer.sendall(challenge)
    protocol, other, nonce, proof = _JOIN.unpack(_receive(peer, _JOIN.size, deadline))
    if protocol != PROTOCOL or not is_proof(proof, key, f"rank {other} to {rank}", challenge, nonce):
        raise CommunicationError("not of this group")
    peer.sendall(proof_of(key, f"rank {rank} to {other}", challenge, nonce))
    return int(other)


def _receive(peer: socket.socket, size: int, deadline: float | None = None) -> bytes:
    """Exactly `size` bytes, until a time of the monotonic clock; None = each part within the socket's own."""
    data = bytearray()
    while len(data) < size:
        if deadline is not None:
            peer.settimeout(max(0.001, deadline - time.monotonic()))
        part = peer.recv(size - len(data))
        if not part:
            raise ConnectionError("the connection was closed")
        data += part
    return bytes(data)
