"""Describe this machine and installation, for bug reports; holds no secrets.

Run as `quire collect-env`. Reads versions, CPU features, memory limits and thread counts; never the values of
environment variables that are not Quire's own.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform as python_platform
import sys
from typing import Any

from quire import envs
from quire.config.base import info_of, settings_of
from quire.config.device import DeviceConfig
from quire.errors import NativeLibraryError
from quire.kernels.native.library import choose_tier, examine_tiers
from quire.platforms.detect import detect_platform
from quire.platforms.interface import Platform
from quire.utils.memory import format_bytes, read_huge_page_mode
from quire.version import __version__

PACKAGES = (
    "torch",
    "numpy",
    "tokenizers",
    "safetensors",
    "jinja2",
    "msgspec",
    "sentencepiece",
    "huggingface_hub",
    "tqdm",
)
CPU_FLAGS = (
    "avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx_vnni", "avx512_bf16", "avx512_fp16",
    "amx_tile", "amx_bf16", "amx_int8", "asimd", "bf16", "i8mm", "sve",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `quire collect-env`."""
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")


def run(args: argparse.Namespace) -> int:
    """Print the description."""
    report = collect()
    if args.json:
        print(json.dumps(report))
    else:
        width = max(map(len, report))
        print("\n".join(f"{name:<{width}}  {_as_text(value)}" for name, value in report.items()))
    return 0


def collect() -> dict[str, Any]:
    """The description: name -> number, text, list or dict."""
    machine = detect_platform()
    return {
        "quire": __version__,
        "python": sys.version.split()[0],
        "os": python_platform.platform(),
        "packages": {name: _version(name) for name in PACKAGES},
        **_describe_machine(machine),
        **_describe_native(),
        **_describe_torch(),
        "attention_backends": [name for name in _backend_choices() if name != "auto"],
        "environment": _own_environment(),
    }


def _describe_machine(machine: Platform) -> dict[str, Any]:
    return {
        "device": machine.describe(),
        "cpu": machine.cpu_name,
        "cpus_in_machine": os.cpu_count(),
        "cores_usable": machine.num_cpus,
        "cpu_topology": machine.cpus.describe() if machine.cpus is not None else "unknown",
        "compute_threads_bound_to": machine.compute_cpus(machine.num_cpus) or "not pinned",
        "cpu_flags": [flag for flag in CPU_FLAGS if flag in machine.cpu_flags],
        "fast_bfloat16": machine.has_fast_bfloat16,
        "memory_total": format_bytes(machine.memory.total_bytes),
        "memory_available": format_bytes(machine.memory.available_bytes),
        "memory_limited_by": machine.memory.limited_by,
        "huge_pages": read_huge_page_mode(),
        "gpus": [f"{gpu.name}, {format_bytes(gpu.total_bytes)}, capability {gpu.capability}" for gpu in machine.gpus],
    }


def _describe_native() -> dict[str, Any]:
    try:
        reports = examine_tiers()
    except NativeLibraryError as error:
        return {"native_library": f"failed: {error.message}"}
    return {
        "kernel_tier": choose_tier("auto"),
        "kernel_tiers": [report.name for report in reports if report.problem is None],
        "kernel_tiers_refused": [f"{report.name}: {report.problem}" for report in reports if report.problem],
    }


def _describe_torch() -> dict[str, Any]:
    try:
        # Here, so that the command still reports the rest where torch is missing or broken.
        import torch
    except (ImportError, OSError) as error:
        return {"torch_import": f"failed: {error}"}
    return {
        "torch_threads": torch.get_num_threads(),
        "torch_cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "torch_cuda": torch.version.cuda,
    }


def _backend_choices() -> tuple[str, ...]:
    infos = {field.name: info_of(field) for field in settings_of(DeviceConfig)}
    return infos["attention_backend"].choices or ()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _own_environment() -> dict[str, Any]:
    return {
        "QUIRE_LOG_LEVEL": envs.log_level(),
        "QUIRE_CACHE_DIR": str(envs.cache_dir()),
        "OMP_NUM_THREADS": envs.omp_num_threads(),
    }


def _as_text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_missing(name) if one is None else one}" for name, one in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "none"
    return str(value)


def _missing(name: str) -> str:
    """What a package, or a variable of the environment, that is not there is."""
    return "not set" if name.isupper() else "not installed"
