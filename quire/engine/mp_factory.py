"""From a configuration to a front-end here and an engine core in another process. Loads no torch. Owns no state.

Called by `AsyncLLM.from_config`, and by `LLMEngine.from_config` when the core is to be apart. The core's process starts
while the tokenizer loads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from quire.config import QuireConfig
from quire.config.resolve import UsageContext
from quire.core.sampling_params import SamplingParams
from quire.engine.core_client.sync_mp import SyncMPClient
from quire.engine.core_launcher import CoreProcess, processor_names
from quire.engine.front_factory import build_front_end, resolve_config
from quire.engine.parts import EngineParts, FrontEndParts


def launch_core(config: QuireConfig, logits_processors: Sequence[str] = ()) -> CoreProcess:
    """A core's process that has been started; `config` is resolved."""
    core = CoreProcess(config, logits_processors)
    core.start()
    return core


def with_num_blocks(config: QuireConfig, num_blocks: int) -> QuireConfig:
    """`config` for a core that replaces one with so many pages: the memory is not divided anew.

    What is free may be less by then, and a request that was taken must still fit; a core that finds too little free
    memory says so and does not start.
    """
    return dataclasses.replace(config, cache=dataclasses.replace(config.cache, num_blocks=num_blocks))


def build_apart(
    config: QuireConfig,
    *,
    logits_processors: Sequence[str | type] = (),
    usage: UsageContext = UsageContext.LLM_CLASS,
) -> tuple[FrontEndParts, CoreProcess]:
    """A front-end, and the process of a core that is ready.

    Args:
        usage: who runs the engine.

    Raises:
        QuireError: the configuration, the model directory or the machine does not allow it; no process is left.
    """
    names = processor_names(logits_processors)
    config, model_dir = resolve_config(config, usage=usage)
    core = launch_core(config, names)
    try:
        front = build_front_end(config, model_dir, _params_check(names))
        core.wait_ready()
    except BaseException:
        core.close()
        raise
    return front, core


def build_parts_apart(config: QuireConfig, *, logits_processors: Sequence[str | type] = ()) -> EngineParts:
    """The parts of an engine that its caller steps, with the core in another process."""
    front, core = build_apart(config, logits_processors=logits_processors)
    return EngineParts(
        config=front.config,
        input_processor=front.input_processor,
        tokenizer=front.tokenizer,
        chat_template=front.chat_template,
        defaults=front.defaults,
        client=SyncMPClient(core),
    )


def _params_check(names: Sequence[str]) -> Callable[[SamplingParams], None] | None:
    """The check that custom logits processors make of each request's parameters."""
    if not names:
        return None
    from quire.sample.logits_processor import load_processors, validate_params  # late: loads torch

    classes = load_processors(names)
    return lambda params: validate_params(classes, params)
