"""CUDA devices, asked from the driver library without importing torch and without creating a context."""

from __future__ import annotations

import ctypes
import importlib.util
from pathlib import Path

from quire.platforms.interface import GpuInfo

_COMPUTE_CAPABILITY_MAJOR = 75
_COMPUTE_CAPABILITY_MINOR = 76


def torch_has_cuda() -> bool:
    """True when the installed torch was built with CUDA (read from its files: torch is not imported)."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return False
    return any((Path(folder) / "lib" / "libtorch_cuda.so").exists() for folder in spec.submodule_search_locations)


def read_gpus(library: str = "libcuda.so.1") -> tuple[GpuInfo, ...]:
    """The CUDA devices this process sees; empty without a driver or a device."""
    try:
        driver = ctypes.CDLL(library)
    except OSError:
        return ()
    count = ctypes.c_int()
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return ()
    return tuple(_read_gpu(driver, ordinal) for ordinal in range(count.value))


def _read_gpu(driver: ctypes.CDLL, ordinal: int) -> GpuInfo:
    device, total = ctypes.c_int(), ctypes.c_size_t()
    name = ctypes.create_string_buffer(128)
    driver.cuDeviceGet(ctypes.byref(device), ordinal)
    driver.cuDeviceGetName(name, len(name), device)
    driver.cuDeviceTotalMem_v2(ctypes.byref(total), device)
    capability = (
        _attribute(driver, _COMPUTE_CAPABILITY_MAJOR, device),
        _attribute(driver, _COMPUTE_CAPABILITY_MINOR, device),
    )
    return GpuInfo(name=name.value.decode(), total_bytes=total.value, capability=capability)


def _attribute(driver: ctypes.CDLL, attribute: int, device: ctypes.c_int) -> int:
    value = ctypes.c_int()
    driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device)
    return value.value
