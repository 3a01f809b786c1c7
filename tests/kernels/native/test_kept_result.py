"""Memory that is lent to one result at a time."""

from __future__ import annotations

import torch

from quire.kernels.native.elementwise import rms_norm
from quire.kernels.native.reusable_output import ReusableOutput
from quire.kernels.native.runtime import NativeRuntime


def test_the_first_result_of_each_turn_takes_the_same_memory_and_grows_it_when_it_must():
    runtime, kept, weight = NativeRuntime(), ReusableOutput(), torch.ones(8)
    addresses = []
    for num_rows in (3, 2, 3, 700_000, 5):
        x = torch.randn(num_rows, 8)
        with kept.lent_to(runtime):
            first, second = rms_norm(runtime, x, weight, 1e-5), rms_norm(runtime, 2 * x, weight, 1e-5)
        assert torch.equal(first, rms_norm(runtime, x, weight, 1e-5)) and second.shape == first.shape
        assert first.data_ptr() != second.data_ptr()
        addresses.append(first.data_ptr())
    assert addresses[0] == addresses[1] == addresses[2] != addresses[3] == addresses[4]
    assert runtime.scratch is None
