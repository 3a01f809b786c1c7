"""WeightControls: what operators change while an engine serves: replicas, weights, and whether it has any (sleep mode).

A base of `AsyncLLM`, apart from it so that each can be read at once. Weights leave and come with an engine core's
process: what was in memory is gone when it has ended, and nothing of an old prefix cache is found with new weights.
Requests stay with the front end meanwhile, as when a core dies.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import Callable, Collection
from typing import Any, Protocol, runtime_checkable

from quire.config import QuireConfig
from quire.engine.data_parallel.replicas import Replicas
from quire.engine.data_parallel.totals import TotalStats
from quire.engine.front_ends.remote import RemoteEngine
from quire.engine.sleep_levels import (
    MEMORY,
    SCHEDULING,
    TAGS,
    SleepState,
    check_sleep,
    check_tags,
    drop_cached_pages,
    weight_files,
)
from quire.engine.supervisor import Supervisor
from quire.engine.weight_update import replace_weights
from quire.errors import EngineSleepingError, QuireError, UnsupportedError, ValidationError
from quire.logger import get_logger
from quire.utils.checks import check_int

MAX_REPLICAS = 1024
MAX_VERSION_CHARS = 128
WAIT_S = 86_400.0

logger = get_logger(__name__)


@runtime_checkable
class Launcher(Protocol):
    """Starts engine cores, of which another one can be made for other weights."""

    @property
    def model_path(self) -> str:
        """Where its weights are."""

    def __call__(self, index: int = 0) -> Any:
        """A core's process for a replica, which has been started."""

    def with_weights(self, path: str, version: str) -> Launcher:
        """For the weights in a directory; raises `QuireError` when they are not of this model."""


