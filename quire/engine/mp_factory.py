"""From a configuration to a front-end here and an engine core in another process. Loads no torch. Owns no state.

Called by `AsyncLLM.from_config`, and by `LLMEngine.from_config` when the core is to be apart. The core's process starts
first, and whatever else a program has to load is loaded meanwhile: here, what the front-end is made of.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from quire.config import QuireConfig
from quire.config.json_object import parse_object
from quire.config.resolve import UsageContext
from quire.core.expert_group import ExpertGroup
from quire.core.wire import ONLY_REPLICA, ReplicaPlace
from quire.engine.config_lookup import resolve_config
from quire.engine.core_launcher import CoreProcess, ignore_end, processor_names
from quire.engine.data_parallel.expert_groups import EndCallback, ExpertGroups
from quire.engine.data_parallel.places import replica_places
from quire.engine.named_plugins import note_plugins
from quire.engine.spare_process import SpareProcess
from quire.errors import ConfigError, ValidationError
from quire.models.model_dir import ModelDir, read_model_dir
from quire.platforms.detect import detect_platform
from quire.utils.phases import PhaseTimer

if TYPE_CHECKING:
    from quire.core.sampling_params import SamplingParams
    from quire.engine.core_client.base import EngineCoreClient
    from quire.engine.parts import EngineParts, FrontEndParts


def launch_core(
    config: QuireConfig,
    logits_processors: Sequence[str] = (),
    spare: SpareProcess | None = None,
    place: ReplicaPlace = ONLY_REPLICA,
    groups: ExpertGroups | None = None,
) -> CoreProcess:
    """A core's process that has been started, or made of `spare`; `config` is resolved.

    Args:
        groups: of cores that share experts, where this is one of them.
    """

    def start(experts: ExpertGroup | None = None, on_end: EndCallback = ignore_end) -> CoreProcess:
        core = CoreProcess(config, logits_processors, spare, place, experts, on_end)
        core.start()
        return core

    return start() if groups is None else groups.launch(place.engine_index, start)


@dataclass(frozen=True, slots=True)
class CoreLauncher:
    """Starts processes of engine cores; does not keep them.

    Attributes:
        config: of all of them, resolved.
        logits_processors: "module:Class" each.
        places: of replicas; those beyond the first ones share their places.
        groups: of replicas that share experts; None = each has all.
        weight_version: how the weights are called; "" = those of the start.
    """

    config: QuireConfig
    logits_processors: list[str]
    places: tuple[ReplicaPlace, ...]
    groups: ExpertGroups | None = None
    weight_version: str = ""

    @property
    def model_path(self) -> str:
        """Where the weights are."""
        return self.config.model_path

    def __call__(self, index: int = 0) -> CoreProcess:
        """A core's process for a replica, which has been started."""
        place = msgspec.structs.replace(self.places[index % len(self.places)], engine_index=index)
        return launch_core(replica_config(self.config, index), self.logits_processors, place=place, groups=self.groups)

    def with_weights(self, path: str, version: str) -> CoreLauncher:
        """For the weights of a model directory.

        Raises:
            ValidationError: there is no model of the same shape.
            QuireError: it cannot be read.
        """
        if not path or not os.path.exists(path):  # which is false for what cannot be a path, too
            raise ValidationError(f"there is no model at {path[:200]!r}", hint="give a local directory", field="path")
        model = self.config.model
        arch = read_model_dir(Path(path)).arch(parse_object("hf_overrides", model.hf_overrides), model.model_impl)
        if arch != self.config.arch:
            raise ValidationError(
                f"the model at {path[:200]} has another shape than the one that is served",
                hint="start another server, or serve several models", field="path",
            )  # fmt: skip
        config = dataclasses.replace(self.config, model_path=str(Path(path).resolve()))
        return dataclasses.replace(self, config=config, weight_version=version)


