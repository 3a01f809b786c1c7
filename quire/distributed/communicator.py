"""Communicator: how processes that share a model exchange tensors, passed to constructors (no process-wide state).

`shared_memory` is that of one machine, and of several with links between them. Every rank makes the same calls in the
same order.
Sums are taken pairwise by rank, ((0 + 1) + (2 + 3)) + ..., in float32 on every rank alike: all get the same bits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from quire.errors import ShapeError


class Communicator(ABC):
    """One process's end of a group.

    Every call raises `CommunicationError`, which names the rank, when one has ended or did not come in time.

    Attributes:
        rank: of this process.
        size: number of processes.
    """

    rank: int
    size: int

    @property
    def busy_s(self) -> float:
        """Seconds that this rank has spent in collectives so far, waits included; 0 where they are not counted."""
        return 0.0

    @property
    def silence(self) -> tuple[int, float] | None:
        """The rank of another machine from which nothing has come for longest, and for how many seconds; None = there
        is none, or another rank of this machine watches them. Every rank sends something several times a second.
        """
        return None

    @abstractmethod
    def barrier(self) -> None:
        """Wait until every rank is here."""

    @abstractmethod
    def all_gather(
        self, own: torch.Tensor, widths: Sequence[int], out: torch.Tensor | None = None, root: int | None = None
    ) -> torch.Tensor:
        """The columns of all ranks side by side: [num_rows, sum of widths].

        Args:
            own: [num_rows, widths[rank]]; rows may be strided.
            widths: columns of each rank, the same on all.
            out: written; rows may be strided, and `own` may be the part of it where it belongs. None = a new tensor.
            root: the rank that alone gets the result; `out` of others is undefined. None = every rank.
        """

    @abstractmethod
    def gather_rows(self, ids: torch.Tensor, first: int, count: int, own: torch.Tensor) -> torch.Tensor:
        """Rows of a table that is divided by rows: row i is the `own[i]` of the rank whose part has row ids[i].

        Args:
            ids: [n] int64, the same on all ranks.
            first, count: the rows of the table that this rank has.
            own: [n, size]; `own[i]` counts where ids[i] is one of these.
        """

    @abstractmethod
    def local_ids(self, ids: torch.Tensor, first: int, count: int) -> torch.Tensor:
        """The rows ids - first [n] int64, or 0 where that is not one of this rank's `count` rows."""

    @abstractmethod
    def gather_groups(self, rows: torch.Tensor, starts: torch.Tensor, firsts: Sequence[int]) -> None:
        """Rows that are sorted by group, of which each rank has those of its groups: every rank gets all, in place.

        Args:
            rows: [num_rows, size].
            starts: [num_groups + 1] int32: first row of each group, from 0 to num_rows, rising; the same on all ranks.
            firsts: first group of each rank, rising from 0; the last is the number of groups.
        """

    @abstractmethod
    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Replace a bfloat16 or float32 tensor by its sum over the ranks."""

    @abstractmethod
    def reduce_scatter(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, of which rank i gets row i: [size, n] -> [n]; `tensor` is overwritten."""

    @abstractmethod
    def broadcast(self, tensor: torch.Tensor, root: int = 0, *, is_patient: bool = False) -> None:
        """Replace by the `tensor` of `root`. `is_patient`: receivers have no timeout."""

    @abstractmethod
    def all_to_all(self, tensor: torch.Tensor) -> torch.Tensor:
        """[size, ...]: row i goes to rank i; the result has the rows that are for this rank, by their ranks."""

    @abstractmethod
    def send(self, tensor: torch.Tensor, to: int) -> None:
        """To one rank, whatever the others do."""

    @abstractmethod
    def receive(self, tensor: torch.Tensor, source: int, *, is_patient: bool = False) -> None:
        """Into `tensor`, what one rank sends; of the same size."""

    def has_room_for(self, sizes: Sequence[int]) -> bool:
        """Whether messages of so many bytes to one rank can all be under way before it receives the first."""
        return not any(sizes)

    def receive_new(self, shape: Sequence[int], dtype: torch.dtype, source: int) -> torch.Tensor:
        """As `receive`, into a new tensor."""
        tensor = torch.empty(tuple(shape), dtype=dtype)
        self.receive(tensor, source)
        return tensor

    @abstractmethod
    def abort(self, rank: int) -> None:
        """`rank` has ended: what waits for it, on all ranks that can be reached, fails and names it."""

    def all_agree(self, is_so: bool) -> bool:
        """Whether it is so on every rank."""
        votes = self.all_gather(torch.tensor([[float(is_so)]]), (1,) * self.size)
        return bool(votes.all())


class SingleCommunicator(Communicator):
    """A group of one: nothing is exchanged, results are what was given."""

    rank, size = 0, 1

    def barrier(self) -> None:
        """Nothing."""

    def all_gather(
        self, own: torch.Tensor, widths: Sequence[int], out: torch.Tensor | None = None, root: int | None = None
    ) -> torch.Tensor:
        """`own`."""
        if tuple(widths) != (own.shape[1],):
            raise ShapeError(f"widths are {list(widths)}, own has {own.shape[1]} columns", field="widths")
        if out is None:
            return own
        return out if out.data_ptr() == own.data_ptr() else out.copy_(own)

    def gather_rows(self, ids: torch.Tensor, first: int, count: int, own: torch.Tensor) -> torch.Tensor:
        """`own`."""
        return own

    def local_ids(self, ids: torch.Tensor, first: int, count: int) -> torch.Tensor:
        """`ids`."""
        return ids

    def gather_groups(self, rows: torch.Tensor, starts: torch.Tensor, firsts: Sequence[int]) -> None:
        """Nothing."""

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Nothing."""

    def reduce_scatter(self, tensor: torch.Tensor) -> torch.Tensor:
        """The one row."""
        return tensor[0]

    def broadcast(self, tensor: torch.Tensor, root: int = 0, *, is_patient: bool = False) -> None:
        """Nothing."""

    def all_to_all(self, tensor: torch.Tensor) -> torch.Tensor:
        """The one row."""
        return tensor

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """There is no other rank."""
        raise ShapeError("a group of one has no other rank", field="to")

    def receive(self, tensor: torch.Tensor, source: int, *, is_patient: bool = False) -> None:
        """There is no other rank."""
        raise ShapeError("a group of one has no other rank", field="source")

    def abort(self, rank: int) -> None:
        """Nothing waits."""
