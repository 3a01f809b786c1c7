"""Replicas: several supervised engine cores, to `AsyncLLM` as one supervisor. Used on its event loop.

Owns a `Supervisor` for each replica, which replica each request is with, and what tenants were served by all. A replica
that dies is restarted as a single core is, and its requests wait for it: one that brings down its core must not go
round. When another core cannot be started, or takes long, they go on at another replica behind the tokens they have put
out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec

from quire.config import QuireConfig
from quire.core.engine_messages import EngineCoreOutputs, EngineCoreRequest
from quire.core.live_state import EngineState
from quire.core.process_stats import CoreProcesses
from quire.core.worker_call import WorkerCall
from quire.engine.core_launcher import CoreProcess
from quire.engine.data_parallel.rank_calls import gather_ranks, profile_replicas
from quire.engine.data_parallel.rank_check import check_rank
from quire.engine.data_parallel.shared_service import SharedService
from quire.engine.live_request import Listener, LiveRequest
from quire.engine.supervisor import Supervisor
from quire.engine.weight_update import replace_weights
from quire.errors import EngineDeadError, EngineGenerateError, QuireError, ValidationError
from quire.logger import get_logger
from quire.scheduler.placement import Placement

DRAIN_POLL_S = 0.05

logger = get_logger(__name__)


class Replica:
    """One replica; the listener of its supervisor.

    Attributes:
        index: its number, as in metrics.
        supervisor: keeps its core running.
        is_updating: its weights are being replaced; requests go to others, where there are some.
        is_draining: it is about to be removed and gets no more requests.
        is_gone: it could not be started again, and has stopped for good.
    """

    def __init__(self, owner: Replicas, index: int, core: CoreProcess, launch: Callable[[], CoreProcess]) -> None:
        self._owner = owner
        self.index = index
        self.is_draining = self.is_gone = self.is_updating = False
        self.supervisor = Supervisor(
            core, launch, self, owner.max_restarts, on_unavailable=lambda: owner.hand_over(self)
        )

    @property
    def is_ready(self) -> bool:
        """True when it can be given requests."""
        is_leaving = self.is_draining or self.is_gone or self.is_updating
        return not is_leaving and not self.supervisor.is_restarting and not self.supervisor.is_resting

    def on_step(self, step: EngineCoreOutputs) -> None:
        """As `Listener`."""
        self._owner.on_step(self, step if not self.index else replace(step, engine_index=self.index))

    def on_failed(self, handle: int, error: QuireError) -> None:
        """As `Listener`."""
        self._owner.forget(handle)
        self._owner.listener.on_failed(handle, error)

    def on_aborted(self, handle: int) -> None:
        """As `Listener`."""
        self._owner.forget(handle)
        self._owner.listener.on_aborted(handle)

    def on_dead(self, error: EngineDeadError) -> None:
        """As `Listener`: of this replica alone."""
        self._owner.on_gone(self, error)

    def restart(self, handle: int) -> list[int] | None:
        """As `Listener`."""
        return self._owner.resend(self, handle)


class Replicas:
    """Replicas of one engine.

    Args:
        cores: processes of engine cores that are ready, by the index of their replica.
        launch: starts a core for a replica.
        listener: its callbacks.
        config: resolved.

    Attributes:
        is_paused: no steps are run.
        max_restarts: cores in a row of a replica that may die without any progress.
    """

    def __init__(
        self,
        cores: dict[int, CoreProcess],
        launch: Callable[[int], CoreProcess],
        listener: Listener,
        config: QuireConfig,
    ) -> None:
        self.listener = listener
        self.max_restarts = config.supervision.max_restarts
        self.is_paused = False
        self._launch, self._version = launch, ""
        is_fair = config.scheduler.scheduling_policy == "fair"
        capacity_tokens = (config.cache.num_blocks or 0) * (config.cache.block_size or 1)
        self._placement = Placement(capacity_tokens, is_fair=is_fair, has_cache=config.cache.enable_prefix_caching)
        self._service = SharedService() if is_fair else None
        self._replicas: dict[int, Replica] = {}
        self._groups: dict[int, int] = {}  # first handle of a group of answers -> its replica
        self._is_lock_step, self._is_attached = config.parallel.replicas_share_experts, False
        self._scaling = asyncio.Lock()
        self._num_restarts_before = self._num_resumed_before = 0
        for index, core in cores.items():
            self._add(index, core)

    @property
    def indexes(self) -> list[int]:
        """Numbers of the replicas that serve, or will again."""
        return sorted(index for index, one in self._replicas.items() if not one.is_gone and not one.is_draining)

    @property
    def num_ready(self) -> int:
        """Replicas that can be given requests now."""
        return sum(one.is_ready for one in self._replicas.values())

    @property
    def core_pid(self) -> int | None:
        """Process id of the first replica's core."""
        pids = self.core_pids
        return pids[min(pids)] if pids else None

    @property
    def core_pids(self) -> dict[int, int | None]:
        """Process ids of all cores, by replica."""
        return {index: self._replicas[index].supervisor.core_pid for index in self.indexes}

    def processes(self) -> list[CoreProcesses]:
        """Of all cores, those that were given up too."""
        return [one.supervisor.processes() for _, one in sorted(self._replicas.items()) if not one.is_draining]

    @property
    def num_restarts(self) -> int:
        """Cores that were replaced."""
        return self._num_restarts_before + sum(one.supervisor.num_restarts for one in self._replicas.values())

    @property
    def num_resumed(self) -> int:
        """Answers that were continued on another core."""
        return self._num_resumed_before + sum(one.supervisor.num_resumed for one in self._replicas.values())

    def attach(self) -> None:
        """As `Supervisor`."""
        self._is_attached = True
        for one in self._replicas.values():
            if not one.is_gone:
                one.supervisor.attach()

    # --- requests ---

    def add_request(self, message: EngineCoreRequest, rank: int | None = None) -> None:
        """Send a request to a replica.

        Args:
            rank: of the replica that it must be; None = any.

        Raises:
            ValidationError: there is no such replica.
        """
        index = self._choose(message, rank)
        if self._service is not None:
            self._replicas[index].supervisor.tell(self._service.add(message, index))
        self._replicas[index].supervisor.add_request(message)

    def message_of(self, handle: int) -> EngineCoreRequest | None:
        """As `Supervisor`."""
        index = self._placement.replica_of(handle)
        return None if index is None else self._replicas[index].supervisor.message_of(handle)

    def abort_requests(self, handles: Iterable[int]) -> None:
        """Ask for requests to end."""
        by_replica: dict[int, list[int]] = {}
        for handle in handles:
            index = self._placement.replica_of(handle)
            if index is not None:
                by_replica.setdefault(index, []).append(handle)
        for index, of_replica in by_replica.items():
            self._replicas[index].supervisor.abort_requests(of_replica)

    def forget(self, handle: int) -> None:
        """A request has ended."""
        self._placement.remove(handle)
        self._groups.pop(handle, None)
        if self._service is not None:
            self._service.remove(handle)

    def resend(self, replica: Replica, handle: int) -> list[int] | None:
        """A request is about to be sent again: its tokens so far."""
        token_ids = self.listener.restart(handle)
        if token_ids is None:
            self.forget(handle)
        elif self._service is not None and (counters := self._service.move(handle, replica.index)) is not None:
            replica.supervisor.tell(counters)
        return token_ids

    def on_step(self, replica: Replica, step: EngineCoreOutputs) -> None:
        """A step's outputs came."""
        for handle in step.handles.tolist():
            self._placement.note_first_token(handle)
        if self._service is not None:
            self._service.note_step(replica.index, step)
            for index, counters in self._service.due():
                self._replicas[index].supervisor.tell(counters)
        for end in step.finished:
            self.forget(end.handle)
        self.listener.on_step(step)

    def _choose(self, message: EngineCoreRequest, rank: int | None) -> int:
        """The replica for a request: that of the answers which share its prompt, the one it asks for, or the best."""
        allowed = [rank] if rank is not None else self._allowed()
        if rank is not None:
            check_rank(rank, self.indexes)
        together = None if message.fork_group is None else self._groups.get(message.fork_group)
        if together in self._replicas and message.fork_group != message.handle:
            allowed = [together]
        index = self._placement.place(message, allowed)
        if message.fork_group == message.handle:
            self._groups[message.handle] = index
        return index

    def _allowed(self) -> list[int]:
        """Replicas that can be given requests; those that restart when there is no other."""
        ready = [index for index, one in self._replicas.items() if one.is_ready]
        allowed = ready or self.indexes
        if not allowed:
            raise EngineDeadError("no replica of the engine is left", hint="make a new engine")
        return allowed

    # --- replicas come and go ---

    def on_gone(self, replica: Replica, error: EngineDeadError) -> None:
        """A replica has stopped for good; the last one takes the engine with it."""
        replica.is_gone = True
        self._placement.remove_replica(replica.index)
        if not self.indexes:
            self.listener.on_dead(error)
            return
        if self._is_lock_step:  # it has experts of the others
            self._replicas[self.indexes[0]].supervisor.give_up(error)
            return
        if self._service is not None:
            self._service.remove_replica(replica.index)
        logger.error("replica %d is given up: %s; %d are left", replica.index, error.message, len(self.indexes))

    def hand_over(self, replica: Replica) -> None:
        """A replica's core cannot be started, or takes long: its requests go on at others, if any is ready.

        When it will not be tried again they wait for one that restarts, too.
        """
        peers = [index for index in self.indexes if index != replica.index and self._are_equal(index, replica)]
        others = [index for index in peers if self._replicas[index].is_ready]
        if not others and replica.supervisor.has_stopped:
            others = peers
        if others:
            self._move_all(replica.supervisor.release_all(), others)
        elif replica.supervisor.has_stopped and self.indexes not in ([], [replica.index]):
            for live in replica.supervisor.release_all():
                lost = "the replica is given up, and the others have other weights"
                replica.on_failed(live.message.handle, EngineGenerateError(lost, hint="send the request again"))

    def _are_equal(self, index: int, replica: Replica) -> bool:
        """Whether a replica has the same weights, so that it can go on with what the other one began."""
        return self._replicas[index].supervisor.weight_version == replica.supervisor.weight_version

    async def scale(self, count: int, drain_timeout_s: float = 30.0) -> None:
        """Have `count` replicas; those that leave finish what they run, or others do after `drain_timeout_s`.

        Raises:
            QuireError: a core cannot be started; the replicas that were added so far stay.
        """
        self._check_apart("scaled")
        async with self._scaling:
            for index in self.indexes[count:]:
                await self._retire(self._replicas[index], drain_timeout_s)
            while len(self.indexes) < count:
                await self._start(next(index for index in range(count) if index not in self.indexes))

    async def restart_all(self, drain_timeout_s: float = 30.0) -> None:
        """End each replica, as `scale` does, and start it again with what the model's files hold then, one by one.

        Raises:
            QuireError: there is one replica, or one cannot be started again; the others stay as they are.
        """
        self._check_apart("restarted one by one")
        async with self._scaling:
            if len(self.indexes) < 2:
                raise ValidationError("one replica cannot be restarted without a pause", hint="add another one first")
            for index in self.indexes:
                await self._retire(self._replicas[index], drain_timeout_s)
                await self._start(index)

    def _check_apart(self, what: str) -> None:
        if self._is_lock_step:
            raise ValidationError(
                f"replicas that share experts cannot be {what}: none computes without the others",
                hint="restart the server, or serve without enable_expert_parallel", field="enable_expert_parallel",
            )  # fmt: skip

    async def _start(self, index: int) -> None:
        core = self._launch(index)
        await asyncio.to_thread(core.wait_ready)
        gone = self._replicas.pop(index, None)
        if gone is not None:
            self._note_retired(gone)
        replica = self._add(index, core)
        if self._is_attached:
            replica.supervisor.attach()
        if self.is_paused:
            await replica.supervisor.pause(True)
        logger.info("replica %d is added; there are %d", index, len(self.indexes))

    async def _retire(self, replica: Replica, drain_timeout_s: float) -> None:
        replica.is_draining = True
        loop = asyncio.get_running_loop()
        deadline = loop.time() + drain_timeout_s
        while self._placement.num_requests(replica.index) and loop.time() < deadline and not replica.is_gone:
            await asyncio.sleep(DRAIN_POLL_S)
        replica.supervisor.disconnect()
        self._move_all(replica.supervisor.release_all(), self._allowed())
        self._placement.remove_replica(replica.index)
        if self._service is not None:
            self._service.remove_replica(replica.index)
        await replica.supervisor.stop()
        del self._replicas[replica.index]
        self._note_retired(replica)
        logger.info("replica %d is removed; there are %d", replica.index, len(self.indexes))

    def _move_all(self, requests: list[LiveRequest], others: list[int]) -> None:
        for live in requests:
            self._placement.remove(live.message.handle)
            together = None if live.message.fork_group is None else self._groups.get(live.message.fork_group)
            index = self._placement.place(live.message, [together] if together in others else others)
            if live.message.fork_group is not None:
                self._groups[live.message.fork_group] = index
            self._replicas[index].supervisor.adopt(live)

    def _add(self, index: int, core: CoreProcess) -> Replica:
        replica = self._replicas[index] = Replica(self, index, core, partial(self._launch_again, index, self._launch))
        replica.supervisor.weight_version = self._version
        self._placement.add_replica(index)
        if self._service is not None:
            self._service.add_replica(index)
        return replica

    def _launch_again(self, index: int, launch: Callable[[int], CoreProcess]) -> CoreProcess:
        """A core for a replica whose core is gone, with its cache."""
        self._placement.forget_cache(index)
        if self._service is not None:
            self._service.add_replica(index)
        return launch(index)

    def _note_retired(self, replica: Replica) -> None:
        self._num_restarts_before += replica.supervisor.num_restarts
        self._num_resumed_before += replica.supervisor.num_resumed

    # --- weights ---

    @property
    def weight_versions(self) -> dict[int, str]:
        """By replica."""
        return {index: self._replicas[index].supervisor.weight_version for index in self.indexes}

    def live_of(self, handle: int) -> LiveRequest | None:
        """As `Supervisor`."""
        index = self._placement.replica_of(handle)
        return None if index is None else self._replicas[index].supervisor.live_of(handle)

    async def replace_weights(self, launch: Callable[[int], CoreProcess], version: str, timeout_s: float) -> None:
        """Replace the weights of one replica after the other.

        Raises:
            QuireError: as `weight_update.replace_weights`; replicas before that one have the new weights.
        """
        self._check_apart("given other weights one by one")
        async with self._scaling:
            for index in self.indexes:
                replica = self._replicas[index]
                replica.is_updating = True
                try:
                    again = partial(self._launch_again, index, launch)
                    await replace_weights(replica.supervisor, again, version, timeout_s)
                finally:
                    replica.is_updating = False
            self._launch, self._version = launch, version

    async def finish(self, timeout_s: float) -> bool:
        """As `Supervisor`, for all."""
        supervisors = [self._replicas[index].supervisor for index in self.indexes]
        done = await asyncio.gather(*(one.finish(timeout_s) for one in supervisors))
        if not all(done):
            self.release()
        return all(done)

    def release(self) -> None:
        """As `Supervisor`, for all."""
        for index in self.indexes:
            self._replicas[index].supervisor.release()

    async def rest(self) -> None:
        """As `Supervisor`, for all."""
        await asyncio.gather(*(self._replicas[index].supervisor.rest() for index in self.indexes))

    async def wake(self) -> None:
        """As `Supervisor`, for all; those that are awake already stay so."""
        resting = [one.supervisor for one in self._replicas.values() if one.supervisor.is_resting]
        found = await asyncio.gather(*(one.wake() for one in resting), return_exceptions=True)
        for one in found:
            if one is not None:
                raise one

    # --- all of them ---

    async def call(self, method: str, argument: bool = False) -> bool:
        """Call a utility of every core; whether all say yes."""
        calls = [self._replicas[index].supervisor.call(method, argument) for index in self.indexes]
        is_done = all(await asyncio.gather(*calls))
        if is_done and method == "reset_prefix_cache":
            for index in self.indexes:
                self._placement.forget_cache(index)
        return is_done

    async def collective_rpc(self, call: WorkerCall) -> list[Any]:
        """As `EngineCoreClient.collective_rpc`, of all cores at the same time."""
        return await gather_ranks({index: self._replicas[index].supervisor for index in self.indexes}, call)

    async def profile(self, starts: bool) -> bool:
        """Start recording the steps of all cores, or stop and write one trace; False where none does any more than
        before.
        """
        return await profile_replicas({index: self._replicas[index].supervisor for index in self.indexes}, starts)

    async def live_states(self) -> list[EngineState]:
        """What each core does now, by replica."""
        indexes = list(self.indexes)
        calls = [self._replicas[index].supervisor.call("live_state") for index in indexes]
        states = await asyncio.gather(*calls, return_exceptions=True)  # one that has ended does not hide the others
        return [
            msgspec.structs.replace(state, index=index)
            for index, state in zip(indexes, states, strict=True) if isinstance(state, EngineState)
        ]  # fmt: skip

    async def check_health(self) -> None:
        """Return when one replica can serve; raises what is wrong with the first otherwise."""
        checks = [self._replicas[index].supervisor.check_health() for index in self.indexes]
        results = await asyncio.gather(*checks, return_exceptions=True)
        errors = [result for result in results if result is not None]
        if not results:
            raise EngineDeadError("no replica of the engine is left")
        if len(errors) == len(results):
            raise errors[0]

    async def pause(self, is_paused: bool) -> None:
        """Stop running steps, or go on; holds for later replicas too."""
        self.is_paused = is_paused
        await asyncio.gather(*(self._replicas[index].supervisor.pause(is_paused) for index in self.indexes))

    def close(self) -> None:
        """As `Supervisor`."""
        for one in self._replicas.values():
            one.supervisor.close()

    async def stop(self) -> None:
        """As `Supervisor`."""
        await asyncio.gather(*(one.supervisor.stop() for one in self._replicas.values()))


def supervise(
    listener: Listener,
    config: QuireConfig,
    core: CoreProcess,
    launch: Callable[[], CoreProcess] | None,
    others: Sequence[CoreProcess],
    launch_replica: Callable[[int], CoreProcess] | None,
) -> Supervisor | Replicas:
    """What keeps the cores of an engine running; arguments as `AsyncLLM`."""
    if launch_replica is not None:
        return Replicas(dict(enumerate((core, *others))), launch_replica, listener, config)
    assert launch is not None, "there is one core, which is replaced when it dies"
    return Supervisor(core, launch, listener, config.supervision.max_restarts)
