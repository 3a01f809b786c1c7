"""FrontEndEngine: the `AsyncLLM` of one of several front ends. What changes the cores it asks of their owner."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from quire.engine.async_llm import AsyncLLM
from quire.engine.front_ends.messages import EngineStatus
from quire.engine.front_ends.remote import RemoteEngine
from quire.engine.parts import FrontEndParts
from quire.engine.sleep_levels import SleepState
from quire.engine.weight_controls import WAIT_S


class FrontEndEngine(AsyncLLM):
    """An engine whose cores the owner has.

    Args:
        parts: the front-end.
        owner: the way to the cores.
    """

    def __init__(self, parts: FrontEndParts, owner: RemoteEngine) -> None:
        super().__init__(parts, owner)
        self._owner = owner
        owner.events.on_status = self._note_status

    async def update_weights(self, path: str, version: str = "", drain_timeout_s: float = WAIT_S) -> None:
        """As `WeightControls`, for all front ends."""
        self._require_awake()
        await self._owner.ask("update_weights", words=(path, version), seconds=drain_timeout_s)

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """As `WeightControls`, for all front ends."""
        self._require_alive()
        await self._owner.ask("sleep", number=level, words=(mode,))

    async def wake_up(self, tags: Collection[str] | None = None) -> bool:
        """As `WeightControls`, for all front ends."""
        self._require_alive()
        return bool((await self._owner.ask("wake_up", flag=tags is None, words=tuple(tags or ()))).value)

    async def is_sleeping(self) -> bool:
        """As `WeightControls`; the owner's status may come later than the answer of a request that has woken it."""
        self._require_alive()
        return bool((await self._owner.ask("is_sleeping")).value)

    async def pause_generation(self, mode: str = "keep", clear_cache: bool = False) -> None:
        """As `WeightControls`, for all front ends."""
        self._require_alive()
        await self._owner.ask("pause", words=(mode,), flag=clear_cache)

    async def resume_generation(self) -> None:
        """As `WeightControls`, for all front ends."""
        self._require_alive()
        await self._owner.ask("resume")

    def note_request_while_asleep(self) -> None:
        """The owner decides, which knows it first."""

    def _note_status(self, status: EngineStatus) -> None:
        self._sleep = SleepState(status.sleep_level, frozenset(status.sleep_tags))
        if status.model_path is not None and status.model_path != self.config.model_path:
            self.config = dataclasses.replace(self.config, model_path=status.model_path)
