"""Choosing a backend by name or automatically."""

from __future__ import annotations

import pytest
import torch

from quire.attention import selector
from quire.attention.backend import AttentionParams
from quire.attention.backends.native_cpu import NativeCpuBackend
from quire.attention.backends.torch_reference import TorchReferenceBackend
from quire.errors import ConfigError
from quire.kernels.native.runtime import NativeRuntime

PARAMS = AttentionParams(num_heads=4, num_kv_heads=2, head_size=20, scale=0.2)
CPU = torch.device("cpu")


class PickyBackend(TorchReferenceBackend):
    """Serves no layer of these tests."""

    name = "picky"

    @staticmethod
    def unsupported_reasons(params: AttentionParams, dtype: torch.dtype, device: torch.device) -> list[str]:
        return [f"head_size {params.head_size} is not a multiple of 16", "no AVX-512"]


@pytest.fixture
def two_backends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selector, "BACKENDS", {"picky": PickyBackend, "torch_reference": TorchReferenceBackend})


@pytest.mark.parametrize("name", ["auto", "torch_reference"])
def test_the_reference_backend_serves_the_float_types(name: str):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert selector.select_backend(name, [PARAMS], dtype, CPU).name == "torch_reference"


@pytest.mark.usefixtures("two_backends")
def test_auto_takes_the_first_that_fits():
    assert selector.select_backend("auto", [PARAMS], torch.float32, CPU).name == "torch_reference"


@pytest.mark.usefixtures("two_backends")
def test_when_none_fits_every_candidate_and_reason_is_listed():
    with pytest.raises(ConfigError) as caught:
        selector.select_backend("auto", [PARAMS], torch.int8, CPU)
    for part in (
        "picky: head_size 20 is not a multiple of 16; no AVX-512",
        "torch_reference: dtype torch.int8",
        "hint:",
    ):
        assert part in str(caught.value)


@pytest.mark.usefixtures("two_backends")
def test_a_backend_asked_for_by_name_is_not_replaced():
    with pytest.raises(ConfigError, match="picky: head_size") as caught:
        selector.select_backend("picky", [PARAMS], torch.float32, CPU)
    assert caught.value.hint == "use attention_backend='auto'"


def test_the_native_backend_is_the_one_that_was_made_with_its_runtime_or_says_that_there_is_none():
    own = NativeCpuBackend(NativeRuntime("portable"))
    assert selector.select_backend("auto", [PARAMS], torch.float32, CPU, own) is own
    with pytest.raises(ConfigError, match="native_cpu: the native kernels are not in use"):
        selector.select_backend("native_cpu", [PARAMS], torch.float32, CPU)


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(ConfigError, match="did you mean 'torch_reference'"):
        selector.select_backend("torch_referense", [PARAMS], torch.float32, CPU)
