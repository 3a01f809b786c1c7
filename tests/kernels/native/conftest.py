"""Every native kernel test runs on every tier this machine has, and on the emulated tile unit."""

from __future__ import annotations

import pytest

from quire import envs
from quire.kernels.native.library import EMULATED_TIER, supported_tiers
from quire.kernels.native.runtime import NativeRuntime

FORCED = envs.kernel_tier()  # set by `make test-tiers`
TIERS = [*supported_tiers(), EMULATED_TIER] if FORCED is None else [FORCED]


@pytest.fixture(scope="session", params=TIERS)
def tier(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="session", params=[1, 2], ids="{} threads".format)
def runtime(request: pytest.FixtureRequest, tier: str) -> NativeRuntime:
    """A tier with one thread, and with two."""
    return NativeRuntime(tier, num_threads=request.param)


@pytest.fixture(scope="session")
def portable() -> NativeRuntime:
    """What every tier's bits are compared with."""
    return NativeRuntime("portable")
