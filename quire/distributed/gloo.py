"""GlooCommunicator: ranks on several machines, over TCP by torch's gloo. A group of its own, none of torch's globals.

gloo moves bytes alone: sums are taken here, in the order of `Communicator`, so that they have the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import distributed
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from quire.distributed.communicator import Communicator
from quire.errors import CommunicationError

FOREVER = timedelta(days=365)


class GlooCommunicator(Communicator):
    """As `Communicator`; `abort` reaches this process alone: gloo shows the end of a peer by its connection.

    Args:
        host, port: where rank 0 listens for the others; reached from all of them.
        timeout_s: after which a call fails.
    """

    def __init__(self, host: str, port: int, rank: int, size: int, *, timeout_s: float = 60.0) -> None:
        self.rank, self.size = rank, size
        self._timeout = timedelta(seconds=timeout_s)
        self._ended: int | None = None
        with self._failing("start"):
            self._store = TCPStore(host, port, size, is_master=rank == 0, timeout=self._timeout)
            self._group: Any = distributed.ProcessGroupGloo(self._store, rank, size, self._timeout)

    @contextmanager
    def _failing(self, what: str) -> Iterator[None]:
        if self._ended is not None:
            raise CommunicationError(f"rank {self._ended} has ended")
        try:
            yield
        except RuntimeError as error:
            raise CommunicationError(f"{what} failed between machines: {str(error)[:300]}") from None

    def barrier(self) -> None:
        """As `Communicator.barrier`; a timeout names the ranks that did not come."""
        with self._failing("barrier"):
            self._group.monitored_barrier(self._timeout, True)

    def all_gather(
        self, own: torch.Tensor, widths: Sequence[int], out: torch.Tensor | None = None, root: int | None = None
    ) -> torch.Tensor:
        """As `Communicator.all_gather`; every rank gets the result."""
        padded = own.new_zeros(len(own), max(widths))
        padded[:, : own.shape[1]] = own
        parts = self._exchange(padded)
        whole = torch.cat([part[:, :width] for part, width in zip(parts, widths, strict=True)], 1)
        return whole if out is None else out.copy_(whole)

    def _exchange(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The tensor of each rank."""
        tensor = tensor.contiguous()
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        with self._failing("all_gather"):
            self._group.allgather([parts], [tensor]).wait()
        return parts

    def gather_rows(self, ids: torch.Tensor, first: int, count: int, own: torch.Tensor) -> torch.Tensor:
        """As `Communicator.gather_rows`."""
        is_own = (ids >= first) & (ids < first + count)
        out = torch.empty_like(own)
        flags = self._exchange(is_own.to(torch.uint8))
        for here, rows in zip(flags, self._exchange(own), strict=True):
            out[here.bool()] = rows[here.bool()]
        return out

    def local_ids(self, ids: torch.Tensor, first: int, count: int) -> torch.Tensor:
        """As `Communicator.local_ids`."""
        return torch.where((ids >= first) & (ids < first + count), ids - first, 0)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """As `Communicator.all_reduce`."""
        tensor.copy_(_sum_pairwise(self._exchange(tensor)))

    def reduce_scatter(self, tensor: torch.Tensor) -> torch.Tensor:
        """As `Communicator.reduce_scatter`."""
        return _sum_pairwise(list(self.all_to_all(tensor))).to(tensor.dtype)

    def broadcast(self, tensor: torch.Tensor, root: int = 0, *, is_patient: bool = False) -> None:
        """As `Communicator.broadcast`."""
        options = distributed.BroadcastOptions()
        options.rootRank = root
        options.timeout = FOREVER if is_patient else self._timeout
        with self._failing(f"broadcast from rank {root}"):
            self._group.broadcast([tensor], options).wait()

    def all_to_all(self, tensor: torch.Tensor) -> torch.Tensor:
        """As `Communicator.all_to_all`."""
        out = torch.empty_like(tensor)
        with self._failing("all_to_all"):
            self._group.alltoall_base(out, tensor.contiguous(), [], []).wait()
        return out

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """As `Communicator.send`."""
        with self._failing(f"send to rank {to}"):
            self._group.send([tensor], to, 0).wait()

    def receive(self, tensor: torch.Tensor, source: int, *, is_patient: bool = False) -> None:
        """As `Communicator.receive`."""
        with self._failing(f"receive from rank {source}"):
            self._group.recv([tensor], source, 0).wait()

    def abort(self, rank: int) -> None:
        """Later calls fail at once."""
        self._ended = rank


def _sum_pairwise(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """In float32."""
    sums = [part.float() for part in parts]
    step = 1
    while step < len(sums):
        for i in range(0, len(sums) - step, 2 * step):
            sums[i] = sums[i] + sums[i + step]
        step *= 2
    return sums[0]
