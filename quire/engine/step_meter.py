"""StepMeter: adds to the outputs of steps what they computed and moved (--enable-mfu-metrics).

Made by the engine core's factory. Limits of the machine are measured once and kept in the cache directory.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path

from quire import envs
from quire.config import QuireConfig
from quire.core.engine_messages import EngineCoreOutputs
from quire.core.scheduler_output import SchedulerOutput
from quire.executor.base import Executor
from quire.logger import get_logger
from quire.platforms.cpu import read_cpu
from quire.simulator.costs import shape_of
from quire.simulator.work import StepWork
from quire.utils.cgroup import PROC_ROOT

logger = get_logger(__name__)

Limits = tuple[float, float]
UNKNOWN: Limits = (0.0, 0.0)


class StepMeter:
    """Counts the work of steps.

    Args:
        work: of the model.
    """

    def __init__(self, work: StepWork) -> None:
        self._work = work

    def add(self, outputs: EngineCoreOutputs, scheduled: SchedulerOutput, seconds: float) -> EngineCoreOutputs:
        """`outputs` of a step that took `seconds`, with its work; as they are where nothing was computed."""
        if not scheduled.total_num_scheduled_tokens:
            return outputs
        return dataclasses.replace(outputs, perf=self._work.of(shape_of(scheduled), seconds))


def make_meter(config: QuireConfig, executor: Executor) -> StepMeter | None:
    """None where it is not asked for; measures the machine if that was not done before."""
    if not config.observability.enable_mfu_metrics:
        return None
    limits = _limits(config, executor)
    if limits == UNKNOWN:
        logger.warning("limits of this device are not measured: work of steps is shown, MFU and MBU are not")
    else:
        logger.info("limits of a rank: %.1f GFLOP/s in products, %.1f GB/s read", limits[0] / 1e9, limits[1] / 1e9)
    return StepMeter(StepWork(config, limits, executor.call_worker("weight_bytes")))


def _limits(config: QuireConfig, executor: Executor) -> Limits:
    """Of one rank: as they were measured before on this processor with these settings, else measured now."""
    path = _kept_at(config)
    if path is not None and path.is_file():
        try:
            flops, bandwidth = json.loads(path.read_text())
            return float(flops), float(bandwidth)
        except (OSError, ValueError, TypeError):
            logger.warning("%s cannot be read; limits are measured again", path)
    measured: Limits | None = executor.call_worker("measure_limits")
    if measured is None:
        return UNKNOWN
    if path is not None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(measured))
        except OSError as error:
            logger.warning("limits are not kept: %s", error)
    return measured


def _kept_at(config: QuireConfig) -> Path | None:
    cache, device = envs.cache_dir(), config.device
    name, _ = read_cpu(PROC_ROOT)
    about = (name, device.device, device.kernel_tier, device.num_threads, config.model.dtype)
    digest = hashlib.sha256(repr(about).encode()).hexdigest()[:16]
    return None if cache is None else cache / "limits" / f"{digest}.json"
