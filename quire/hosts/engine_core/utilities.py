"""Calls of a front end that are not about one request, by vLLM's names. Owned by a `WireCore`; owns no state.

What is not there is refused by name, with the reason.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

from quire.engine.supervisor import Supervisor
from quire.errors import UnsupportedError, ValidationError

DRAINED_POLL_S = 0.02
MODES = ("abort", "wait", "keep")
REFUSED: dict[str, str] = {
    "add_lora": "LoRA adapters are not supported; merge the adapter into the weights",
    "remove_lora": "LoRA adapters are not supported",
    "pin_lora": "LoRA adapters are not supported",
    "profile": "there is no profiler; use --flight-recorder, or perf on the core's process",
    "collective_rpc": "methods of workers cannot be called",
    "save_sharded_state": "weights are not written",
    "init_weight_transfer_engine": "weights cannot be replaced while the engine runs",
    "update_weights": "weights cannot be replaced while the engine runs",
}


class Core(Protocol):
    """What the calls are about: a `WireCore`."""

    @property
    def supervisor(self) -> Supervisor:
        """Of the engine core."""

    @property
    def is_idle(self) -> bool:
        """Whether every request has ended."""

    def hold_requests(self) -> None:
        """Keep requests that come until `release_requests`."""

    def release_requests(self) -> None:
        """Take those that were kept."""

    def abort_all(self) -> None:
        """End every request."""


class Utilities:
    """The calls that are answered."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._methods: dict[str, Callable[..., Awaitable[Any]]] = {
            "get_supported_tasks": self._supported_tasks,
            "reset_prefix_cache": self._reset_prefix_cache,
            "reset_mm_cache": self._nothing,
            "reset_encoder_cache": self._nothing,
            "list_loras": self._list_loras,
            "is_sleeping": self._is_paused,
            "is_scheduler_paused": self._is_paused,
            "pause_scheduler": self._pause,
            "pause_generation": self._pause,
            "resume_scheduler": self._resume,
            "resume_generation": self._resume,
            "sleep": self._sleep,
            "wake_up": self._wake_up,
        }

    async def call(self, method: str, args: list[Any]) -> Any:
        """The value of a call.

        Raises:
            UnsupportedError: this engine does not have the method.
            ValidationError: its arguments are wrong.
            QuireError: it failed.
        """
        if method in REFUSED:
            raise UnsupportedError(f"{method}: {REFUSED[method]}", field=method)
        if method not in self._methods:
            raise UnsupportedError(f"this engine does not have the method {method[:100]!r}", field="method")
        try:
            answer = self._methods[method](*args)
        except TypeError:
            raise ValidationError(f"{method} does not take {len(args)} arguments", field=method) from None
        return await answer

    async def _supported_tasks(self) -> list[str]:
        return ["generate"]

    async def _reset_prefix_cache(self, reset_running: bool = False, reset_connector: bool = False) -> bool:
        if type(reset_running) is not bool or type(reset_connector) is not bool:
            raise ValidationError("reset_prefix_cache takes true or false", field="reset_prefix_cache")
        return bool(await self._core.supervisor.call("reset_prefix_cache", reset_running))

    async def _nothing(self) -> None:
        """There is no such cache."""

    async def _list_loras(self) -> list[int]:
        return []

    async def _is_paused(self) -> bool:
        return self._core.supervisor.is_paused

    async def _pause(self, mode: str = "abort", clear_cache: bool = True) -> None:
        """Stop steps; what runs is ended ("abort"), waited for ("wait") or kept ("keep"). New requests wait."""
        if mode not in MODES:
            raise ValidationError(f"{str(mode)[:100]!r} is not a mode of a pause", hint=f"one of {', '.join(MODES)}")
        self._core.hold_requests()
        if mode == "abort":
            self._core.abort_all()
        while mode == "wait" and not self._core.is_idle:
            await asyncio.sleep(DRAINED_POLL_S)
        await self._core.supervisor.pause(True)
        if clear_cache and mode != "keep":
            await self._core.supervisor.call("reset_prefix_cache", False)

    async def _resume(self) -> None:
        await self._core.supervisor.pause(False)
        self._core.release_requests()

    async def _sleep(self, level: int = 1, mode: str = "abort") -> None:
        if level != 0:
            raise UnsupportedError(
                f"sleep level {str(level)[:20]} is not supported: weights and KV cache stay in memory",
                hint="use level 0, which stops steps, or end the server",
                field="level",
            )
        await self._pause(mode)

    async def _wake_up(self, tags: list[str] | None = None) -> bool:
        await self._resume()
        return True
