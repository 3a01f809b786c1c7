"""PipelineStage: which layers of a model a rank has, and the way of hidden states to and from its neighbours.

A value, made with the device's operations and passed to the model's constructor. Ranks are numbered stage by stage;
rank i of a stage sends to rank i of the next one, as every rank of a stage has the whole of what a layer gives.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quire.distributed.communicator import Communicator


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineStage:
    """One stage of several.

    Attributes:
        communicator: between the ranks of all stages.
        number: of the stage, from 0.
        num_stages: how many there are.
        layers: numbers of its layers in the model.
    """

    communicator: Communicator
    number: int
    num_stages: int
    layers: range

    @property
    def size(self) -> int:
        """Ranks of a stage."""
        return self.communicator.size // self.num_stages

    @property
    def is_first(self) -> bool:
        """It has the embedding and the output projection, and samples."""
        return self.number == 0

    @property
    def is_last(self) -> bool:
        """It has the final norm."""
        return self.number == self.num_stages - 1

    @property
    def is_lead(self) -> bool:
        """This rank is the first of its stage."""
        return self.communicator.rank % self.size == 0

    @property
    def last_lead(self) -> int:
        """The first rank of the last stage."""
        return self.communicator.size - self.size

    def send(self, tensor: torch.Tensor) -> None:
        """To the next stage."""
        self.communicator.send(tensor, self.communicator.rank + self.size)

    def receive(self, num_rows: int, size: int, dtype: torch.dtype) -> torch.Tensor:
        """What the stage before sends: [num_rows, size]."""
        return self.communicator.receive_new((num_rows, size), dtype, self.communicator.rank - self.size)
