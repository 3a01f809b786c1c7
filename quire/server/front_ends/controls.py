"""OwnerControls: in the owner of the engine cores, what front ends ask for about weights, sleep and pauses.

Made by the server's owner. Owns the state of sleep, which the hub lets every front end know.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from quire.config import QuireConfig
from quire.engine.front_ends.hub import FrontEndHub
from quire.engine.front_ends.messages import OwnerAnswer, OwnerCall
from quire.engine.sleep_levels import SleepState
from quire.engine.weight_controls import WeightControls


class OwnerControls(WeightControls):
    """Of the cores of a hub's supervisor.

    Args:
        hub: has its supervisor.
        config: resolved.
        launch: starts another core.
    """

    def __init__(self, hub: FrontEndHub, config: QuireConfig, launch: Callable[..., object]) -> None:
        self.config = config
        self._hub = hub
        self._supervisor = hub.supervisor
        self._totals = None
        self._launch = launch
        self._sleep, self._changing = SleepState(), asyncio.Lock()
        self._handles = lambda: hub.handles
        hub.controls = self
        hub.own_calls.update(self._calls())

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """As `EngineClient`."""
        return bool(await self._hub.supervisor.call("reset_prefix_cache", reset_running_requests))

    def _calls(self) -> dict[str, Callable[[int, OwnerCall], Awaitable[OwnerAnswer]]]:
        """What front ends call, by name."""
        return {
            "sleep": self._on_sleep, "wake_up": self._on_wake_up, "is_sleeping": self._on_is_sleeping,
            "update_weights": self._on_update_weights, "pause": self._on_pause, "resume": self._on_resume,
        }  # fmt: skip

    async def _on_sleep(self, serial: int, call: OwnerCall) -> OwnerAnswer:
        await self.sleep(call.number, call.words[0])
        return OwnerAnswer(call.call_id)

    async def _on_wake_up(self, serial: int, call: OwnerCall) -> OwnerAnswer:
        return OwnerAnswer(call.call_id, value=await self.wake_up(None if call.flag else call.words))

    async def _on_is_sleeping(self, serial: int, call: OwnerCall) -> OwnerAnswer:
        return OwnerAnswer(call.call_id, value=await self.is_sleeping())

    async def _on_update_weights(self, serial: int, call: OwnerCall) -> OwnerAnswer:
        path, version = call.words
        await self.update_weights(path, version, call.seconds)
        return OwnerAnswer(call.call_id)

    async def _on_pause(self, serial: int, call: OwnerCall) -> OwnerAnswer:
        await self.pause_generation(call.words[0], call.flag)
        return OwnerAnswer(call.call_id)

    async def _on_resume(self, serial: int, call: OwnerCall) -> OwnerAnswer:
        await self.resume_generation()
        return OwnerAnswer(call.call_id)

    def _require_alive(self) -> None:
        if self._hub.dead is not None:
            raise self._hub.dead
