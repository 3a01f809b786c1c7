"""vLLM's `platforms`: what machine this is, as `current_platform`, looked up when first asked for."""

from __future__ import annotations

from quire.platforms.detect import detect_platform

__all__ = ["CurrentPlatform", "current_platform"]


__path__: list[str] = []  # a package, so that modules below it are looked for


class CurrentPlatform:
    """This machine."""

    @property
    def device_type(self) -> str:
        """Kind of device: "cpu" or "cuda"."""
        return detect_platform("auto").device

    def is_cpu(self) -> bool:
        """True where engines run on the CPU."""
        return self.device_type == "cpu"

    def is_cuda(self) -> bool:
        """True where engines run on an NVIDIA GPU."""
        return self.device_type == "cuda"

    def is_cuda_alike(self) -> bool:
        """As `is_cuda`."""
        return self.is_cuda()

    def is_rocm(self) -> bool:
        """False: AMD's GPUs are not supported."""
        return False

    def is_xpu(self) -> bool:
        """False: Intel's GPUs are not supported."""
        return False

    def is_tpu(self) -> bool:
        """False: TPUs are not supported."""
        return False


current_platform = CurrentPlatform()