class WeightControls:
    """Of an `AsyncLLM`."""

    config: QuireConfig
    _supervisor: Supervisor | Replicas | RemoteEngine
    _totals: TotalStats | None
    _launch: Callable[..., Any] | None
    _sleep: SleepState
    _handles: Callable[[], list[int]]
    _changing: asyncio.Lock
    _waking: asyncio.Task[None] | None = None

    def _require_alive(self) -> None:
        raise NotImplementedError

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """As `EngineClient`."""
        raise NotImplementedError

    # --- replicas ---

    async def scale(self, data_parallel_size: int, drain_timeout_s: float = 30.0) -> None:
        """Add replicas, or remove the last ones, which finish what they run or leave it to others after a time.

        Raises:
            UnsupportedError: the engine was started with one replica.
            ValidationError: the number is out of range.
            QuireError: a replica cannot be started; those that are there stay.
        """
        check_int("data_parallel_size", data_parallel_size, 1, MAX_REPLICAS)
        await self._replicas().scale(data_parallel_size, drain_timeout_s)

    async def restart_replicas(self, drain_timeout_s: float = 30.0) -> None:
        """Restart all replicas one by one, for new weights in the same place: requests go to the others meanwhile.

        Raises:
            UnsupportedError: as `scale`.
            ValidationError: there is only one now.
            QuireError: a replica cannot be started; it is missing then.
        """
        await self._replicas().restart_all(drain_timeout_s)

    def _replicas(self) -> Replicas | RemoteEngine:
        """The replicas, of which there can be more or fewer."""
        self._require_awake()
        if self._totals is None or isinstance(self._supervisor, Supervisor):
            raise UnsupportedError(
                "this engine was started with one replica, and replicas cannot be added to it",
                hint="start with data_parallel_size=2 or more", field="data_parallel_size",
            )  # fmt: skip
        return self._supervisor

    def _cores(self) -> Supervisor | Replicas:
        """What keeps the cores running, which is in this process."""
        assert not isinstance(self._supervisor, RemoteEngine), "`FrontEndEngine` has the owner do this"
        return self._supervisor

    # --- weights ---

    @property
    def weight_versions(self) -> dict[int, str]:
        """Of each replica, the version of its weights; "" = those that the engine was started with."""
        supervisor = self._supervisor
        return {0: supervisor.weight_version} if isinstance(supervisor, Supervisor) else supervisor.weight_versions

    async def update_weights(self, path: str, version: str = "", drain_timeout_s: float = WAIT_S) -> None:
        """Replace the weights by those in a directory, one replica after the other, without losing a request.

        A replica takes no new requests, ends what it runs, and comes back with the new weights and an empty cache.
        New requests go to the others, or wait where there is one. Every answer is computed by one version; but an
        engine that was paused with its requests is not waited for, and they go on with the new weights.

        Args:
            path: a directory with a model of the same shape.
            version: how the weights are called from then on; "" = as the directory is.
            drain_timeout_s: seconds that a replica may take to end what it runs.

        Raises:
            ValidationError: this is no such directory, or requests took longer; replicas that were updated stay so.
            QuireError: a core cannot be started with these weights. A single one is started with the old ones again.
        """
        self._require_awake()
        launch = self._launch
        if not isinstance(launch, Launcher):
            raise UnsupportedError("the weights of this engine cannot be replaced", field="path")
        version = version or os.path.basename(os.path.abspath(path))
        if len(version) > MAX_VERSION_CHARS or not version.isprintable() or not version.isascii():
            raise ValidationError(
                f"weight_version must be printable ASCII of at most {MAX_VERSION_CHARS} characters",
                hint="give a shorter one", field="weight_version",
            )  # fmt: skip
        updated = launch.with_weights(path, version)
        logger.info("weights: version %s from %s", version, path)
        async with self._changing:
            self._require_awake()  # it may have gone to sleep meanwhile, and what sleeps does not end what it runs
            supervisor = self._cores()
            if isinstance(supervisor, Replicas):
                await supervisor.replace_weights(updated, version, drain_timeout_s)
            else:
                await replace_weights(supervisor, updated, version, drain_timeout_s)
            self._launch = updated
            self.config = dataclasses.replace(self.config, model_path=updated.model_path)

    # --- sleep ---

    @property
    def sleep_state(self) -> SleepState:
        """What the engine lacks now."""
        return self._sleep

    @property
    def num_held(self) -> int:
        """Sequences under way while no steps are run: they go on after `wake_up` or `resume_generation`."""
        return len(self._handles()) if self._sleep.tags or self._supervisor.is_paused else 0

    async def is_sleeping(self) -> bool:
        """Whether anything has to be woken up."""
        return bool(self._sleep.tags)

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        """Give back memory. Weights, KV cache and the core's process go; the front end stays.

        Args:
            level: 0 = only stop running steps; 1 = weights stay where the operating system keeps files that were read,
                and come back from there as long as it does; 2 = they are dropped there, too.
            mode: what becomes of requests: "abort" = they end with what they have; "wait" = they are finished first;
                "keep" = they go on after waking up, with the tokens they would have had.

        Raises:
            UnsupportedError: the engine was started without sleep mode.
            ValidationError: there is no such level or mode.
        """
        self._require_alive()
        self._supervisor.attach()
        if not self.config.supervision.enable_sleep_mode:
            raise UnsupportedError(
                "sleep mode is off", hint="start with --enable-sleep-mode", field="enable_sleep_mode"
            )
        check_sleep(level, mode)
        async with self._changing:
            if self._sleep.level >= level > 0 or (self._sleep.level and not level):
                return
            await self._end_requests(mode)
            if level == 0:
                await self._stop_steps()
                self._sleep = SleepState(0, frozenset({SCHEDULING}))
                return
            self._sleep = SleepState(level, frozenset(TAGS))
            await self._cores().rest()
            if level == 2:
                drop_cached_pages(weight_files(self.config))
            logger.info("sleeping at level %d", level)

    async def _end_requests(self, mode: str) -> None:
        if mode == "wait" and self._cores().is_paused:
            raise ValidationError(
                "requests cannot end while the engine is paused", hint="use mode=keep or mode=abort", field="mode"
            )
        if mode == "abort":
            self._cores().abort_requests(self._handles())
        elif mode == "wait" and not await self._cores().finish(WAIT_S):
            raise ValidationError("requests did not end in a day", hint="use mode=keep or mode=abort", field="mode")

    async def wake_up(self, tags: Collection[str] | None = None) -> bool:
        """Get back what `sleep` gave back; requests that came meanwhile begin.

        Weights and KV cache come together, with the core, once both are asked for.

        Args:
            tags: of "weights", "kv_cache", "scheduling"; None = all.

        Returns:
            Whether the engine is awake now.

        Raises:
            ValidationError: there is no such tag.
            QuireError: the core cannot be started; the engine sleeps on.
        """
        self._require_alive()
        check_tags(tags)
        async with self._changing:
            level = self._sleep.level
            left = self._sleep.tags - set(TAGS if tags is None else tags)
            if level and not left & MEMORY:
                left = frozenset()  # steps run once the core is there
            if self._sleep.tags and not left:
                await (self._cores().wake() if level else self._cores().pause(False))
                logger.info("awake")
            self._sleep = SleepState(level if left else 0, left)
            return not left

    # --- pauses ---

    async def pause_generation(self, mode: str = "keep", clear_cache: bool = False) -> None:
        """Stop running steps; requests that come meanwhile wait.

        Args:
            mode: what becomes of those that run, as `sleep`.
            clear_cache: forget the prefix cache, and the blocks of requests that are kept, which compute them again.

        Raises:
            ValidationError: there is no such mode.
        """
        check_sleep(0, mode)
        self._require_awake()
        async with self._changing:
            self._require_awake()
            await self._end_requests(mode)
            await self._stop_steps()
            if clear_cache:
                await self.reset_prefix_cache(reset_running_requests=True)

    async def resume_generation(self) -> None:
        """Go on after a pause."""
        self._require_awake()
        async with self._changing:
            self._require_awake()
            await self._cores().pause(False)

    async def _stop_steps(self) -> None:
        await self._cores().pause(True)
        self._cores().release()  # what `_end_requests` held back

    def note_request_while_asleep(self) -> None:
        """A request came while the engine sleeps: it waits, wakes it up, or is refused.

        Raises:
            EngineSleepingError: it is refused.
        """
        what = self.config.supervision.sleeping_requests
        if what == "reject":
            raise EngineSleepingError("the engine is asleep", hint="wake it up: POST /wake_up")
        if what == "wake" and self._sleep.level and (self._waking is None or self._waking.done()):
            self._waking = asyncio.ensure_future(self._wake_for_request())

    async def _wake_for_request(self) -> None:
        try:
            await self.wake_up()
        except QuireError as error:  # the request waits on; the next one tries again
            logger.error("cannot wake up: %s", error)

    def _require_awake(self) -> None:
        self._require_alive()
        self._supervisor.attach()
        if self._sleep.tags:
            raise EngineSleepingError("the engine is asleep", hint="wake it up first: POST /wake_up")
