"""Clients of an engine whose ranks are the processes of a launcher (torchrun), each with the user's script.

Every script makes the same calls. Rank 0 has the engine core and says what each call is; the other ranks compare theirs
with it, compute what rank 0's core says, and get the outputs that it gets. Called by `engine.factory`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from quire import envs
from quire.config import QuireConfig
from quire.config.parallel_checks import size_settings
from quire.core.engine_messages import EngineCoreOutputs, EngineCoreRequest
from quire.core.serial import MessageEncoder
from quire.core.wire import ErrorInfo
from quire.distributed.launch import Launch, read_launch
from quire.distributed.rank_link import Unexpected
from quire.engine.core_client.base import EngineCoreClient
from quire.engine.core_client.inproc import InprocClient
from quire.engine.core_factory import build_core
from quire.engine.data_parallel.places import cpu_shares
from quire.errors import CommunicationError, EngineDeadError, QuireClientError, QuireError, ValidationError
from quire.executor.launch_messages import Call, Done, Failed, Ready
from quire.executor.launched import RENDEZVOUS_TIMEOUT_S, FollowedRank, LaunchedExecutor, LeadGroup, meet
from quire.platforms.detect import detect_platform
from quire.platforms.interface import Platform
from quire.sample.logits_processor import ProcessorSource
from quire.utils.phases import PhaseTimer

CALL_TIMEOUT_S = 1800.0
"""For which the scripts of two ranks may be apart, as torch's process groups have it."""
STEP = "a step"
OF_ALL_RANKS = ("start_profile", "stop_profile")
"""Methods of rank 0's worker in which the others take part."""
Result = tuple[EngineCoreOutputs | None, bool | None]
DIVERGED_HINT = (
    "the scripts of all ranks have to make the same calls, with the same prompts and parameters, in the same order"
)


def launched_client(
    config: QuireConfig, platform: Platform, timer: PhaseTimer, processors: Sequence[ProcessorSource]
) -> EngineCoreClient:
    """The client of this process's rank.

    Args:
        config: resolved.

    Raises:
        ConfigError: the launcher's variables do not fit the settings, or a rank has other settings.
        QuireError: whatever keeps any rank from loading the model.
    """
    parallel = config.parallel
    sizes = size_settings(config) or f"tensor_parallel_size={parallel.tensor_parallel_size}"
    if parallel.data_parallel_size > 1:
        sizes += f" and data_parallel_size={parallel.data_parallel_size}"
    launch = read_launch(envs.launcher_variables(), parallel.num_ranks, parallel.data_parallel_size, sizes)
    platform = _take_place(config, platform, launch)
    with timer.phase("other ranks"):
        rendezvous = meet(launch)
        if launch.group_rank:
            rank = FollowedRank(config, platform, launch, rendezvous, RENDEZVOUS_TIMEOUT_S)
            rendezvous.start_world()
            return FollowClient(rank)
        group = LeadGroup(config, rendezvous, launch.group_size, RENDEZVOUS_TIMEOUT_S)
        rendezvous.leave()
    try:
        executor = partial(LaunchedExecutor, group)
        core = build_core(
            config, platform, timer, logits_processors=processors, engine_index=launch.group, make_executor=executor
        )
    except BaseException as error:
        group.fail(error)
        raise
    rendezvous.start_world()  # last: it waits for all ranks, and does not say for which
    return LeadClient(InprocClient(core), group)


