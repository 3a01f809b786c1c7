"""NativeCommunicator: collectives of the C++ library, in memory that processes of one machine share.

Called by `distributed.shared_memory`. Every call is a kernel: it can be recorded in a step and replayed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate

import torch

from quire.errors import CommunicationError, ShapeError
from quire.kernels.native.checks import DTYPE_CODES, FLOATS, check_apart, check_size, check_tensor
from quire.kernels.native.library import load_library
from quire.kernels.native.runtime import NativeRuntime
from quire.kernels.shared_rows import ExpertRows, SharedRows

ALIGNMENT = 64


def max_ranks() -> int:
    """Most processes of a group."""
    return int(load_library().MAX_RANKS)


def region_bytes(size: int, capacity: int) -> int:
    """Bytes of the memory that `size` ranks share."""
    return int(load_library().region_bytes(size, capacity))


class NativeCommunicator:
    """One rank's end of a shared region.

    Args:
        runtime: copies large results by its threads.
        fd: of the region, `region_bytes` of zeros to begin with; may be closed afterwards.
        capacity: bytes that one round of an operation moves: a multiple of 64, at least 64 * size * size. An operation
            on more takes several rounds; a single row must fit.
        spin_us: how long a wait spins before it sleeps.
        timeout_us: after which a wait fails.
        first_rank: what messages call rank 0, in a group that is a part of another.

    Raises:
        CommunicationError: the region cannot be mapped.
        ShapeError: numbers that make no group.
    """

    def __init__(
        self,
        runtime: NativeRuntime,
        fd: int,
        rank: int,
        size: int,
        capacity: int,
        spin_us: int,
        timeout_us: int,
        first_rank: int = 0,
    ) -> None:
        check_size("size", size, 1, max_ranks())
        check_size("rank", rank, 0, size - 1)
        check_size("first_rank", first_rank, 0, max_ranks() - size)
        check_size("capacity", capacity, ALIGNMENT * size * size, 1 << 34)
        if capacity % ALIGNMENT:
            raise ShapeError(f"capacity is {capacity}, expected a multiple of {ALIGNMENT}", field="capacity")
        self.rank, self.size, self.capacity = rank, size, capacity
        self._runtime = runtime
        self._timeout_us = timeout_us
        with _failing():
            self._native = runtime.library.Communicator(fd, rank, size, capacity, spin_us, timeout_us, first_rank)

    def connect(self, hosts: Sequence[int], leads: Sequence[int], sources: Sequence[tuple[int, int]]) -> None:
        """Ranks of other machines take part from now on; before the first operation, once.

        Args:
            hosts: the machine of each rank.
            leads: for each machine, a connected socket to its first rank; -1 = this machine. They are taken over.
            sources: ranks of other machines and sockets from them, where this rank is the first of its machine.
        """
        with _failing():
            self._native.connect(list(hosts), list(leads), list(sources), self._timeout_us)

    def silence_s(self, rank: int) -> float:
        """Seconds since something came from a rank of another machine; 0 where another rank takes it in."""
        return float(self._native.silence_ms(rank)) * 1e-3

    @property
    def aborted(self) -> int | None:
        """The rank that has ended, where one has."""
        rank = int(self._native.aborted)
        return None if rank < 0 else rank

    @property
    def busy_s(self) -> float:
        """Seconds in operations so far, waits included; those of broadcasts, which may wait for work, are not."""
        return float(self._native.busy_ns) * 1e-9

    def abort(self, rank: int) -> None:
        """End all waits of all ranks: `rank`, counted as messages count, has ended."""
        check_size("rank", rank, 0, max_ranks() - 1)
        self._native.abort(rank)

    def barrier(self) -> None:
        """Wait until every rank is here."""
        with _failing():
            self._native.barrier(self._runtime.pool)

    def gather(
        self, own: torch.Tensor, widths: Sequence[int], out: torch.Tensor | None = None, root: int | None = None
    ) -> torch.Tensor:
        """The columns of all ranks side by side.

        Args:
            own: [num_rows, widths[rank]]; rows may be strided.
            widths: columns of each rank.
            out: [num_rows, sum of widths] of the same dtype, written; rows may be strided. `own` may be the part of it
                where it belongs. None = a new tensor.
            root: the rank that gets the result; elsewhere `out` stays as it was. None = every rank.
        """
        check_size("number of widths", len(widths), self.size, self.size)
        check_tensor("own", own, (own.dtype,), (-1, widths[self.rank]), strided_rows=True)
        num_rows, item = len(own), own.itemsize
        if out is None:
            out = self._runtime.empty(num_rows, sum(widths), dtype=own.dtype)
        check_tensor("out", out, (own.dtype,), (num_rows, sum(widths)), strided_rows=True)
        starts = [0, *accumulate(width * item for width in widths)]
        if starts[-1] > self.capacity:
            raise ShapeError(f"a row of {starts[-1]} bytes does not fit {self.capacity}", field="own")
        with _failing():
            self._native.gather(
                self._runtime.pool, own.data_ptr(), own.stride(0) * item, out.data_ptr(), out.stride(0) * item,
                num_rows, starts, -1 if root is None else root,
            )  # fmt: skip
        return out

    def local_ids(self, ids: torch.Tensor, first: int, count: int) -> torch.Tensor:
        """The rows ids - first, or 0 where that is not in 0 .. count - 1; `ids` [n] int64."""
        check_tensor("ids", ids, (torch.int64,), (-1,))
        out = self._runtime.empty(len(ids), dtype=torch.int64)
        self._runtime.library.local_ids(self._runtime.pool, ids.data_ptr(), out.data_ptr(), len(ids), first, count)
        return out

    def gather_rows(self, ids: torch.Tensor, first: int, count: int, own: torch.Tensor) -> torch.Tensor:
        """Rows of a divided table: row i is `own[i]` of the rank whose part, first .. first + count - 1, has ids[i].

        Args:
            ids: [n] int64, the same on all ranks, each in one rank's part.
            own: [n, size].
        """
        check_tensor("ids", ids, (torch.int64,), (-1,))
        check_tensor("own", own, (own.dtype,), (len(ids), -1))
        row_bytes = own.shape[1] * own.itemsize
        check_size("bytes of a row", row_bytes, 1, self.capacity)
        out = self._runtime.empty(*own.shape, dtype=own.dtype)
        with _failing():
            self._native.gather_rows(
                self._runtime.pool, ids.data_ptr(), first, count, own.data_ptr(), out.data_ptr(), len(ids), row_bytes
            )
        return out

    def gather_groups(self, rows: torch.Tensor, starts: torch.Tensor, firsts: Sequence[int]) -> None:
        """Rows that are sorted by group, of which each rank has computed those of its groups; in place.

        Args:
            rows: [num_rows, size].
            starts: [num_groups + 1] int32: first row of each group, from 0 to num_rows, rising; read when it runs.
            firsts: first group of each rank, rising from 0; the last is the number of groups.
        """
        check_tensor("rows", rows, (rows.dtype,), (-1, -1))
        check_size("number of firsts", len(firsts), self.size + 1, self.size + 1)
        check_tensor("starts", starts, (torch.int32,), (firsts[-1] + 1,))
        row_bytes = rows.shape[1] * rows.itemsize
        check_size("bytes of a row", row_bytes, 1, self.capacity)
        with _failing():
            fault = self._native.gather_groups(
                self._runtime.pool, rows.data_ptr(), starts.data_ptr(), list(firsts), len(rows), row_bytes
            )
        if fault is not None:
            raise ShapeError(fault, field="starts")

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Replace by the sum over the ranks, bfloat16 or float32, pairwise by rank in float32 and rounded once."""
        check_tensor("tensor", tensor, FLOATS, tuple(tensor.shape))
        self._reduce(tensor, is_scattered=False)

    def reduce_scatter(self, tensor: torch.Tensor) -> torch.Tensor:
        """As `all_reduce`, of which each rank gets its part alone: [size, n] -> [n]; `tensor` is overwritten."""
        check_tensor("tensor", tensor, FLOATS, (self.size, -1))
        self._reduce(tensor, is_scattered=True)
        return tensor[0]

    def _reduce(self, tensor: torch.Tensor, *, is_scattered: bool) -> None:
        with _failing():
            self._native.reduce(
                self._runtime.pool, tensor.data_ptr(), tensor.numel(), DTYPE_CODES[tensor.dtype], is_scattered
            )

    def broadcast(self, tensor: torch.Tensor, root: int, *, is_patient: bool = False) -> None:
        """Replace by the `tensor` of `root`; receivers have no timeout if `is_patient`."""
        check_tensor("tensor", tensor, (tensor.dtype,), tuple(tensor.shape))
        num_bytes = tensor.numel() * tensor.itemsize
        with _failing():
            self._native.broadcast(self._runtime.pool, tensor.data_ptr(), num_bytes, root, is_patient)

    def all_to_all(self, tensor: torch.Tensor) -> torch.Tensor:
        """[size, ...]: part i goes to rank i; the result has the parts that are for this rank."""
        check_tensor("tensor", tensor, (tensor.dtype,), (self.size, *tensor.shape[1:]))
        out = self._runtime.empty(*tensor.shape, dtype=tensor.dtype)
        check_apart("out", out, tensor=tensor)
        part_bytes = tensor.numel() * tensor.itemsize // self.size
        with _failing():
            self._native.all_to_all(self._runtime.pool, tensor.data_ptr(), out.data_ptr(), part_bytes)
        return out

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """To one rank; returns when the last 1 MiB may still be under way."""
        check_tensor("tensor", tensor, (tensor.dtype,), tuple(tensor.shape))
        with _failing():
            self._native.send(self._runtime.pool, tensor.data_ptr(), tensor.numel() * tensor.itemsize, to)

    def receive(self, tensor: torch.Tensor, source: int, *, is_patient: bool = False) -> None:
        """From one rank, which sends as many bytes."""
        check_tensor("tensor", tensor, (tensor.dtype,), tuple(tensor.shape))
        with _failing():
            self._native.receive(
                self._runtime.pool, tensor.data_ptr(), tensor.numel() * tensor.itemsize, source, is_patient
            )

    @property
    def is_awaited(self) -> bool:
        """Whether another rank has begun an operation that this one has not."""
        return bool(self._native.is_awaited)

    def announce(self, number: int) -> None:
        """To all ranks; `announced` is this communicator's next call."""
        with _failing():
            self._native.announce(number)

    def announced(self) -> list[int]:
        """What every rank has announced."""
        with _failing():
            return list(self._native.announced())

    def dispatch(
        self, own: ExpertRows, slots: torch.Tensor | None, firsts: Sequence[int], ranks_per_replica: int, num_rows: int
    ) -> SharedRows:
        """Send vectors to the ranks that have their experts.

        Args:
            own: vectors and choices of this replica; alike on all its ranks, of which the first sends.
            slots: [num_experts] int32: slot of each expert; None = its own number.
            firsts: first slot of each rank, rising from 0; the last is the number of experts.
            ranks_per_replica: ranks follow each other replica by replica.
            num_rows: rows that there is room for; more are an error on all ranks.
        """
        check_size("number of firsts", len(firsts), self.size + 1, self.size + 1)
        check_tensor("x", own.x, (own.x.dtype,), (-1, -1), strided_rows=True)
        check_tensor("expert_ids", own.expert_ids, (torch.int32,), (-1, -1))
        num_tokens, num_chosen = own.expert_ids.shape
        if own.x_rows is None:
            check_tensor("x", own.x, (own.x.dtype,), (num_tokens, -1), strided_rows=True)
        else:
            check_tensor("x_rows", own.x_rows, (torch.int32,), (num_tokens, num_chosen))
        if slots is not None:
            check_tensor("slots", slots, (torch.int32,), (firsts[-1],))
        check_size("num_rows", num_rows, num_tokens * num_chosen)
        size, num_own = own.x.shape[1], firsts[self.rank + 1] - firsts[self.rank]
        shared = SharedRows(
            rows=self._runtime.empty(num_rows, size, dtype=own.x.dtype),
            starts=self._runtime.empty(num_own + 1, dtype=torch.int32),
            extent=self._runtime.empty(3, dtype=torch.int32),
            places=self._runtime.empty(num_tokens, num_chosen, dtype=torch.int32),
        )
        item = own.x.itemsize
        with _failing():
            fault = self._native.dispatch(
                self._runtime.pool, ranks_per_replica, list(firsts), own.x.data_ptr(), own.x.stride(0) * item,
                size * item, own.expert_ids.data_ptr(), 0 if slots is None else slots.data_ptr(),
                0 if own.x_rows is None else own.x_rows.data_ptr(), num_tokens, num_chosen, len(own.x),
                shared.rows.data_ptr(), num_rows, shared.starts.data_ptr(), shared.extent.data_ptr(),
                shared.places.data_ptr(),
            )  # fmt: skip
        if fault is not None:
            raise ShapeError(fault, field="own")
        return shared

    def collect(
        self, rows: torch.Tensor, shared: SharedRows, places: torch.Tensor, firsts: Sequence[int],
        ranks_per_replica: int,
    ) -> torch.Tensor:  # fmt: skip
        """The results for this replica's choices: row places[t, j] is that of choice j of token t.

        Args:
            rows: [rows of `shared`, size]: what this rank has computed of them.
            shared: of the dispatch before.
            places: [num_tokens, num_chosen] int32, every row once.
        """
        check_tensor("rows", rows, (rows.dtype,), (len(shared.rows), -1))
        check_tensor("places", places, (torch.int32,), tuple(shared.places.shape))
        size = rows.shape[1]
        out = self._runtime.empty(places.numel(), size, dtype=rows.dtype)
        with _failing():
            fault = self._native.collect(
                self._runtime.pool, ranks_per_replica, list(firsts), rows.data_ptr(), len(rows), size * rows.itemsize,
                shared.extent.data_ptr(), shared.places.data_ptr(), places.data_ptr(), places.numel(), out.data_ptr(),
            )  # fmt: skip
        if fault is not None:
            raise ShapeError(fault, field="shared")
        return out

    def has_room_for(self, sizes: Sequence[int]) -> bool:
        """Whether messages of so many bytes to one rank fit its mailbox together."""
        library = load_library()
        return bool(sum(-(-size // library.MAIL_BYTES) for size in sizes) <= library.MAIL_SLOTS)

    def receive_new(self, shape: Sequence[int], dtype: torch.dtype, source: int) -> torch.Tensor:
        """As `receive`, into a new tensor; in a recorded step it is that of every replay."""
        out = self._runtime.empty(*shape, dtype=dtype)
        self.receive(out, source)
        return out


@contextmanager
def _failing() -> Iterator[None]:
    """What the library throws, as errors of ours."""
    try:
        yield
    except RuntimeError as error:
        raise CommunicationError(str(error)) from None
    except ValueError as error:
        raise ShapeError(f"not possible in this group: {error}") from None
