"""Chooses the attention backend: by name, or the first that can serve the layer. Holds no state."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from quire.attention.backend import AttentionBackend, AttentionParams
from quire.attention.backends.native_cpu import NativeCpuBackend
from quire.attention.backends.torch_reference import TorchReferenceBackend
from quire.errors import ConfigError, unknown_name
from quire.kernels.native.runtime import NativeRuntime

# In order of preference.
BACKENDS: Mapping[str, type[AttentionBackend]] = {
    NativeCpuBackend.name: NativeCpuBackend,
    TorchReferenceBackend.name: TorchReferenceBackend,
}


def select_backend(
    name: str,
    params: AttentionParams,
    dtype: torch.dtype,
    device: torch.device,
    runtime: NativeRuntime | None = None,
) -> AttentionBackend:
    """A new backend that can serve a layer like `params`.

    Args:
        name: a backend's name, or "auto".
        runtime: the C++ kernels, for the backend that uses them.

    Raises:
        ConfigError: no such backend, or none fits; lists every candidate and its reasons.
    """
    if name != "auto" and name not in BACKENDS:
        raise unknown_name("attention backend", name, ["auto", *BACKENDS])
    candidates = BACKENDS if name == "auto" else {name: BACKENDS[name]}
    refusals = []
    for candidate, backend in candidates.items():
        reasons = backend.unsupported_reasons(params, dtype, device)
        if not reasons:
            made = backend.try_create(runtime)
            if made is not None:
                return made
            reasons = ["the native kernels are not in use"]
        refusals.append(f"{candidate}: {'; '.join(reasons)}")
    hint = "use dtype float32, bfloat16 or float16" if name == "auto" else "use attention_backend='auto'"
    raise ConfigError(
        f"no attention backend can serve this model on {device.type}: {' | '.join(refusals)}",
        hint=hint,
        field="attention_backend",
    )
