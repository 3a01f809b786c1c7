"""What cannot be computed by several ranks (yet), each refused by its name. Called by `config.resolve`. Pure."""

from __future__ import annotations

from quire.config.engine import QuireConfig
from quire.config.model import OWN_QUANTIZATIONS
from quire.errors import UnsupportedError


def check_parallel(config: QuireConfig) -> None:
    """Raise for settings of a resolved configuration that several ranks cannot honour."""
    num_ranks = config.parallel.tensor_parallel_size
    if num_ranks == 1:
        return
    model = config.model
    others = {
        "attention_backend": (config.device.attention_backend != "native_cpu", "it needs the native CPU kernels"),
        "model_impl": (model.model_impl == "transformers", "classes of transformers are not divided"),
        "quantization": (
            model.quantization is not None and model.quantization not in OWN_QUANTIZATIONS,
            "formats of plugins are not divided",
        ),
        "quantization_report": (model.quantization_report, "no rank has the whole of a matrix"),
    }  # fmt: skip
    for name, (is_set, why) in others.items():
        if is_set:
            raise UnsupportedError(
                f"{name} is not supported with tensor_parallel_size={num_ranks}: {why}",
                hint=f"use tensor_parallel_size=1, or leave out {name}",
                field=name,
            )
