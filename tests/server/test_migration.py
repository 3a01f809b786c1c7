"""Operators move a running request to another replica; what they send is checked, and others may not."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec
import pytest

from quire import SamplingParams
from quire.core.outputs import CompletionOutput, RequestOutput
from quire.core.request_snapshot import RequestSnapshot
from quire.errors import ValidationError
from tests.server.engines import ScriptedEngine
from tests.server.servers import RunningServer
from tests.server.test_protocol import post

SNAPSHOT = RequestSnapshot(
    model="m", request_id="r", prompt_token_ids=[1, 2], output_token_ids=[3], seed=5, sampling_params=SamplingParams()
)


class MovingEngine(ScriptedEngine):
    """Has one request, and ends those of others with a word."""

    def snapshot(self, request_id: str) -> RequestSnapshot:
        if request_id != "r":
            raise ValidationError("it has no snapshot", field="request_id")
        return SNAPSHOT

    async def resume(self, snapshot: RequestSnapshot, request_id: str) -> AsyncIterator[RequestOutput]:
        tokens = [*snapshot.output_token_ids, 4]
        answer = CompletionOutput(index=0, text="word", token_ids=tokens, finish_reason="stop")
        yield RequestOutput(request_id, None, snapshot.prompt_token_ids, [answer], finished=True)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    keys: Path = tmp_path_factory.mktemp("keys") / "keys.yaml"
    keys.write_text("tenants:\n  ops: {keys: [ops-key-1234], operator: true}\n  red: {keys: [red-key-1234]}\n")
    with RunningServer(MovingEngine(), api_key_file=str(keys)) as server:
        yield server


def ask(server, path, body, key="ops-key-1234"):
    return post(server, path, body, headers={"Authorization": f"Bearer {key}"})


def test_a_request_is_taken_from_one_replica_and_answered_by_another(server):
    taken = ask(server, "/snapshot_request", {"request_id": "r", "abort": True})
    assert taken.status_code == 200 and msgspec.json.decode(taken.content, type=RequestSnapshot) == SNAPSHOT
    answer = ask(server, "/resume_request", {"snapshot": taken.json()})
    assert answer.json() == {
        "request_id": "r", "text": "word", "output_token_ids": [3, 4], "finish_reason": "stop", "stop_reason": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/snapshot_request", {"request_id": "x"}, "request_id"),
        ("/snapshot_request", {}, "request_id"),
        ("/resume_request", {"snapshot": {}}, "snapshot"),
        ("/resume_request", {"snapshot": 5}, "snapshot"),
        ("/resume_request", {"snapshot": {"version": [[]], "model": {}}}, "snapshot"),
    ],
)
def test_what_is_wrong_is_refused_by_its_field(server, path, body, field):
    answer = ask(server, path, body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == field


@pytest.mark.parametrize("path", ["/snapshot_request", "/resume_request"])
def test_other_keys_may_not(server, path):
    assert ask(server, path, {"request_id": "r", "snapshot": {}}, "red-key-1234").status_code == 403
    assert ask(server, path, {}, "no-key").status_code == 401
