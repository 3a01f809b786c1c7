"""From a resolved configuration to an engine core: the model loaded, the KV cache planned, the control plane on it.

Called by `engine.factory` for an engine in one process, and by the process that holds an engine core. Owns no state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quire.config import QuireConfig
from quire.engine.core import EngineCore
from quire.engine.grammar_gate import grammar_gate, make_grammars
from quire.engine.step_recovery import StepRecovery
from quire.executor.base import Executor
from quire.executor.uniproc import UniProcExecutor
from quire.kv_cache.planning import plan_kv_cache
from quire.logger import get_logger
from quire.platforms.interface import Platform
from quire.sample.logits_processor import ProcessorSource
from quire.scheduler.admission import AdmissionGate
from quire.scheduler.scheduler import Scheduler
from quire.utils.phases import PhaseTimer

logger = get_logger(__name__)


def build_core(
    config: QuireConfig,
    platform: Platform,
    timer: PhaseTimer,
    *,
    logits_processors: Sequence[ProcessorSource] = (),
    on_step: Callable[[int], None] | None = None,
) -> EngineCore:
    """An engine core with its model loaded and its KV cache allocated.

    Args:
        config: resolved.
        timer: gets the phases.
        on_step: called with the number of tokens of each step, before it runs.

    Raises:
        QuireError: the model or the machine does not allow it.
    """
    with timer.phase("model"):
        executor: Executor = UniProcExecutor(config, platform, logits_processors)
    with timer.phase("KV cache"):
        recovery = StepRecovery()
        grammars = make_grammars(config)
        gates = (recovery.gate, grammar_gate(grammars))
        scheduler, num_blocks = _make_scheduler(config, executor, gates)
    return EngineCore(executor, scheduler, recovery, num_blocks, on_step, grammars=grammars)


def _make_scheduler(config: QuireConfig, executor: Executor, gates: tuple[AdmissionGate, ...]) -> tuple[Scheduler, int]:
    """Divide the memory that is left, and start the control plane on it; also the number of pages."""
    max_len = config.max_model_len
    specs, available_bytes = executor.kv_cache_specs(), executor.available_kv_cache_bytes()
    kv_cache_config = plan_kv_cache(specs, available_bytes, config.cache, max_len)
    executor.initialize_kv_cache(kv_cache_config)
    num_tokens = (kv_cache_config.num_blocks - 1) * kv_cache_config.block_size
    logger.info(
        "KV cache: %d pages of %d tokens, room for %d tokens (%.1f requests of %d)",
        kv_cache_config.num_blocks, kv_cache_config.block_size, num_tokens, num_tokens / max_len, max_len,
    )  # fmt: skip
    scheduler = Scheduler(config.scheduler, config.cache, kv_cache_config, max_len, gates=gates)
    return scheduler, kv_cache_config.num_blocks
