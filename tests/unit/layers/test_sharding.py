"""Which outputs a rank has, and that it reads no others."""

from __future__ import annotations

import pytest
import torch

from quire.distributed.communicator import SingleCommunicator
from quire.layers.sharding import OwnRows, Shards
from quire.layers.stored_weight import StoredWeight, WeightFormat
from quire.layers.weight_target import TensorTarget


def shards(rank: int, size: int) -> Shards:
    communicator = SingleCommunicator()
    communicator.rank, communicator.size = rank, size
    return Shards(communicator)


@pytest.mark.parametrize("size", [16, 48, 100, 128, 2048, 3001])
@pytest.mark.parametrize("num_ranks", [1, 2, 3, 8])
def test_outputs_are_divided_in_panels_evenly_and_completely(size: int, num_ranks: int):
    widths = shards(0, num_ranks).widths(size)
    if -(-size // 16) < num_ranks:
        assert widths is None
        return
    assert widths is not None and sum(widths) == size and len(widths) == num_ranks
    assert all(width % 16 == 0 for width in widths[:-1]) and min(widths) > 0
    assert max(widths) - min(widths) <= 31
    ranges = [shards(rank, num_ranks).own_range(widths) for rank in range(num_ranks)]
    assert ranges[0][0] == 0 and all(one[1] == two[0] for one, two in zip(ranges, ranges[1:], strict=False))


def test_rows_of_other_ranks_are_neither_read_nor_kept():
    kept = torch.zeros(5, 4)
    target = OwnRows((10, 4), [(2, TensorTarget(kept[:2])), (7, TensorTarget(kept[2:]))])
    given = torch.arange(40.0).view(10, 4)
    given[[0, 1, 4, 5, 6]] = torch.nan  # of other ranks, which will refuse them
    assert target.load(given) and torch.equal(kept, given[[2, 3, 7, 8, 9]])
    stored = target.stored()
    assert torch.equal(stored[[2, 3, 7, 8, 9]], kept) and not stored[[0, 1, 4, 5, 6]].any()
    given[8] = torch.inf
    assert not target.load(given)


def test_stored_rows_are_taken_as_they_are_stored():
    class Blocks(TensorTarget):
        def load_stored(self, weight: StoredWeight) -> bool:
            self.tensor.copy_(weight.parts["blocks"])
            return True

    kept = torch.zeros(3, 4, dtype=torch.uint8)
    target = OwnRows((6, 32), [(3, Blocks(kept))])
    blocks = torch.arange(24, dtype=torch.uint8).view(6, 4)
    assert target.load_stored(StoredWeight(WeightFormat("Q4_K"), (6, 32), {"blocks": blocks}))
    assert torch.equal(kept, blocks[3:])
