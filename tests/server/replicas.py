"""Replicas whose cores are in this process, turned by the test, and die when it says so."""

from __future__ import annotations

import asyncio
import itertools
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import zmq

from quire.core.process_stats import CoreProcesses
from quire.core.sampling_params import RequestOutputKind, SamplingParams
from quire.engine.async_llm import AsyncLLM
from quire.engine.crash_reports import CoreRemains
from quire.engine.data_parallel.replicas import supervise
from quire.engine.front_ends.hub import FrontEndHub
from quire.engine.front_ends.link import FrontEndLink
from quire.engine.front_ends.messages import ToFrontEnd, ToOwner
from quire.engine.front_ends.remote import RemoteEngine
from quire.engine.output_stream import OutputStream
from quire.engine.parts import FrontEndParts
from quire.errors import EngineDeadError
from quire.server.front_ends.controls import OwnerControls
from quire.server.front_ends.engine import FrontEndEngine
from tests.server.engines import rule, scripted_config
from tests.server.hand_core import HandCore, make_parts


class MortalCore(HandCore):
    """A core that can die, or never become ready.

    Attributes:
        index: of its replica.
        is_dead: it does nothing any more.
        has_ended_with_group: another one, with which it shares experts, was the cause.
    """

    def __init__(self, index: int = 0, max_num_seqs: int = 4) -> None:
        super().__init__(max_num_seqs)
        self.index = index
        self.is_dead = self.has_ended_with_group = False
        self.pid = 1000 + index
        self._on_exit: Callable[..., None] = lambda *_: None

    @property
    def processes(self) -> CoreProcesses:
        """As if it were one."""
        return CoreProcesses(self.index, [self.pid])

    def watch_exit(self, on_exit: Callable[..., None]) -> None:
        self._on_exit = on_exit

    def wait_ready(self) -> None:
        """Its end is connected."""
        assert self.link._inputs.poll(10_000, zmq.POLLOUT)

    def kill(self) -> None:
        self.is_dead = True

    def die(self) -> None:
        """As when the process is killed."""
        self.is_dead = True
        self._on_exit(self, "the process was killed")

    def remains(self) -> CoreRemains:
        """Nothing that is written anywhere."""
        return CoreRemains(scripted_config(crash_reports="none"), self.pid, 0.0, {}, "")

    def turn(self) -> None:
        if not self.is_dead:
            super().turn()

    def close(self) -> None:
        """The outer ends alone, maybe in another thread than turns it."""
        self.is_dead = True
        self.link.close()

    def destroy(self) -> None:
        """The inner ends."""
        self._context.destroy(linger=0)


class StillbornCore(MortalCore):
    """Its process ends while it starts."""

    def wait_ready(self) -> None:
        self.close()
        raise EngineDeadError("the engine core process exited during startup")


class SlowCore(MortalCore):
    """It becomes ready when the test says so."""

    def __init__(self, index: int = 0, max_num_seqs: int = 4) -> None:
        super().__init__(index, max_num_seqs)
        self.may_be_ready = threading.Event()

    def wait_ready(self) -> None:
        self.may_be_ready.wait(60)


class BadWeights(EngineDeadError):
    """Of a directory that no core can be started with."""


@dataclass(frozen=True)
class FleetLauncher:
    """As `CoreLauncher`; a directory's name is the number of its weights."""

    fleet: Fleet
    model_path: str = "0"

    def __call__(self, index: int = 0) -> Any:
        """A core with these weights."""
        if self.model_path == "bad":
            raise BadWeights("cannot be loaded")
        core = self.fleet.launch(index)
        core.executor.weights = int(self.model_path)
        return core

    def with_weights(self, path: str, version: str) -> FleetLauncher:
        """Others."""
        return replace(self, model_path=path)


