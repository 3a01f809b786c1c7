"""What reaches native code is what it expects: anything else is refused in Python, or computed as if it were plain."""

from __future__ import annotations

import inspect
import random
from typing import Any

import pytest
import torch

from quire.errors import ShapeError
from quire.kernels.native import (
    attention,
    causal_conv,
    coded,
    delta_net,
    elementwise,
    experts,
    latent,
    linear,
    memory,
    quant,
    sampling,
    state_space,
)
from quire.kernels.native.runtime import NativeRuntime
from tests.kernels.native.fuzz import Boundary, Call, run
from tests.kernels.native.fuzz_blocks import BLOCK_CALLS
from tests.kernels.native.fuzz_calls import CALLS as PLAIN_CALLS
from tests.kernels.native.fuzz_coded import CODED_CALLS
from tests.kernels.native.fuzz_expert_calls import EXPERT_CALLS
from tests.kernels.native.guards import randn

CALLS = {**PLAIN_CALLS, **EXPERT_CALLS, **BLOCK_CALLS, **CODED_CALLS}
NUM_CALLS = 1500
MODULES = (
    attention, causal_conv, coded, delta_net, elementwise, experts, latent, linear, memory, quant, sampling,
    state_space,
)  # fmt: skip


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


SIZES = {
    "ids of rows": ("gather", "ids"),
    "first row to pack": ("pack", "first_row"),
    "number of rows": ("unpack", "num_rows"),
    "first row to unpack": ("unpack", "first_row"),
    "source pages": ("copy", "src_ids"),
    "target pages": ("copy", "dst_ids"),
}


@pytest.mark.parametrize(("call", "name"), SIZES.values(), ids=SIZES.keys())
def test_cve_2026_21869_negative_and_huge_sizes_do_not_reach_native_code(portable: NativeRuntime, call: str, name: str):
    made = next(one for seed in range(99) if holds_something((one := calls_of(call)(random.Random(seed))).args[name]))
    made.function(portable, **made.args)
    for wrong in (-1, -7, -(2**31), 2**31 - 1):
        given = made.args[name]
        spoilt = torch.full_like(given, wrong) if isinstance(given, torch.Tensor) else wrong
        before = {key: value.clone() for key, value in made.args.items() if isinstance(value, torch.Tensor)}
        with pytest.raises(ShapeError):
            made.function(portable, **{**made.args, name: spoilt})
        for key, value in before.items():
            assert torch.equal(made.args[key].view(torch.uint8), value.view(torch.uint8)), key


def holds_something(value: Any) -> bool:
    return not isinstance(value, torch.Tensor) or value.numel() > 0


def calls_of(word: str) -> Any:
    return next(make for make in CALLS.values() if word in make.__name__ and "quant" not in make.__name__)
