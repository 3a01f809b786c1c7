from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from quire.errors import ConfigError
from quire.platforms import GpuInfo, Platform, detect_platform
from quire.platforms.cuda import read_gpus
from quire.utils.memory import GIB, MemoryInfo

CPUINFO = """processor\t: 0
model name\t: Some CPU
flags\t\t: fpu sse2 avx2 {flags}

processor\t: 1
model name\t: Some CPU
flags\t\t: fpu sse2 avx2 {flags}
"""


def fake_proc(tmp_path: Path, flags: str = "") -> Path:
    (tmp_path / "cpuinfo").write_text(CPUINFO.format(flags=flags))
    (tmp_path / "meminfo").write_text("MemTotal: 2000 kB\nMemFree: 100 kB\nMemAvailable: 1500 kB\n")
    return tmp_path


@pytest.mark.parametrize(
    ("flags", "dtype"), [("", "float32"), ("avx512_bf16", "bfloat16"), ("amx_bf16 amx_tile", "bfloat16")]
)
def test_bfloat16_is_the_default_on_a_cpu_only_when_it_computes_it_natively(
    tmp_path: Path, flags: str, dtype: str
) -> None:
    platform = detect_platform("cpu", proc_root=fake_proc(tmp_path, flags), cgroup_root=tmp_path / "none")
    assert platform.device == "cpu" and platform.is_cpu and platform.cpu_name == "Some CPU"
    assert platform.has_fast_bfloat16 == (dtype == "bfloat16")
    assert platform.memory_bytes == 1500 * 1024 and platform.num_cpus >= 1
    assert "Some CPU" in platform.describe()


def test_arm_features_are_read_too(tmp_path: Path) -> None:
    proc = fake_proc(tmp_path)
    (proc / "cpuinfo").write_text("processor : 0\nFeatures : fp asimd bf16\nCPU part : 0xd4f\n")
    assert detect_platform("cpu", proc_root=proc, cgroup_root=tmp_path / "none").has_fast_bfloat16


def test_a_platform_says_where_compute_threads_belong(tmp_path: Path) -> None:
    platform = detect_platform("cpu", proc_root=fake_proc(tmp_path), cgroup_root=tmp_path / "none")
    assert platform.cpus is not None and len(platform.compute_cpus(platform.num_cpus)) in (0, platform.num_cpus)
    assert dataclasses.replace(platform, cpus=None).compute_cpus(4) == ()


def test_a_gpu_platform_describes_the_gpu() -> None:
    gpu = GpuInfo(name="H100", total_bytes=80 * GIB, capability=(9, 0))
    memory = MemoryInfo(total_bytes=GIB, available_bytes=GIB, limited_by="x")
    platform = Platform(device="cuda", cpu_name="c", cpu_flags=frozenset(), num_cpus=4, memory=memory, gpus=(gpu, gpu))
    assert platform.memory_bytes == 80 * GIB
    assert "H100" in platform.describe() and "2" in platform.describe()


def test_a_machine_without_a_driver_has_no_gpu() -> None:
    assert read_gpus("libno-such-driver.so.1") == ()


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown device 'tpu'") as caught:
        detect_platform("tpu")
    assert caught.value.hint == "valid: auto, cpu, cuda"


def test_looking_at_the_machine_imports_no_torch() -> None:
    code = (
        "import sys; from quire.platforms import detect_platform; detect_platform(); sys.exit('torch' in sys.modules)"
    )
    root = Path(__file__).parents[3]
    assert subprocess.run([sys.executable, "-c", code], cwd=root, check=False).returncode == 0