@dataclass(frozen=True, slots=True)
class EngineStart:
    """An engine whose core's process has been started and whose front-end is still to be built.

    Attributes:
        config: resolved.
        core: its process, on its way.
        logits_processors: "module:Class" each.
        places: of its replicas, the first of which is `core`'s.
        others: processes of the other replicas.
        groups: of replicas that share experts; None = each has all.
    """

    config: QuireConfig
    core: CoreProcess
    logits_processors: list[str]
    model_dir: ModelDir
    places: tuple[ReplicaPlace, ...] = (ONLY_REPLICA,)
    others: tuple[CoreProcess, ...] = ()
    groups: ExpertGroups | None = None

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
                    front = build_front_end(self.config, self.model_dir, params_check(self.logits_processors))
            with timer.phase("waiting for the engine core"):
                num_blocks = min(core.wait_ready().num_blocks for core in (self.core, *self.others))
        except BaseException:
            self.cancel()
            raise
        return dataclasses.replace(front, config=with_num_blocks(front.config, num_blocks))

    def launcher(self) -> CoreLauncher:
        """Starts a process that takes the place of the core, which is ready, when that has ended; does not keep it."""
        config = with_num_blocks(self.config, self.core.wait_ready().num_blocks)
        return CoreLauncher(config, self.logits_processors, self.places, self.groups)

    def cancel(self) -> None:
        """End the cores' processes, which have nothing to tidy up yet."""
        for core in (self.core, *self.others):
            core.kill()
        for core in (self.core, *self.others):
            core.close()


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
        refuse_launched(config)
        config, model_dir = resolve_config(config, usage=usage)
    except BaseException:
        if spare is not None:
            spare.close()
        raise
    note_plugins(config, names[len(config.model.logits_processors) :])
    if config.parallel.data_parallel_size == 1:
        return EngineStart(config, launch_core(config, names, spare), names, model_dir)
    if spare is not None:
        spare.close()
    places = tuple(replica_places(config, detect_platform(config.device.device)))
    groups = None
    if config.parallel.replicas_share_experts:
        groups = ExpertGroups(len(places), config.supervision.rank_timeout_s)
    cores = [
        launch_core(replica_config(config, index), names, place=place, groups=groups)
        for index, place in enumerate(places)
    ]
    return EngineStart(config, cores[0], names, model_dir, places, tuple(cores[1:]), groups)


def refuse_launched(config: QuireConfig) -> None:
    """Raise `ConfigError` where ranks are to be processes that a launcher has started, which have the core inside."""
    if config.parallel.is_launched:
        raise ConfigError(
            "distributed_executor_backend='external_launcher' is for scripts that create an LLM on every rank; a "
            "server starts its ranks itself",
            hint="use 'mp', or 'ray' for several machines", field="distributed_executor_backend",
        )  # fmt: skip


def replica_config(config: QuireConfig, index: int) -> QuireConfig:
    """`config` for one replica: what it writes is beside what the others write, and peers find it by its own name."""
    if not index:
        return config
    if config.kv_transfer is not None:
        config = dataclasses.replace(config, transfer=config.transfer.of_replica(index))
    directory = config.observability.flight_recorder
    if directory is None:
        return config
    observability = dataclasses.replace(config.observability, flight_recorder=f"{directory}/engine-{index}")
    return dataclasses.replace(config, observability=observability)


def build_multiprocess_engine(config: QuireConfig, *, logits_processors: Sequence[str | type] = ()) -> EngineParts:
    """The parts of an engine that its caller steps, with the core in another process."""
    start = begin_start(config, logits_processors=logits_processors)
    from quire.engine.core_client.sync_mp import SyncMPClient  # late, too
    from quire.engine.parts import EngineParts

    front = start.finish()

    def client_of(cores: Sequence[CoreProcess]) -> EngineCoreClient:
        clients = [SyncMPClient(core) for core in cores]
        if len(clients) == 1:
            return clients[0]
        from quire.engine.data_parallel.sync_replicas import SyncReplicas

        return SyncReplicas(clients, front.config)

    def build() -> EngineCoreClient:
        cores = [launch(index) for index in range(1 + len(start.others))]
        for core in cores:
            core.wait_ready()
        return client_of(cores)

    client = client_of((start.core, *start.others))
    if config.supervision.enable_sleep_mode:
        from quire.engine.core_client.sleepable import SleepableClient

        launch, client = start.launcher(), SleepableClient(client, build)
    return EngineParts(
        config=front.config,
        input_processor=front.input_processor,
        tokenizer=front.tokenizer,
        chat_template=front.chat_template,
        defaults=front.defaults,
        client=client,
    )


def params_check(names: Sequence[str]) -> Callable[[SamplingParams], None] | None:
    """The check that custom logits processors make of each request's parameters."""
    if not names:
        return None
    from quire.sample.logits_processor import load_processors, validate_params  # late: loads torch

    classes = load_processors(names)
    return lambda params: validate_params(classes, params)
