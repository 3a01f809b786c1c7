"""From a configuration to an engine in this process: every part built once, in order, and what is cheap checked first.

Called by `LLMEngine.from_config`. Owns no state.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.config import QuireConfig
from quire.engine.core_client.base import EngineCoreClient
from quire.engine.core_client.inproc import InprocClient
from quire.engine.core_client.sleepable import SleepableClient
from quire.engine.core_factory import build_core
from quire.engine.front_factory import build_front_end
from quire.engine.parts import EngineParts
from quire.logger import get_logger
from quire.models.model_dir import ModelDir
from quire.platforms.interface import Platform
from quire.sample.logits_processor import ProcessorSource, load_processors, validate_params
from quire.utils.phases import PhaseTimer

logger = get_logger(__name__)


def build_parts(
    config: QuireConfig,
    model_dir: ModelDir,
    platform: Platform,
    timer: PhaseTimer,
    *,
    logits_processors: Sequence[ProcessorSource] = (),
) -> EngineParts:
    """Everything an engine in this process is made of.

    Args:
        config, model_dir: resolved.
        platform: the machine.
        timer: gets the phases.
        logits_processors: custom processors, classes or "module:Class".

    Raises:
        QuireError: the configuration, the model directory or the machine does not allow it.
    """
    with timer.phase("logits processors"):
        processors = load_processors([*config.model.logits_processors, *logits_processors])
    check = (lambda params: validate_params(processors, params)) if processors else None
    with timer.phase("tokenizer and chat template"):
        front = build_front_end(config, model_dir, check)

    def build(phases: PhaseTimer) -> EngineCoreClient:
        if config.parallel.is_launched:
            from quire.engine.launched import launched_client  # late: few need it

            return launched_client(config, platform, phases, processors)
        return InprocClient(build_core(config, platform, phases, logits_processors=processors))

    client = build(timer)
    if config.supervision.enable_sleep_mode:
        client = SleepableClient(client, lambda: build(PhaseTimer()))
    logger.info("engine %s", timer)
    return EngineParts(
        config=front.config,
        input_processor=front.input_processor,
        tokenizer=front.tokenizer,
        chat_template=front.chat_template,
        defaults=front.defaults,
        client=client,
    )
