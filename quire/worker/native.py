"""What the worker makes for the native CPU kernels: the runtime, and the layers on it. No state."""

from __future__ import annotations

import torch

from quire.config.engine import QuireConfig
from quire.kernels.native.runtime import NativeRuntime
from quire.layers.kernels import LayerKernels, TorchKernels
from quire.layers.native import NativeKernels
from quire.logger import get_logger

logger = get_logger(__name__)


def make_runtime(config: QuireConfig, num_threads: int) -> NativeRuntime | None:
    """Tier and threads of the native kernels; None when the config chose another backend."""
    if config.device.attention_backend != "native_cpu":
        return None
    runtime = NativeRuntime(config.device.kernel_tier, num_threads)
    logger.info("native kernels: tier %s, %d threads", runtime.tier, num_threads)
    return runtime


def make_kernels(config: QuireConfig, runtime: NativeRuntime | None, dtype: torch.dtype) -> LayerKernels:
    """What computes the model's layers."""
    if runtime is None:
        return TorchKernels()
    return NativeKernels(runtime, dtype, config.model.quantization)