def _take_place(config: QuireConfig, platform: Platform, launch: Launch) -> Platform:
    """Several engines of a launch on a machine: each on CPUs of its own, as replicas are."""
    count = config.parallel.data_parallel_size
    if count == 1 or not platform.is_cpu or launch.local_rank is None:
        return platform
    count = (launch.local_size or launch.world_size) // launch.group_size
    num_threads = (config.device.num_threads or 1) * config.parallel.num_ranks
    shares = cpu_shares(platform.cpus, max(1, count), num_threads)
    cpus = shares[min(launch.local_rank // launch.group_size, len(shares) - 1)]
    if not cpus:
        return platform
    os.sched_setaffinity(0, cpus)
    return detect_platform(config.device.device)


def digest_of(request: EngineCoreRequest) -> bytes:
    """Of what must be the same on every rank: everything but its name and the time of its arrival."""
    digest = hashlib.blake2b(digest_size=16)
    for frame in MessageEncoder().encode(dataclasses.replace(request, request_id="", arrival_time=0.0)):
        digest.update(frame)
    return digest.digest()


def _text_of(request: EngineCoreRequest) -> str:
    return f"request {request.handle} with a prompt of {len(request.prompt_token_ids)} tokens"


def _abort_text(handles: Sequence[int]) -> str:
    return f"the end of {len(handles)} requests" if len(handles) != 1 else f"the end of request {handles[0]}"


def _reset_text(is_running: bool) -> str:
    return f"reset_prefix_cache(reset_running_requests={is_running})"


def _digest(*values: Any) -> bytes:
    return hashlib.blake2b(repr(values).encode(), digest_size=16).digest()


class LaunchedClient(EngineCoreClient):
    """What both sides have: once the group is at an end, so is the engine."""

    def __init__(self) -> None:
        self._ended: QuireError | None = None

    @property
    def has_worker(self) -> bool:
        """That of this rank."""
        return True

    def _require(self) -> None:
        if self._ended is not None:
            raise self._ended


class LeadClient(LaunchedClient):
    """Rank 0's: the core is here.

    Args:
        client: of the core.
        group: the other ranks.
    """

    def __init__(self, client: InprocClient, group: LeadGroup) -> None:
        super().__init__()
        self._client = client
        self._group = group
        self._has_called = False

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queue a request; raises `ValidationError` when it can never run."""
        self._require()
        problem: QuireClientError | None = None
        try:
            self._client.add_request(request)
        except QuireClientError as error:
            problem = error
        info = None if problem is None else ErrorInfo.of(problem)
        self._say(Call(digest_of(request), _text_of(request), info))
        if problem is not None:
            raise problem

    def abort_requests(self, handles: Iterable[int]) -> None:
        """End requests; each still gets a final output. Nothing where the group is at an end."""
        if self._ended is None:
            ended = list(handles)
            self._client.abort_requests(ended)
            self._say(Call(_digest(ended), _abort_text(ended)))

    def get_output(self) -> EngineCoreOutputs | None:
        """Run one step, on all ranks."""
        outputs, _ = self._compute(STEP, lambda: (self._client.get_output(), None))
        return outputs

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget all cached blocks, those of running requests if asked; False while any block is in use."""
        reset = partial(self._client.reset_prefix_cache, reset_running_requests)
        return bool(self._compute(_reset_text(reset_running_requests), lambda: (None, reset()))[1])

    def call_worker(self, method: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a method of this rank's worker, or a function of it; profiles are of all ranks."""
        self._require()
        if method in OF_ALL_RANKS:
            return self._compute(str(method), lambda: (None, bool(self._client.call_worker(method))))[1]
        return self._client.call_worker(method, *args, **kwargs)

    def shutdown(self) -> None:
        """End the core, and leave the group; harmless when repeated."""
        self._ended = self._ended or EngineDeadError("the engine was shut down", hint="create a new one")
        self._client.shutdown()
        self._group.close()

    def _compute(self, text: str, compute: Callable[[], Result]) -> Result:
        """A call in which ranks compute: it is sent to them, they do it, and get what it comes to."""
        self._require()
        wants_ready, self._has_called = self._has_called, False
        self._say(Call(b"", text, wants_ready=wants_ready))
        self._has_called = False
        try:
            if wants_ready:
                self._await_all(Ready, "make the calls that rank 0 has made")
            outputs, value = compute()
            if self._group.links:
                # Perhaps the last that scripts want: they may end as soon as this returns, which others must not miss.
                is_last = outputs is None or bool(outputs.finished)
                self._client.call_worker("end_call", outputs, value, is_last)
                if is_last:
                    self._await_all(Done, "take what a call came to")
                    for link in self._group.links:
                        link.send(Done())
        except BaseException as error:
            raise self._end(error) from error
        return outputs, value

    def _say(self, call: Call) -> None:
        self._has_called = True
        try:
            for link in self._group.links:
                link.send(call)
        except CommunicationError as error:
            raise self._end(error) from error

    def _await_all(self, kind: type[Ready | Done], awaited: str) -> None:
        for link in self._group.links:
            link.receive(kind, awaited, CALL_TIMEOUT_S)

    def _end(self, error: BaseException) -> BaseException:
        """The group is at an end: every rank is sent the reason. What to raise."""
        if isinstance(error, Unexpected):
            assert isinstance(error.message, Failed), "it is what was awaited, or this"
            error = error.message.error.to_error()
        elif isinstance(error, EngineDeadError):
            said = self._group.parting_words()
            if said is not None:
                error = said
            elif self._group.lost is not None:
                error = EngineDeadError(self._group.lost, hint="start all ranks anew")
        self._ended = error if isinstance(error, QuireError) else EngineDeadError(
            f"the engine stopped: {type(error).__name__}: {error}", hint="create a new engine on every rank"
        )  # fmt: skip
        self._group.fail(self._ended)
        return error


class FollowClient(LaunchedClient):
    """That of the other ranks: what rank 0's core says is computed here as well."""

    def __init__(self, rank: FollowedRank) -> None:
        super().__init__()
        self._rank = rank

    def add_request(self, request: EngineCoreRequest) -> None:
        """Compare it with rank 0's; raises what that raised."""
        self._expect(_text_of(request), digest_of(request))

    def abort_requests(self, handles: Iterable[int]) -> None:
        """End requests; each still gets a final output. Nothing where the group is at an end."""
        ended = list(handles)
        if self._ended is None:
            self._expect(_abort_text(ended), _digest(ended))

    def get_output(self) -> EngineCoreOutputs | None:
        """One step, of all ranks: the outputs of rank 0's core."""
        return self._compute(STEP)[0]

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """As rank 0's."""
        return bool(self._compute(_reset_text(reset_running_requests))[1])

    def call_worker(self, method: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """As rank 0's."""
        self._require()
        if method in OF_ALL_RANKS:
            return self._compute(str(method))[1]
        worker = self._rank.worker
        if not isinstance(method, str):
            return method(worker, *args, **kwargs)
        found = None if method.startswith("_") else getattr(worker, method, None)
        if not callable(found):
            raise ValidationError(
                f"the worker does not have a method {method!r}", hint="quire/worker/worker.py has them", field="method"
            )
        return found(*args, **kwargs)

    def shutdown(self) -> None:
        """Leave the group; harmless when repeated."""
        self._ended = self._ended or EngineDeadError("the engine was shut down", hint="create a new one")
        self._rank.close()

    def _compute(self, text: str) -> Result:
        call = self._expect(text, b"")
        try:
            if call.wants_ready:
                self._rank.link.send(Ready())
            end = self._rank.follow()
            if end.is_last:
                self._rank.link.send(Done())
                told = self._rank.await_lead("say that all ranks have what a call came to", CALL_TIMEOUT_S)
                assert isinstance(told, Done), "rank 0's order of messages"
        except BaseException as error:
            raise self._end(error) from error
        return end.outputs, end.value

    def _expect(self, text: str, digest: bytes) -> Call:
        """Rank 0's next call, which must be this one."""
        self._require()
        try:
            call = self._rank.await_lead(f"make its next call ({text} here)", CALL_TIMEOUT_S)
            assert isinstance(call, Call), "rank 0's order of messages"
            if (call.text, call.digest) != (text, digest):
                theirs = call.text if call.text != text else "the same with other tokens or parameters"
                raise EngineDeadError(
                    f"the script of rank {self._rank.rank} calls for {text}, and that of rank 0 for {theirs}",
                    hint=DIVERGED_HINT,
                )
        except BaseException as error:
            raise self._end(error) from error
        if call.error is not None:
            raise call.error.to_error()
        return call

    def _end(self, error: BaseException) -> BaseException:
        """The group is at an end: rank 0 is sent the reason. What to raise."""
        self._ended = error if isinstance(error, QuireError) else EngineDeadError(
            f"the engine stopped: {type(error).__name__}: {error}", hint="create a new engine on every rank"
        )  # fmt: skip
        self._rank.fail(self._ended)
        return error