class Fleet:
    """An engine with replicas, and their cores.

    Attributes:
        engine: to be used within `run`.
        cores: that were started, the last one of each replica.
        fronts: front ends of an owner, of which `engine` is the first; empty = `engine` is alone.
        born_dead, born_slow: replicas whose next cores do not start, or take their time.
    """

    _turns: Iterator[AsyncLLM] = iter(())

    def __init__(self, count: int = 2, fronts: int = 0, **settings: Any) -> None:
        self.born_dead, self.born_slow = set[int](), set[int]()
        self.cores = {index: MortalCore(index) for index in range(count)}
        self._all = list(self.cores.values())
        self._links: list[FrontEndLink[ToOwner]] = []
        for core in self._all:
            core.wait_ready()
        parts = make_parts(data_parallel_size=count, num_blocks=128, **settings)
        first, *others = self.cores.values()
        launch = FleetLauncher(self)
        self.fronts: list[FrontEndEngine] = []
        self.hub: FrontEndHub | None = None
        if fronts:
            self._make_fronts(fronts, parts, launch)
            self.engine: AsyncLLM = self.fronts[0]
            self._turns = itertools.cycle(self.fronts)
            return
        replicas = (others, launch) if count > 1 else ()
        self.engine = AsyncLLM(parts, first, launch, *replicas)  # type: ignore[arg-type]

    def _make_fronts(self, fronts: int, parts: FrontEndParts, launch: FleetLauncher) -> None:
        """As the owner and its processes, over real links, all in this one."""
        first, *others = cast(Any, list(self.cores.values()))
        hub = self.hub = FrontEndHub(parts.config, has_replicas=bool(others))
        hub.supervisor = supervise(hub, parts.config, first, launch, others, launch if others else None)
        self.controls = OwnerControls(hub, parts.config, launch)
        hub.supervisor.attach()
        self._keeping = asyncio.ensure_future(hub.keep_status())
        for serial in range(1, fronts + 1):
            near, far = socket.socketpair()
            link: FrontEndLink[ToOwner] = FrontEndLink(near, ToOwner, "front end")
            link.listen(partial(hub.take, serial))
            hub.add_front_end(serial, cast(Any, link))
            remote = RemoteEngine(FrontEndLink(far, ToFrontEnd, "owner"), serial)
            self.fronts.append(FrontEndEngine(parts, remote))
            self._links.append(link)
            remote.attach()

    def launch(self, index: int) -> Any:
        """Another core for a replica."""
        kind = StillbornCore if index in self.born_dead else SlowCore if index in self.born_slow else MortalCore
        core = self.cores[index] = kind(index)
        self._all.append(core)
        return core

    def shutdown(self) -> None:
        """End everything."""
        for engine in self.fronts or [self.engine]:
            engine.shutdown()
        if self.hub is not None:
            self._keeping.cancel()
            self.hub.close()
            self.hub.supervisor.close()
        for link in self._links:
            link.close()
        for core in self._all:
            core.destroy()

    async def turn(self, count: int = 1, *, only: int | None = None) -> None:
        """Turns of all cores, or of one."""
        for _ in range(count):
            for index, core in list(self.cores.items()):
                if only in (None, index):
                    core.turn()
            await asyncio.sleep(0.001)

    async def open(self, prompt: list[int], max_tokens: int, name: str, **options: Any) -> OutputStream:
        """A stream of whole answers, at each front end in turn."""
        from quire.core.request_options import RequestOptions

        params = SamplingParams(
            max_tokens=max_tokens, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.CUMULATIVE
        )
        engine = next(self._turns, self.engine)
        return await engine.open_stream({"prompt_token_ids": prompt}, params, name, RequestOptions(**options))

    async def finish(self, streams: list[OutputStream]) -> list[list[int]]:
        """Turn the cores until all have ended; the tokens of each."""
        answers: list[list[int]] = [[] for _ in streams]
        left = set(range(len(streams)))
        for _ in range(5000):
            await self.turn()
            for number in list(left):
                output = streams[number].take()
                if output is not None:
                    answers[number] = output.outputs[0].token_ids
                    if output.finished:
                        left.discard(number)
            if not left:
                return answers
        raise AssertionError(f"streams {left} have not ended")


def expected(prompt: list[int], max_tokens: int, weights: int = 0) -> list[int]:
    """The answer of one engine."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(rule(tokens, weights, len(tokens)))
    return tokens[len(prompt) :]
