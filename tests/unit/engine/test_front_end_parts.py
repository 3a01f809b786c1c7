"""Steps of a core as the parts of front ends, and what the hub between them keeps."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from quire.core.draft_stats import DraftOutcomes
from quire.core.engine_messages import EngineCoreOutputs, EngineCoreRequest, FinishedRequest, FinishReason
from quire.core.logprobs import LogprobsArrays
from quire.core.process_stats import CoreProcesses
from quire.core.sampling_params import SamplingParams
from quire.core.stats import EventKind, RequestEvent, SchedulerStats
from quire.core.wire import RequestRefused, StepOutputs
from quire.engine.front_ends.hub import FrontEndHub
from quire.engine.front_ends.messages import (
    EngineDead,
    OwnerAnswer,
    OwnerCall,
    PlaceRequest,
    RequestAborted,
    RequestRestarted,
    first_handle,
    serial_of,
)
from quire.engine.front_ends.split import split_step
from quire.engine.mp_factory import CoreLauncher
from quire.errors import EngineDeadError, EngineGenerateError, ValidationError
from tests.server.engines import scripted_config

A, B, C = first_handle(1), first_handle(2), first_handle(3)


def step(handles: list[int], finished: tuple[int, ...] = (), **more: Any) -> EngineCoreOutputs:
    return EngineCoreOutputs(
        handles=np.array(handles, np.int64), new_token_ids=np.arange(len(handles), dtype=np.int32),
        finished=tuple(FinishedRequest(one, FinishReason.STOP) for one in finished), timestamp=1.0,
        **{"logprobs": None, "prompt_logprobs": (), "events": (), "stats": SchedulerStats(num_scheduled_tokens=3),
           **more},
    )  # fmt: skip


def test_each_front_end_gets_what_is_of_its_requests():
    lines = np.array([[5], [6]], np.int32)
    arrays = LogprobsArrays(np.array([1, 3], np.int32), lines, lines.astype(np.float32), lines)
    whole = step(
        [A, B, A + 1, B], (A + 1, C), logprobs=arrays, prompt_logprobs=((C + 7, arrays),),
        events=(RequestEvent(B, EventKind.QUEUED, 0.5),),
        drafts=DraftOutcomes(np.array([B]), np.array([2], np.int32), np.array([1], np.int32)),
    )  # fmt: skip
    parts = split_step(whole)
    assert set(parts) == {1, 2, 3} and [serial_of(one) for one in (A, A + 1, B, C + 9)] == [1, 1, 2, 3]
    assert parts[1].handles.tolist() == [A, A + 1] and parts[1].new_token_ids.tolist() == [0, 2]
    assert parts[1].logprobs is None and parts[1].drafts is None and not parts[1].events
    assert parts[2].logprobs is not None and parts[2].logprobs.index.tolist() == [0, 1]
    assert parts[2].logprobs.token_ids.tolist() == [[5], [6]] and parts[2].drafts is not None
    assert [one.handle for one in parts[3].finished] == [C] and len(parts[3].prompt_logprobs) == 1
    assert not len(parts[3].handles)
    alone = step([A, A + 1])
    assert split_step(alone)[1] is alone, "nothing is copied where one front end has all"


class FakeLink:
    """Keeps what is sent."""

    def __init__(self) -> None:
        self.sent: list[Any] = []

    def send(self, message: Any) -> None:
        self.sent.append(message)

    def of(self, kind: type) -> list[Any]:
        return [one for one in self.sent if isinstance(one, kind)]


class FakeSupervisor:
    """Keeps what it is given; refuses prompts of one token."""

    def __init__(self) -> None:
        self.added: list[int] = []
        self.aborted: list[int] = []

    def add_request(self, request: EngineCoreRequest) -> None:
        if len(request.prompt_token_ids) == 1:
            raise ValidationError("too short")
        self.added.append(request.handle)

    def processes(self) -> CoreProcesses:
        return CoreProcesses(0, [1])

    def abort_requests(self, handles: list[int]) -> None:
        self.aborted += handles


def request(handle: int, num_tokens: int = 3) -> EngineCoreRequest:
    return EngineCoreRequest(
        handle=handle, request_id="r", prompt_token_ids=np.ones(num_tokens, np.int32),
        sampling_params=SamplingParams(max_tokens=9), seed=1,
    )  # fmt: skip


def hub_of_two() -> tuple[FrontEndHub, FakeLink, FakeLink, FakeSupervisor]:
    hub = FrontEndHub(scripted_config(), has_replicas=False)
    hub._logs.record = lambda step: None  # type: ignore[method-assign]
    supervisor: Any = FakeSupervisor()
    hub.supervisor = supervisor
    links: list[Any] = [FakeLink(), FakeLink()]
    for serial, link in enumerate(links, 1):
        hub.add_front_end(serial, link)
    return hub, *links, supervisor


def test_a_request_goes_on_at_its_front_end_with_the_tokens_that_it_had():
    hub, one, other, supervisor = hub_of_two()
    hub.take(1, PlaceRequest(request(A)))
    hub.take(2, PlaceRequest(request(B)))
    hub.take(2, PlaceRequest(request(A + 5)))  # not its own
    hub.take(1, PlaceRequest(request(A + 1, 1)))
    assert supervisor.added == [A, B]
    assert [refused.handle for refused in one.of(RequestRefused)] == [A + 1]
    hub.on_step(step([A, B, A]))
    assert hub.restart(A) == [0, 2] and one.of(RequestRestarted)[0].handle == A
    assert hub.restart(A + 9) is None
    hub.on_aborted(A)
    assert one.of(RequestAborted)[0].handle == A and hub.num_requests == 1 and not other.of(RequestAborted)
    hub.on_step(step([B], (B,)))
    assert hub.num_requests == 0


def test_requests_of_a_front_end_that_ends_are_aborted_and_those_of_others_are_not():
    hub, one, other, supervisor = hub_of_two()
    for handle in (A, A + 1, B):
        hub.take(serial_of(handle), PlaceRequest(request(handle)))
    assert hub.remove_front_end(1) == 2 and hub.remove_front_end(1) == 0
    assert sorted(supervisor.aborted) == [A, A + 1]
    assert hub.restart(A) is None, "it is not sent to another core"
    hub.on_step(step([A, B], (A,)))
    assert other.of(StepOutputs)[-1].outputs.handles.tolist() == [B] and not one.of(StepOutputs)
    hub.on_dead(EngineDeadError("gone"))
    assert other.of(EngineDead) and not one.of(EngineDead)


def test_a_front_end_without_a_part_in_steps_learns_the_state_now_and_then_and_misses_no_count():
    hub, one, other, _ = hub_of_two()
    hub.take(1, PlaceRequest(request(A)))
    for _ in range(50):
        hub.on_step(step([A]))
    hub.peers[2].send_skipped(1e9)
    told = [message.outputs.stats.num_scheduled_tokens for message in other.of(StepOutputs)]
    assert sum(told) == 150 and len(told) < 50, "counts of steps that were left out are added to later ones"
    assert len(one.of(StepOutputs)) == 50


def test_a_call_that_fails_by_itself_does_not_say_that_the_engine_is_dead(monkeypatch):
    async def run() -> None:
        hub, one, _, _ = hub_of_two()

        async def fail(serial: int, call: OwnerCall) -> OwnerAnswer:
            raise OSError("File name too long")

        hub.own_calls["update_weights"] = fail
        monkeypatch.setattr(hub, "send_status", lambda: None)
        await hub._answer(hub.peers[1], OwnerCall(7, "update_weights"))
        (answer,) = one.of(OwnerAnswer)
        assert answer.call_id == 7 and isinstance(answer.error.to_error(), EngineGenerateError)

    asyncio.run(run())


@pytest.mark.parametrize("path", ["", "a\0b", "x/" * 5000, "y" * 5000], ids=["empty", "nul", "deep", "long"])
def test_a_path_that_cannot_be_one_is_refused_by_its_name(path):
    with pytest.raises(ValidationError, match="there is no model at") as refused:
        CoreLauncher(scripted_config(), [], ()).with_weights(path, "v")
    assert refused.value.field == "path"
