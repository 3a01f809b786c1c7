"""Which operations each platform gets."""

from __future__ import annotations

import dataclasses

from quire.layers.kernels import TorchKernels
from quire.platforms import GpuInfo
from quire.sample.ops.torch_ops import TorchSamplingOps
from quire.utils.memory import GIB
from quire.worker.device.graphs import no_graphs
from quire.worker.device.registry import make_device_ops
from quire.worker.setup import make_setup
from tests.unit.worker.tiny import cpu_platform, tiny_config


def test_a_cuda_device_computes_by_torch_in_its_own_memory() -> None:
    gpu = GpuInfo(name="test", total_bytes=80 * GIB, capability=(9, 0))
    ops = make_device_ops(make_setup(tiny_config(), dataclasses.replace(cpu_platform(), device="cuda", gpus=(gpu,))))
    assert str(ops.device) == "cuda" and not ops.memory.is_host
    assert isinstance(ops.layers, TorchKernels) and isinstance(ops.sampling, TorchSamplingOps)
    assert (ops.attention.name, ops.make_graphs, ops.packing_cache) == ("torch_reference", no_graphs, None)


def test_a_cpu_without_native_attention_computes_by_torch_in_the_hosts_memory() -> None:
    ops = make_device_ops(make_setup(tiny_config(attention_backend="torch_reference"), cpu_platform()))
    assert isinstance(ops.layers, TorchKernels) and ops.memory.is_host
