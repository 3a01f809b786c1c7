"""ExpertExchange: one rank's end of a group of replicas that divide the experts of a mixture among all their ranks.

All replicas take part in every pass of the model: a pass begins with the number of tokens of each, then every mixture
sends the vectors of all to the ranks that have their experts, and brings the results back. Made with the device's
operations; owns the communicator. See docs/adr/0108.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Sequence

import torch

from quire.core.expert_group import ExpertGroup
from quire.distributed.shared_memory import DEFAULT_CAPACITY
from quire.errors import ConfigError
from quire.kernels.native.communicator import NativeCommunicator, region_bytes
from quire.kernels.native.runtime import NativeRuntime
from quire.kernels.shared_rows import ExpertRows, SharedRows

HEAD_BYTES = 256  # of what a replica sends first, rounded up


class ExpertExchange:
    """The way to the experts of all replicas.

    Args:
        runtime: whose threads copy large results, and where results go while a step is recorded.
        group: the replica's place.
        rank: of this process in its replica.
        ranks_per_replica: which all have the same tokens.

    Attributes:
        rank, size: among all ranks, replica by replica.
        room: tokens of other replicas that the rows of a dispatch have room for.
        num_passes: that were begun.
        on_pass: called with the tokens of all replicas when one begins; None = nothing is.
    """

    def __init__(
        self,
        runtime: NativeRuntime,
        group: ExpertGroup,
        rank: int,
        ranks_per_replica: int,
        *,
        capacity: int = DEFAULT_CAPACITY,
        spin_us: int = 1000,
    ) -> None:
        self.rank = group.replica * ranks_per_replica + rank
        self.size = group.num_replicas * ranks_per_replica
        self.room = self.num_passes = 0
        self.on_pass: Callable[[int], None] | None = None
        self._ranks_per_replica = ranks_per_replica
        self._part_bytes = capacity // group.num_replicas
        self._bell = group.bells[group.replica]
        self._others = [bell for replica, bell in enumerate(group.bells) if replica != group.replica and not rank]
        os.ftruncate(group.fd, region_bytes(self.size, capacity))  # all ranks to the same size
        self._native = NativeCommunicator(
            runtime, group.fd, self.rank, self.size, capacity, spin_us, int(group.timeout_s * 1e6)
        )

    @property
    def bell(self) -> int:
        """Can be read when another replica may have begun a pass."""
        return self._bell

    @property
    def is_awaited(self) -> bool:
        """Whether another rank has begun a pass that this one has not; the bell is silent until it rings again."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._bell)
        return self._native.is_awaited

    @property
    def busy_s(self) -> float:
        """As `Communicator.busy_s`."""
        return self._native.busy_s

    def check_room(self, num_choices: int, vector_bytes: int) -> None:
        """Refuse steps that could not be sent.

        Args:
            num_choices: of a replica in a step, at most.

        Raises:
            ConfigError: says how many there may be.
        """
        most = (self._part_bytes - HEAD_BYTES - vector_bytes) // 4
        if num_choices > most:
            raise ConfigError(
                f"a step of {num_choices} choices of experts is more than the replicas can exchange at once: {most}",
                hint="use a smaller max_num_batched_tokens", field="max_num_batched_tokens",
            )  # fmt: skip

    def begin_pass(self, num_tokens: int) -> int:
        """Take part in the next pass of all replicas; how many tokens the others have.

        Raises:
            CommunicationError: one has ended, or did not come.
        """
        self._native.announce(num_tokens)
        for bell in self._others:
            os.eventfd_write(bell, 1)
        numbers = self._native.announced()[:: self._ranks_per_replica]
        self.num_passes += 1
        if self.on_pass is not None:
            self.on_pass(sum(numbers))
        self.room = sum(numbers) - num_tokens
        return self.room

    def dispatch(self, own: ExpertRows, slots: torch.Tensor | None, firsts: Sequence[int]) -> SharedRows:
        """Send vectors to their experts; what has come for those of this rank.

        Args:
            slots: [num_experts] int32: of each expert; None = its own number.
            firsts: first slot of each rank; the last is the number of experts.
        """
        num_tokens, num_chosen = own.expert_ids.shape
        num_rows = (num_tokens + self.room) * num_chosen
        return self._native.dispatch(own, slots, firsts, self._ranks_per_replica, num_rows)

    def collect(
        self, rows: torch.Tensor, shared: SharedRows, places: torch.Tensor, firsts: Sequence[int]
    ) -> torch.Tensor:
        """The results of all experts for the choices of this replica; as `NativeCommunicator.collect`."""
        return self._native.collect(rows, shared, places, firsts, self._ranks_per_replica)

    def abort(self) -> None:
        """This rank cannot go on: what waits for it, on all ranks, fails."""
        self._native.abort(self.rank)
