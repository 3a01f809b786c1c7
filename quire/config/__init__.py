"""Configuration as frozen data. No I/O, no torch."""

from quire.config.cache import CacheConfig
from quire.config.device import DeviceConfig, ParallelConfig
from quire.config.engine import ObservabilityConfig, QuireConfig, SupervisionConfig
from quire.config.hf_rope import RopeConfig
from quire.config.model import LoadConfig, ModelConfig
from quire.config.model_arch import ModelArch
from quire.config.scheduler import SchedulerConfig

__all__ = [
    "CacheConfig",
    "DeviceConfig",
    "LoadConfig",
    "ModelArch",
    "ModelConfig",
    "ObservabilityConfig",
    "ParallelConfig",
    "QuireConfig",
    "RopeConfig",
    "SchedulerConfig",
    "SupervisionConfig",
]
