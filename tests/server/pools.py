"""A server of several models whose engines emit tokens by rule, each model by another one."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

from quire.config.build import build_config
from quire.config.switching import ModelEntry, ModelsFile, SwitchingConfig
from quire.engine.protocol import EngineClient
from quire.executor.footprint import Footprint
from quire.server.app import make_pool_app
from quire.server.chat.state import make_parts
from quire.server.http.keys import read_checked_keys
from quire.server.launcher import server_of
from quire.server.switching.pool import ModelPool
from quire.utils.phases import Phases
from tests.server.engines import ScriptedEngine, rule, scripted_config
from tests.server.servers import RunningServer, server_config

MODEL_BYTES = 1 << 30


@dataclass
class NumberedEngine(ScriptedEngine):
    """Emits tokens that depend on the number of its model."""

    number: int = 0

    def token(self, prompt: list[int], seed: int, position: int) -> int | None:
        return rule(prompt, seed + 1000 * self.number, position)


@dataclass
class ScriptedLoader:
    """Loads a `NumberedEngine`.

    Attributes:
        gate: loads wait for it.
        error: what loads fail with.
        engines: those that were loaded, the newest last.
    """

    entry: ModelEntry
    number: int
    gate: threading.Event = field(default_factory=threading.Event)
    error: Exception | None = None
    engines: list[NumberedEngine] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.gate.set()

    def measure(self) -> Footprint:
        return Footprint(MODEL_BYTES, MODEL_BYTES // 2, MODEL_BYTES // 4)

    def load(self) -> EngineClient:
        assert self.gate.wait(60), "the test never lets it load"
        if self.error is not None:
            raise self.error
        engine = NumberedEngine(scripted_config(served_model_name=list(self.entry.names)), number=self.number)
        self.engines.append(engine)
        return engine

    def held_bytes(self, engine: EngineClient) -> int:
        return 0

    def start_phases(self, engine: EngineClient) -> Phases:
        return [("model", 0.5)]

    async def unload(self, engine: EngineClient) -> None:
        engine.shutdown()

    def cancel(self) -> None:
        self.gate.set()


class RunningPool(RunningServer):
    """Models a, b (also called bee) and c, of which two fit; a server that listens while it is entered.

    Args:
        pinned: names.
        switching: settings of `SwitchingConfig`.
        settings: of the server.

    Attributes:
        loaders: by name.
    """

    def __init__(self, pinned: str = "", switching: dict[str, Any] | None = None, **settings: Any) -> None:
        config = server_config(**{"port": 0, **settings})
        entries = tuple(_entry(name, is_pinned=name in pinned) for name in "abc")
        file = ModelsFile(
            switching=SwitchingConfig(**{"memory_budget": 2 * MODEL_BYTES, "busy_turn_s": 0.2, **(switching or {})}),
            models=entries,
        )
        self.loaders: dict[str, ScriptedLoader] = {}
        keys = read_checked_keys(config, "fair")
        self.pool = ModelPool(make_parts(config, keys), file, self._make_loader)
        self.pool.load_pinned()
        super().__init__(None, server=server_of(make_pool_app(self.pool, "fair"), config))

    def state_of(self, name: str) -> str:
        """As `ModelState`."""
        return self.pool.schedule.slots[name].state.value

    def _make_loader(self, entry: ModelEntry, kv_share_bytes: int) -> ScriptedLoader:
        loader = self.loaders[entry.name] = ScriptedLoader(entry, number=len(self.loaders) + 1)
        return loader


def _entry(name: str, *, is_pinned: bool) -> ModelEntry:
    names = ("b", "bee") if name == "b" else (name,)
    return ModelEntry(names=names, config=build_config(model=f"models/{name}"), api={}, is_pinned=is_pinned)
