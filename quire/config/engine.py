"""The whole configuration: one frozen value made of the parts. Pass the part that is needed, not the whole."""

from __future__ import annotations

from dataclasses import dataclass, field

from quire.config.base import check_settings, setting
from quire.config.cache import CacheConfig
from quire.config.device import DeviceConfig, ParallelConfig
from quire.config.hf_config import ModelArch
from quire.config.model import LoadConfig, ModelConfig
from quire.config.scheduler import SchedulerConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservabilityConfig:
    """What the engine says about itself."""

    disable_log_stats: bool = setting(True, "Do not log a line of statistics every few seconds.")

    def __post_init__(self) -> None:
        check_settings(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuireConfig:
    """Everything an engine is built from. `arch` is None until `resolve` has read the model's config.json."""

    model: ModelConfig = field(default_factory=ModelConfig)
    load: LoadConfig = field(default_factory=LoadConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    observability: ObservabilityConfig = field(default_factory=ObservabilityConfig)
    arch: ModelArch | None = None
    model_path: str = ""
