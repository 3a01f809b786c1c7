"""From a configuration to a front-end here and an engine core in another process. Loads no torch. Owns no state.

Called by `AsyncLLM.from_config`, and by `LLMEngine.from_config` when the core is to be apart. The core's process starts
first, and whatever else a program has to load is loaded meanwhile: here, what the front-end is made of.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from quire.config import QuireConfig
from quire.config.resolve import UsageContext
from quire.engine.config_lookup import resolve_config
from quire.engine.core_launcher import CoreProcess, processor_names
from quire.engine.named_plugins import note_plugins
from quire.engine.spare_process import SpareProcess
from quire.models.model_dir import ModelDir
from quire.utils.phases import PhaseTimer

if TYPE_CHECKING:
    from quire.core.sampling_params import SamplingParams
    from quire.engine.parts import EngineParts, FrontEndParts


def launch_core(
    config: QuireConfig, logits_processors: Sequence[str] = (), spare: SpareProcess | None = None
) -> CoreProcess:
    """A core's process that has been started, or made of `spare`; `config` is resolved."""
    core = CoreProcess(config, logits_processors, spare)
    core.start()
    return core


@dataclass(frozen=True, slots=True)
class EngineStart:
    """An engine whose core's process has been started and whose front-end is still to be built.

    Attributes:
        config: resolved.
        core: its process, on its way.
        logits_processors: "module:Class" each.
    """

    config: QuireConfig
    core: CoreProcess
    logits_processors: list[str]
    model_dir: ModelDir

    def finish(self, timer: PhaseTimer | None = None, front: FrontEndParts | None = None) -> FrontEndParts:
        """Build the front-end, then wait for the core.

        Args:
            timer: gets the phases.
            front: of an earlier engine with the same settings; None = it is built.

        Raises:
            QuireError: one of them cannot be built; no process is left.
        """
        timer = timer or PhaseTimer()
        try:
            with timer.phase("tokenizer and chat template"):
                from quire.engine.front_factory import build_front_end  # late: the core starts meanwhile

                if front is None:
                    front = build_front_end(self.config, self.model_dir, _params_check(self.logits_processors))
            with timer.phase("waiting for the engine core"):
                num_blocks = self.core.wait_ready().num_blocks
        except BaseException:
            self.cancel()
            raise
        return dataclasses.replace(front, config=with_num_blocks(front.config, num_blocks))

    def launcher(self) -> Callable[[], CoreProcess]:
        """Starts a process that takes the place of the core, which is ready, when that has ended; does not keep it."""
        config = with_num_blocks(self.config, self.core.wait_ready().num_blocks)
        return partial(launch_core, config, self.logits_processors)

    def cancel(self) -> None:
        """End the core's process, which has nothing to tidy up yet."""
        self.core.kill()
        self.core.close()


def with_num_blocks(config: QuireConfig, num_blocks: int) -> QuireConfig:
    """`config` for a core that replaces one with so many blocks: the memory is not divided anew.

    What is free may be less by then, and a request that was taken must still fit; a core that finds too little free
    memory says so and does not start.
    """
    return dataclasses.replace(config, cache=dataclasses.replace(config.cache, num_blocks=num_blocks))


def begin_start(
    config: QuireConfig,
    *,
    logits_processors: Sequence[str | type] = (),
    usage: UsageContext = UsageContext.LLM_CLASS,
    spare: SpareProcess | None = None,
) -> EngineStart:
    """Resolve the configuration and start the core's process; returns without waiting for it.

    Args:
        usage: who runs the engine.
        spare: a process that becomes the core's; None = one is started.

    Raises:
        QuireError: the configuration, the model directory or the machine does not allow it; no process is left.
    """
    names = [*config.model.logits_processors, *processor_names(logits_processors)]
    try:
        config, model_dir = resolve_config(config, usage=usage)
    except BaseException:
        if spare is not None:
            spare.close()
        raise
    note_plugins(config, names[len(config.model.logits_processors) :])
    return EngineStart(config, launch_core(config, names, spare), names, model_dir)


def build_multiprocess_engine(config: QuireConfig, *, logits_processors: Sequence[str | type] = ()) -> EngineParts:
    """The parts of an engine that its caller steps, with the core in another process."""
    start = begin_start(config, logits_processors=logits_processors)
    from quire.engine.core_client.sync_mp import SyncMPClient  # late, too
    from quire.engine.parts import EngineParts

    front = start.finish()
    return EngineParts(
        config=front.config,
        input_processor=front.input_processor,
        tokenizer=front.tokenizer,
        chat_template=front.chat_template,
        defaults=front.defaults,
        client=SyncMPClient(start.core),
    )


def _params_check(names: Sequence[str]) -> Callable[[SamplingParams], None] | None:
    """The check that custom logits processors make of each request's parameters."""
    if not names:
        return None
    from quire.sample.logits_processor import load_processors, validate_params  # late: loads torch

    classes = load_processors(names)
    return lambda params: validate_params(classes, params)
