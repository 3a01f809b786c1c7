"""What reaches native code is what it expects: anything else is refused in Python, or computed as if it were plain."""

from __future__ import annotations

import inspect
import random
from typing import Any

import pytest
import torch

from quire.kernels.native import attention, elementwise, linear, memory, quant, sampling
from tests.kernels.native.fuzz import Boundary, Call, run
from tests.kernels.native.fuzz_calls import CALLS
from tests.kernels.native.guards import randn

NUM_CALLS = 1500
MODULES = (attention, elementwise, linear, memory, quant, sampling)


def test_spoilt_calls_are_refused_or_computed_as_plain_ones(tier: str):
    counts = run(Boundary(tier, CALLS), range(NUM_CALLS))
    assert counts.keys() == CALLS.keys()
    for name, (computed, refused) in counts.items():
        assert computed and refused, f"{name}: {computed} computed, {refused} refused"


def test_every_wrapper_is_called():
    public = {
        name
        for module in MODULES
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if function.__module__ == module.__name__ and "runtime" in inspect.signature(function).parameters
        if not name.startswith("_")
    } | {"huge_zeros"}
    called = {make(random.Random(seed)).function.__name__ for make in CALLS.values() for seed in range(20)}
    assert called == public - {"native_cache"}  # a part of attention's


def double_by_address(runtime: Any, x: torch.Tensor) -> torch.Tensor:
    return 2 * x.as_strided(x.shape, torch.empty(x.shape, device="meta").stride())


def double_in_place(runtime: Any, x: torch.Tensor) -> torch.Tensor:
    return x.mul_(2)


@pytest.mark.parametrize("wrong", [double_by_address, double_in_place], ids=["ignores strides", "writes its input"])
def test_a_wrapper_that_trusts_its_tensors_is_found(wrong: Any):
    boundary = Boundary("portable", {"wrong": lambda rng: Call(wrong, {"x": randn(3, 5)})})
    with pytest.raises(AssertionError, match="seed"):
        run(boundary, range(200))
