"""The loop of a core's process: every message is answered, and none brings it down."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from quire.core.engine_messages import EngineCoreRequest, FinishReason
from quire.core.live_state import EngineState
from quire.core.sampling_params import SamplingParams
from quire.core.serial import MessageDecoder, MessageEncoder
from quire.core.wire import AbortRequests, AddRequest, FromCore, RequestRefused, StepOutputs, UtilityCall, UtilityResult
from quire.engine.core import EngineCore
from quire.engine.core_proc import EngineCoreProc
from quire.engine.heartbeat import Heartbeat, HeartbeatField, Phase
from quire.engine.step_recovery import StepRecovery
from quire.scheduler.live_state import live_state
from tests.unit.engine.test_core import ScriptedExecutor
from tests.unit.scheduler.harness import make_scheduler


class Ends:
    """The front-end's side of a core's process that runs in this one."""

    def __init__(self, path: Path) -> None:
        self.context = zmq.Context()
        sockets = []
        for name, inner, outer in (("in", zmq.PULL, zmq.PUSH), ("out", zmq.PUSH, zmq.PULL)):
            sockets += [self.context.socket(outer), self.context.socket(inner)]
            sockets[-2].bind(f"inproc://{name}")
            sockets[-1].connect(f"inproc://{name}")
        self.to_core, inputs, self.from_core, outputs = sockets
        recovery = StepRecovery()
        executor: Any = ScriptedExecutor({})
        self.page = Heartbeat.create(path / "page")
        scheduler = make_scheduler(gates=(recovery.gate,))
        core = EngineCore(
            executor, scheduler, recovery, on_step=self.page.begin_step, observe=partial(live_state, scheduler)
        )
        self.proc = EngineCoreProc(core, inputs, outputs, self.page)
        self._encoder = MessageEncoder()
        self._decoder: MessageDecoder[FromCore] = MessageDecoder(FromCore)

    def send(self, message: Any) -> None:
        self.to_core.send_multipart(self._encoder.encode(message))

    def turn(self) -> list[FromCore]:
        """One turn of the loop, and what came of it."""
        self.proc.run_once()
        found = []
        while self.from_core.poll(0):
            found.append(self._decoder.decode(self.from_core.recv_multipart()))
        return found


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[Ends]:
    ends = Ends(tmp_path)
    yield ends
    ends.context.destroy(linger=0)


def request(handle: int, prompt: list[int], max_tokens: int = 3) -> AddRequest:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    ids = np.array(prompt, dtype=np.int32)
    return AddRequest(
        EngineCoreRequest(handle=handle, request_id=str(handle), prompt_token_ids=ids, sampling_params=params, seed=1)
    )


def test_a_step_is_one_message(ends: Ends):
    ends.send(request(1, [1, 2]))
    ends.send(request(2, [3]))
    for _ in range(3):
        (message,) = ends.turn()
        assert isinstance(message, StepOutputs)
        assert message.outputs.handles.tolist() == [1, 2]
    assert [one.finish_reason for one in message.outputs.finished] == [FinishReason.LENGTH] * 2
    assert ends.page.words[HeartbeatField.NUM_TICKS] == 6
    assert ends.page.words[HeartbeatField.NUM_RECEIVED] == 2


def test_a_request_that_can_never_run_is_refused(ends: Ends):
    ends.send(request(5, [1] * 1000))
    (message,) = ends.turn()
    assert isinstance(message, RequestRefused)
    assert (message.handle, message.error.kind, message.error.field) == (5, "ValidationError", "prompt")


@pytest.mark.parametrize("frames", [[b""], [b"\xff\xff", b"x"], [b"\x81\xa4type\xa3add"], [b"\xc1"] * 9])
def test_garbage_is_left_out(ends: Ends, frames: list[bytes]):
    ends.to_core.send_multipart(frames)
    assert ends.turn() == []
    ends.send(UtilityCall(1, "ping"))
    assert ends.turn() == [UtilityResult(1, value=True)]


def test_the_state_of_the_engine_is_sent_between_two_steps(ends: Ends):
    ends.send(request(1, [1, 2, 3]))
    ends.turn()
    ends.send(UtilityCall(1, "live_state"))
    ends.turn()
    ends.send(UtilityCall(2, "live_state"))
    message = ends.turn()[0]
    assert isinstance(message, UtilityResult) and isinstance(message.value, EngineState)
    (row,) = message.value.batch
    assert (row.id, row.phase, row.prompt_tokens, row.output_tokens) == ("1", "decode", 3, 2)
    assert [one.step for one in message.value.steps] == [1], "the step after the first look"
    assert message.value.process.pid == os.getpid()


def test_a_request_that_cannot_be_read_is_answered(ends: Ends):
    damaged = msgspec.msgpack.encode({"type": "add", "request": {"handle": 9, "prompt_token_ids": "what?"}})
    ends.to_core.send_multipart([damaged])
    (message,) = ends.turn()
    assert isinstance(message, RequestRefused)
    assert (message.handle, message.error.kind) == (9, "MessageError")


def test_while_paused_nothing_runs_but_aborts_are_answered(ends: Ends):
    ends.send(request(1, [1]))
    ends.send(request(2, [1]))
    ends.send(UtilityCall(1, "pause"))
    assert ends.turn()[0] == UtilityResult(1, value=True)
    ends.send(AbortRequests([1]))
    (message,) = ends.turn()
    assert isinstance(message, StepOutputs)
    assert [(one.handle, one.finish_reason) for one in message.outputs.finished] == [(1, FinishReason.ABORT)]
    ends.send(UtilityCall(2, "resume"))
    answers = ends.turn()
    assert isinstance(answers[1], StepOutputs)
    assert answers[1].outputs.handles.tolist() == [2]


def test_an_unknown_method_is_an_error(ends: Ends):
    ends.send(UtilityCall(1, "format_the_disk"))
    (message,) = ends.turn()
    assert isinstance(message, UtilityResult)
    assert message.error is not None and message.error.kind == "MessageError"


def test_the_prefix_cache_can_be_reset_between_requests(ends: Ends):
    ends.send(request(1, [1, 2, 3], max_tokens=2))
    ends.turn()
    ends.send(UtilityCall(1, "reset_prefix_cache"))
    assert ends.turn()[0] == UtilityResult(1, value=False)
    ends.send(UtilityCall(2, "reset_prefix_cache"))
    assert ends.turn() == [UtilityResult(2, value=True)]
    assert ends.page.phase is Phase.BUSY


def test_a_planned_end_ends_the_loop_and_takes_in_nothing_more(ends: Ends):
    ends.send(request(1, [1, 2], max_tokens=1))
    ends.turn()
    ends.send(UtilityCall(1, "end"))
    ends.send(request(2, [1]))
    ends.proc.run()
    assert not ends.proc._core.has_unfinished_requests()
    assert ends.page.phase is Phase.IDLE, "it is not taken to hang"
