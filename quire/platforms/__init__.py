"""The machine: what it is, what it has, as a frozen value. Imports no torch."""

from quire.platforms.detect import detect_platform
from quire.platforms.interface import GpuInfo, Platform

__all__ = ["GpuInfo", "Platform", "detect_platform"]
