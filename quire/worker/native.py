"""What the worker makes for the native CPU kernels: the runtime, and the layers on it. No state."""

from __future__ import annotations

import torch

from quire.config.engine import QuireConfig
from quire.config.model import OWN_QUANTIZATIONS
from quire.kernels.native.runtime import DEFAULT_SPIN_US, NativeRuntime
from quire.kernels.native.sampling import MAX_VOCAB_SIZE
from quire.layers.kernels import LayerKernels, TorchKernels
from quire.layers.native import NativeKernels
from quire.layers.quantization import QuantizedKernels, quantization_class
from quire.logger import get_logger
from quire.models.packing_cache import PackingCache, default_cache_directory
from quire.platforms.interface import Platform
from quire.sample.ops.interface import SamplingOps
from quire.sample.ops.native import NativeSamplingOps
from quire.sample.ops.torch_ops import TorchSamplingOps

logger = get_logger(__name__)

# Under a quota a spinning thread takes time that computing threads then lack: it waits from kernel to kernel of a step,
# which are tens of microseconds apart, and not from step to step.
QUOTA_SPIN_US = 100


def make_runtime(config: QuireConfig, num_threads: int, platform: Platform) -> NativeRuntime | None:
    """Tier, threads and their places for the native kernels; None when the config chose another backend."""
    if config.device.attention_backend != "native_cpu":
        return None
    cpus = platform.compute_cpus(num_threads)
    has_quota = platform.cpus is not None and platform.cpus.quota is not None
    spin_us = QUOTA_SPIN_US if has_quota else DEFAULT_SPIN_US
    runtime = NativeRuntime(config.device.kernel_tier, num_threads, cpus, spin_us)
    place = f"on CPUs {', '.join(map(str, cpus))}" if cpus else "not pinned"
    logger.info("native kernels: tier %s, %d threads %s", runtime.tier, num_threads, place)
    return runtime


def make_kernels(config: QuireConfig, runtime: NativeRuntime | None, dtype: torch.dtype) -> LayerKernels:
    """What computes the model's layers."""
    name = config.model.quantization
    own = name if name in OWN_QUANTIZATIONS else None
    kernels = TorchKernels() if runtime is None else NativeKernels(runtime, dtype, own)
    if name is None or own is not None:
        return kernels
    return QuantizedKernels(kernels, quantization_class(name)(kernels, dtype))


def make_sampling_ops(runtime: NativeRuntime | None, vocab_size: int) -> SamplingOps:
    """What chooses tokens."""
    return TorchSamplingOps() if runtime is None or vocab_size > MAX_VOCAB_SIZE else NativeSamplingOps(runtime)


def make_packing_cache(config: QuireConfig, runtime: NativeRuntime | None) -> PackingCache | None:
    """Where packed weights are kept; None when nothing is packed, or the errors of packing are asked for."""
    directory = default_cache_directory()
    if runtime is None or directory is None or not config.load.packing_cache or config.model.quantization_report:
        return None
    return PackingCache(directory, runtime)
