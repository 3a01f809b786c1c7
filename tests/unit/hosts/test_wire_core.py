"""What a `WireCore` sends for what its supervisor calls: ends, failures, log-probabilities in parts, a dead engine."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from quire.core.draft_stats import DraftOutcomes
from quire.core.engine_messages import EngineCoreOutputs, EngineCoreRequest, FinishedRequest, FinishReason
from quire.core.logprobs import LogprobsArrays
from quire.core.stats import EventKind, RequestEvent, SchedulerStats
from quire.errors import EngineDeadError, EngineGenerateError, MessageError
from quire.hosts.engine_core import core as wire_core
from quire.hosts.engine_core.messages import CoreOutputs, CoreRequest, decode, request_name
from quire.hosts.engine_core.outputs import stats_of
from tests.unit.engine.fakes import make_parts
from tests.unit.hosts.front_end import DEFAULTS, FIELDS, array_of


class Links:
    """Keeps what is sent."""

    num_clients = 2

    def __init__(self) -> None:
        self.sent: list[tuple[int, CoreOutputs]] = []
        self.is_dead = False

    def send(self, client: int, outputs: CoreOutputs) -> None:
        self.sent.append((client, outputs))

    def send_dead(self) -> None:
        self.is_dead = True

    def take(self) -> list[tuple[int, list[Any]]]:
        """(client, outputs as they are encoded) of each message since the last call."""
        sent, self.sent = self.sent, []
        return [(client, msgspec.msgpack.decode(msgspec.msgpack.encode(one))[1]) for client, one in sent]


class Supervisor:
    """Keeps what it is given."""

    def __init__(self, *_: Any) -> None:
        self.added: list[EngineCoreRequest] = []
        self.aborted: list[int] = []

    def add_request(self, message: EngineCoreRequest) -> None:
        self.added.append(message)

    def abort_requests(self, handles: Any) -> None:
        self.aborted += handles


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(wire_core, "Supervisor", Supervisor)
    links: Any = Links()
    made = wire_core.WireCore(make_parts(), SimpleNamespace(), SimpleNamespace, links)  # type: ignore[arg-type]
    yield made
    made._forms.close()


def add(core: Any, request_id: str, client: int = 0, **params: Any) -> int:
    """Send a request; its handle in the engine."""
    fields = {**DEFAULTS, "request_id": request_id, "prompt_token_ids": [5, 6, 7], "client_index": client}
    fields["sampling_params"] = {"_eos_token_id": 1, "max_tokens": 9, **params}
    core._handle(client, [b"\0", msgspec.msgpack.encode([fields.get(name) for name in FIELDS])])
    return core._supervisor.added[-1].handle if core._supervisor.added else -1


def step(tokens: dict[int, list[int]], **more: Any) -> EngineCoreOutputs:
    handles = [handle for handle, new in tokens.items() for _ in new]
    fields: dict[str, Any] = {
        "handles": np.array(handles, np.int64), "prompt_logprobs": (), "finished": (), "events": (), "logprobs": None,
        "new_token_ids": np.array([one for new in tokens.values() for one in new], np.int32),
        "stats": SchedulerStats(), "timestamp": 3.0,
    }  # fmt: skip
    return EngineCoreOutputs(**{**fields, **more})


def lines(index: list[int], token_ids: list[list[int]]) -> LogprobsArrays:
    ids = np.array(token_ids, np.int32)
    return LogprobsArrays(np.array(index, np.int32), ids, -ids.astype(np.float32), np.ones_like(ids))


def test_tokens_go_to_the_front_end_that_asked_and_statistics_to_the_first(core):
    one, other = add(core, "one", 0), add(core, "other", 1)
    core.on_step(step({other: [8, 9]}, finished=(FinishedRequest(other, FinishReason.STOP, 9),)))
    assert core._links.take() == [(0, []), (1, [["other", [8, 9], *[None] * 3, 0, 9, *[None] * 6, 0, *[None] * 5]])]
    core.on_step(step({other: [3], one: [4]}))  # the first has ended
    ((client, ((name, tokens, *_),)),) = core._links.take()
    assert (client, name, tokens) == (0, "one", [4]) and core.restart(one) == [4] and core.restart(other) is None


def test_parts_of_a_request_that_are_sent_once_wait_for_its_first_tokens(core):
    handle = add(core, "one", logprobs=1, prompt_logprobs=1)
    queued = RequestEvent(handle, EventKind.QUEUED, 1.0)
    scheduled = RequestEvent(handle, EventKind.SCHEDULED, 2.0, num_cached_tokens=2)
    core.on_step(step({}, events=(queued, scheduled), prompt_logprobs=((handle, lines([1], [[6]])),)))
    assert core._links.take() == [(0, [])]
    core.on_step(step({handle: [8, 9]}, prompt_logprobs=((handle, lines([2], [[7, 3, 2]])),),
                      logprobs=lines([0, 1], [[8, 1, 4], [9, 2, 5]])))  # fmt: skip
    ((_, (output,)),) = core._links.take()
    assert array_of(output[2][0]).tolist() == [[8, 1], [9, 2]] and array_of(output[2][2]).tolist() == [1, 1]
    assert array_of(output[3][0]).tolist() == [[6, -1], [7, 3]] and output[3][0][0] == "int32"
    assert [event["type"] for event in output[7]] == [1, 2]
    assert (output[11]["num_prompt_tokens"], output[11]["num_cached_tokens"]) == (3, 2)


def test_failures_say_whose_mistake_they_are(core):
    handle = add(core, "timeout")
    ended = FinishedRequest(handle, FinishReason.QUEUE_TIMEOUT, error="it waited too long")
    core.on_step(step({}, finished=(ended,)))
    ((_, (output,)),) = core._links.take()
    assert output[5] == 3 and output[18] == {
        "message": "it waited too long",
        "code": "queue_timeout",
        "retryable": True,
    }
    handle = add(core, "grammar")
    core.on_step(step({}, finished=(FinishedRequest(handle, FinishReason.ERROR, error="no", error_field="json"),)))
    assert core._links.take()[0][1][0][18]["code"] == "validation_error"
    handle = add(core, "given up")
    core.on_failed(handle, EngineGenerateError("it killed four cores"))
    assert core._links.take()[0][1][0][18] == {"message": "it killed four cores"}
    core.on_aborted(add(core, "lost"))
    assert core._links.take()[0][1][0][5] == 2


def test_an_engine_that_has_stopped_for_good_is_announced(core):
    async def die() -> int:
        core._over = asyncio.get_running_loop().create_future()
        add(core, "one")
        core.on_dead(EngineDeadError("too many restarts"))
        return await core._over

    assert asyncio.run(die()) == 1 and core._links.is_dead and core.is_idle


def test_a_request_with_a_large_schema_is_looked_at_apart_and_may_be_aborted_meanwhile(core):
    words = [f"word {number}" for number in range(1200)]

    async def both() -> None:
        add(core, "large", structured_outputs={"choice": words})
        add(core, "gone", structured_outputs={"choice": words})
        add(core, "large", structured_outputs={"choice": words})  # the name is taken
        assert not core._supervisor.added and not core.is_idle
        core._handle(0, [b"\1", msgspec.msgpack.encode(["gone"])])
        while core._tasks:
            await asyncio.sleep(0.001)

    asyncio.run(both())
    assert [message.request_id for message in core._supervisor.added] == ["large"] and not core._links.sent


def test_statistics_of_drafts_are_counted_by_position():
    drafts = DraftOutcomes(np.array([1, 2]), np.array([3, 2]), np.array([2, 0]))
    stats = stats_of(step({}, drafts=drafts), 3).spec_decoding_stats
    assert stats is not None and (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (2, 5, 2)
    assert stats.num_accepted_tokens_per_pos == [1, 1, 0]


def test_a_request_that_cannot_be_read_is_named_as_far_as_it_says():
    named = msgspec.msgpack.encode(["name", "prompt", *[None] * 9, 1])
    assert request_name(named) == ("name", 1)
    with pytest.raises(MessageError, match=r"malformed message: .*\$\[1\]"):
        decode(named, CoreRequest)
    for payload in (b"", b"\xc1", msgspec.msgpack.encode([]), msgspec.msgpack.encode([5]), b"\x91" * 100_000):
        assert request_name(payload) is None
