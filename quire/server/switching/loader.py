"""CoreLoader: one model's way into memory and out of it: its size, its engine core, its front-end.

Made for each model by `pool`; `measure` and `load` run in threads and may wait. Owns the front-end, which stays
when the core ends (so a tokenizer is read once), and the start that is under way.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Protocol

from quire.config import QuireConfig
from quire.config.resolve import UsageContext
from quire.engine.async_llm import AsyncLLM
from quire.engine.config_lookup import look_up
from quire.engine.mp_factory import EngineStart, begin_start
from quire.engine.parts import FrontEndParts
from quire.engine.protocol import EngineClient
from quire.engine.spare_process import SpareProcesses
from quire.executor.footprint import Footprint, footprint_of, with_kv_cache_bytes
from quire.logger import get_logger
from quire.utils.phases import Phases, PhaseTimer, describe_phases

logger = get_logger(__name__)


class ModelLoader(Protocol):
    """What a pool needs to load and unload one model; tests have another."""

    def measure(self) -> Footprint:
        """What the model takes; raises `QuireError` when it cannot be used."""

    def load(self) -> EngineClient:
        """An engine with the model; raises `QuireError` when there cannot be one."""

    def held_bytes(self, engine: EngineClient) -> int:
        """Memory that the engine of a loaded model takes now; 0 = not known."""

    def start_phases(self, engine: EngineClient) -> Phases:
        """What the start of its engine core took."""

    async def unload(self, engine: EngineClient) -> None:
        """End an engine; returns when its memory is free. Called on the event loop."""

    def cancel(self) -> None:
        """End a load that is under way; called from another thread."""


class CoreLoader:
    """Loads a model into an engine core of its own.

    Args:
        name: of the model, for the log.
        config: of its engine, not resolved.
        kv_share_bytes: for its KV cache, where `config` does not say.
        spares: processes to make a core of; None = each is started when it is needed.
    """

    def __init__(
        self, name: str, config: QuireConfig, kv_share_bytes: int, spares: SpareProcesses | None = None
    ) -> None:
        self._name = name
        self._config = config
        self._kv_share_bytes = kv_share_bytes
        self._spares = spares
        self._front: FrontEndParts | None = None
        self._start: EngineStart | None = None

    def measure(self) -> Footprint:
        """As `ModelLoader.measure`; a model from the hub is downloaded."""
        resolved, model_dir, _ = look_up(self._config, usage=UsageContext.API_SERVER)
        is_stored = "quantization_config" in model_dir.config or Path(resolved.model_path).is_file()
        footprint = footprint_of(resolved, self._kv_share_bytes, is_stored=is_stored)
        self._config = with_kv_cache_bytes(self._config, footprint.kv_cache_bytes)
        return footprint

    def load(self) -> EngineClient:
        """As `ModelLoader.load`."""
        timer = PhaseTimer()
        spare = None if self._spares is None else self._spares.take()
        start = self._start = begin_start(self._config, usage=UsageContext.API_SERVER, spare=spare)
        try:
            self._front = start.finish(timer, self._front)
        finally:
            self._start = None
            if self._spares is not None:
                self._spares.prepare()
        engine = AsyncLLM(self._front, start.core, start.launcher())
        logger.info("model %s: server %s; engine core %s", self._name, timer, describe_phases(engine.core_start))
        return engine

    def held_bytes(self, engine: EngineClient) -> int:
        """As `ModelLoader.held_bytes`."""
        pid = engine.core_pid if isinstance(engine, AsyncLLM) else None
        return 0 if pid is None else resident_bytes(pid)

    def start_phases(self, engine: EngineClient) -> Phases:
        """As `ModelLoader.start_phases`."""
        return engine.core_start if isinstance(engine, AsyncLLM) else ()

    async def unload(self, engine: EngineClient) -> None:
        """As `ModelLoader.unload`."""
        assert isinstance(engine, AsyncLLM), "it was loaded here"
        await engine.stop()

    def cancel(self) -> None:
        """As `ModelLoader.cancel`."""
        start = self._start
        if start is not None:
            start.core.kill()


def resident_bytes(pid: int) -> int:
    """Memory of a process that is in use now; 0 where the system does not say."""
    try:
        fields = Path(f"/proc/{pid}/statm").read_text().split()
    except OSError:
        return 0
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")
