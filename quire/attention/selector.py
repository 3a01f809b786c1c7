"""Chooses the attention backend: by name, or the first that can serve the layer. Holds no state."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch

from quire.attention.backend import AttentionBackend, AttentionParams
from quire.attention.backends.native_cpu import NativeCpuBackend
from quire.attention.backends.torch_reference import TorchReferenceBackend
from quire.errors import ConfigError
from quire.plugins import ATTENTION_BACKEND, load_plugin, unknown_choice

# In order of preference.
BACKENDS: Mapping[str, type[AttentionBackend]] = {
    NativeCpuBackend.name: NativeCpuBackend,
    TorchReferenceBackend.name: TorchReferenceBackend,
}


def backend_class(name: str) -> type[AttentionBackend]:
    """The backend of this name, Quire's or a plugin's.

    Raises:
        ConfigError: there is none, or the plugin cannot be used.
    """
    found: type[AttentionBackend] | None = BACKENDS.get(name) or load_plugin(ATTENTION_BACKEND, name, AttentionBackend)
    if found is None:
        raise unknown_choice(ATTENTION_BACKEND, name, ["auto", *BACKENDS])
    return found


def select_backend(
    name: str,
    layers: Collection[AttentionParams],
    dtype: torch.dtype,
    device: torch.device,
    own: AttentionBackend | None = None,
) -> AttentionBackend:
    """A new backend that can serve layers like these.

    Args:
        name: a backend's name, or "auto".
        own: the backend of the device's own kernels, which is made where these are.

    Raises:
        ConfigError: no such backend, or none fits; lists every candidate and its reasons.
    """
    candidates = BACKENDS if name == "auto" else {name: backend_class(name)}
    refusals = []
    for candidate, backend in candidates.items():
        found = (backend.unsupported_reasons(params, dtype, device) for params in layers)
        reasons = list(dict.fromkeys(reason for of_layer in found for reason in of_layer))
        if not reasons:
            made = own if own is not None and own.name == candidate else backend.try_create()
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
