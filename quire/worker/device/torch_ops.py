"""Plain torch operations on any device it supports: the definition of what every other device computes."""

from __future__ import annotations

import torch

from quire.attention.selector import select_backend
from quire.core.step_clock import step_clock
from quire.layers.kernels import TorchKernels
from quire.layers.quantization import with_quantization
from quire.models.loader import attention_params_of
from quire.sample.ops.torch_ops import TorchSamplingOps
from quire.worker.device.memory import CudaMemory, HostMemory
from quire.worker.device.ops import DeviceOps
from quire.worker.setup import WorkerSetup


def torch_ops(setup: WorkerSetup) -> DeviceOps:
    """The operations; sets torch's number of threads.

    Raises:
        ConfigError: the attention backend does not exist or cannot serve the model.
    """
    config, platform = setup.config, setup.platform
    device = torch.device(platform.device)
    torch.set_num_threads(setup.num_threads)
    return DeviceOps(
        device=device,
        layers=with_quantization(TorchKernels(), config.model.quantization, setup.dtype),
        attention=select_backend(config.device.attention_backend, attention_params_of(setup.arch), setup.dtype, device),
        sampling=TorchSamplingOps(),
        memory=HostMemory(platform.memory.available_bytes) if platform.is_cpu else CudaMemory(device),
        clock=step_clock(config.parallel, is_cpu=platform.is_cpu),
    )
