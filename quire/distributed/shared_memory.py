"""SharedMemoryCommunicator: the ranks of one machine, over memory without a name, or of several; and that memory.

A region is a file without a name (memfd): children inherit its descriptor, and it is gone with the last process that
has it. Nothing can be left behind, and the size of /dev/shm, which is small in containers, does not matter.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from quire.distributed.communicator import Communicator
from quire.distributed.host_links import HostPlan, HostSockets
from quire.errors import CommunicationError
from quire.kernels.native.communicator import NativeCommunicator, region_bytes
from quire.kernels.native.runtime import NativeRuntime

DEFAULT_CAPACITY = 32 << 20


def make_region(size: int, capacity: int = DEFAULT_CAPACITY) -> int:
    """The descriptor of a new region for `size` ranks; pages are taken when they are first written.

    Raises:
        CommunicationError: the system has no such memory.
    """
    try:
        fd = os.memfd_create("quire-ranks")
        os.ftruncate(fd, region_bytes(size, capacity))
    except OSError as error:
        raise CommunicationError(f"no memory to share between {size} processes: {error}") from error
    return fd


def make_stage_regions(size: int, num_stages: int) -> list[int | None]:
    """As `make_region`, for each pipeline stage one that its ranks share; None where they share that of all ranks, or
    are one.
    """
    is_needed = 1 < num_stages < size
    return [make_region(size // num_stages) if is_needed else None for _ in range(num_stages)]


class SharedMemoryCommunicator(Communicator):
    """As `Communicator`, by kernels of the C++ library, which recorded steps can replay.

    Args:
        runtime: whose threads copy large results, and where results go while a step is recorded.
        fd: of `make_region(size, capacity)`; the caller's to close.
        spin_us: how long a wait spins before it sleeps.
        timeout_s: after which a wait fails, and a group with a machine from which nothing comes.
        plan, sockets: where ranks are on several machines; `fd` is of those of this one. The sockets are taken over.
        first_rank: what messages call rank 0, in a group that is a part of another.
    """

    def __init__(
        self,
        runtime: NativeRuntime,
        fd: int,
        rank: int,
        size: int,
        *,
        capacity: int = DEFAULT_CAPACITY,
        spin_us: int = 1000,
        timeout_s: float = 60.0,
        plan: HostPlan | None = None,
        sockets: HostSockets | None = None,
        first_rank: int = 0,
    ) -> None:
        self.rank, self.size = rank, size
        self._native = NativeCommunicator(runtime, fd, rank, size, capacity, spin_us, int(timeout_s * 1e6), first_rank)
        self._elsewhere: list[int] = []
        if plan is not None and sockets is not None:
            self._elsewhere = plan.elsewhere(rank) if plan.is_first(rank) else []
            leads = [-1 if one is None else one.detach() for one in sockets.leads]
            sources = [(other, one.detach()) for other, one in sorted(sockets.sources.items())]
            self._native.connect(plan.hosts, leads, sources)

    @property
    def busy_s(self) -> float:
        """As `Communicator.busy_s`."""
        return self._native.busy_s

    @property
    def silence(self) -> tuple[int, float] | None:
        """As `Communicator.silence`."""
        if not self._elsewhere:
            return None
        return max(((other, self._native.silence_s(other)) for other in self._elsewhere), key=lambda one: one[1])

    def barrier(self) -> None:
        """As `Communicator.barrier`."""
        self._native.barrier()

    def all_gather(
        self, own: torch.Tensor, widths: Sequence[int], out: torch.Tensor | None = None, root: int | None = None
    ) -> torch.Tensor:
        """As `Communicator.all_gather`."""
        return self._native.gather(own, widths, out, root)

    def gather_rows(self, ids: torch.Tensor, first: int, count: int, own: torch.Tensor) -> torch.Tensor:
        """As `Communicator.gather_rows`."""
        return self._native.gather_rows(ids, first, count, own)

    def local_ids(self, ids: torch.Tensor, first: int, count: int) -> torch.Tensor:
        """As `Communicator.local_ids`."""
        return self._native.local_ids(ids, first, count)

    def gather_groups(self, rows: torch.Tensor, starts: torch.Tensor, firsts: Sequence[int]) -> None:
        """As `Communicator.gather_groups`."""
        self._native.gather_groups(rows, starts, firsts)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """As `Communicator.all_reduce`."""
        self._native.all_reduce(tensor)

    def reduce_scatter(self, tensor: torch.Tensor) -> torch.Tensor:
        """As `Communicator.reduce_scatter`."""
        return self._native.reduce_scatter(tensor)

    def broadcast(self, tensor: torch.Tensor, root: int = 0, *, is_patient: bool = False) -> None:
        """As `Communicator.broadcast`."""
        self._native.broadcast(tensor, root, is_patient=is_patient)

    def all_to_all(self, tensor: torch.Tensor) -> torch.Tensor:
        """As `Communicator.all_to_all`."""
        return self._native.all_to_all(tensor)

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """As `Communicator.send`; returns when the last 1 MiB may still be under way."""
        self._native.send(tensor, to)

    def receive(self, tensor: torch.Tensor, source: int, *, is_patient: bool = False) -> None:
        """As `Communicator.receive`."""
        self._native.receive(tensor, source, is_patient=is_patient)

    def has_room_for(self, sizes: Sequence[int]) -> bool:
        """As `Communicator.has_room_for`: there is a mailbox for each pair of ranks."""
        return self._native.has_room_for(sizes)

    def receive_new(self, shape: Sequence[int], dtype: torch.dtype, source: int) -> torch.Tensor:
        """As `Communicator.receive_new`."""
        return self._native.receive_new(shape, dtype, source)

    def abort(self, rank: int) -> None:
        """As `Communicator.abort`; may be called from any thread."""
        self._native.abort(rank)
