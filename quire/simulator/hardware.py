"""Accelerators by name: the figures of their makers' data sheets. Dense rates, decimal units."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One device.

    Attributes:
        flops: peak operations per second by dtype, without sparsity.
        bandwidth: of its memory, bytes per second.
        capacity: of its memory, bytes.
        link: bytes per second to its neighbours, one direction.
        source: where the figures are from.
    """

    name: str
    flops: Mapping[str, float] = field(default_factory=dict)
    bandwidth: float
    capacity: float
    link: float
    source: str


HARDWARE: Mapping[str, Hardware] = {
    one.name.lower(): one
    for one in (
        Hardware(
            name="H100", flops={"bfloat16": 989e12, "float16": 989e12, "fp8": 1979e12, "float32": 67e12},
            bandwidth=3.35e12, capacity=80e9, link=450e9,
            source="NVIDIA H100 Tensor Core GPU data sheet, SXM5 (NVLink 900 GB/s both ways)",
        ),
        Hardware(
            name="H200", flops={"bfloat16": 989e12, "float16": 989e12, "fp8": 1979e12, "float32": 67e12},
            bandwidth=4.8e12, capacity=141e9, link=450e9,
            source="NVIDIA H200 Tensor Core GPU data sheet, SXM (NVLink 900 GB/s both ways)",
        ),
        Hardware(
            name="A100", flops={"bfloat16": 312e12, "float16": 312e12, "float32": 19.5e12},
            bandwidth=2.039e12, capacity=80e9, link=300e9,
            source="NVIDIA A100 80GB data sheet, SXM4 (NVLink 600 GB/s both ways)",
        ),
        Hardware(
            name="L4", flops={"bfloat16": 121e12, "float16": 121e12, "fp8": 242e12, "float32": 30.3e12},
            bandwidth=0.3e12, capacity=24e9, link=32e9,
            source="NVIDIA L4 data sheet (rates there with sparsity, halved here; PCIe Gen4 x16, 64 GB/s both ways)",
        ),
        Hardware(
            name="MI300X", flops={"bfloat16": 1307e12, "float16": 1307e12, "fp8": 2615e12, "float32": 163e12},
            bandwidth=5.3e12, capacity=192e9, link=448e9,
            source="AMD Instinct MI300X data sheet (Infinity Fabric 7 x 128 GB/s both ways)",
        ),
        Hardware(
            name="Xeon", flops={"bfloat16": 229e12, "float16": 229e12, "float32": 7.2e12},
            bandwidth=0.307e12, capacity=512e9, link=24e9,
            source="Intel Xeon Platinum 8480+, one socket: 56 cores x 2048 AMX operations per cycle x 2.0 GHz (base); "
            "8 channels of DDR5-4800; UPI at 16 GT/s; 512 GB fitted (assumed)",
        ),
    )
}  # fmt: skip
