"""The devices: which constructor makes the operations of each. The only place that asks what the device is."""

from __future__ import annotations

from collections.abc import Callable

from quire.attention.backends.native_cpu import NativeCpuBackend
from quire.worker.device.native_cpu import native_cpu
from quire.worker.device.ops import DeviceOps
from quire.worker.device.torch_ops import torch_ops
from quire.worker.setup import WorkerSetup


def cpu_ops(setup: WorkerSetup) -> DeviceOps:
    """The native kernels where the configuration chose their attention, which it does where they run; else torch."""
    is_native = setup.config.device.attention_backend == NativeCpuBackend.name
    return native_cpu(setup) if is_native else torch_ops(setup)


DEVICES: dict[str, Callable[[WorkerSetup], DeviceOps]] = {"cpu": cpu_ops, "cuda": torch_ops}
"""`Platform.device` -> what makes its operations."""


def make_device_ops(setup: WorkerSetup) -> DeviceOps:
    """The operations of the device that the platform has.

    Raises:
        QuireError: its kernels cannot be loaded, or cannot serve the model.
    """
    return DEVICES[setup.platform.device](setup)
