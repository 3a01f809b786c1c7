"""Responses in the background: one for each id, deleted for good, and nothing of the work is left after the end."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from quire.server.api.responses.background import LiveResponse
from quire.server.api.responses.event_log import EndedLogs, EventLog
from quire.server.api.responses.history import Turn
from quire.server.api.responses.protocol import ResponsesRequest
from quire.server.api.responses.store import MemoryShelf, ShelfError
from quire.server.api.responses.writer import ResponseWriter
from quire.server.chat.running import Run
from quire.server.http.keys import ApiKeys
from tests.server.engines import WritingEngine
from tests.server.servers import RunningServer
from tests.server.test_responses import ASKED, ask, stream

WORK = (LiveResponse, Run, ResponseWriter, ResponsesRequest, Turn)
LONG = " ".join(["One two three"] * 20)


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with RunningServer(WritingEngine()) as running:
        yield running


def post_at_once(server: RunningServer, bodies: list[dict[str, Any]]) -> list[httpx.Response]:
    async def post_all() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            return await asyncio.gather(*(client.post("/v1/responses", json=body) for body in bodies))

    return asyncio.run(post_all())


def num_under_way(server: RunningServer) -> int:
    return int(httpx.get(f"{server.url}/load").json()["server_load"])


@pytest.mark.parametrize("fields", [{"background": True}, {"background": True, "stream": True}, {}], ids=str)
def test_of_requests_with_one_id_at_once_one_is_taken_and_deleted_for_good(server: RunningServer, fields):
    server.engine.write = lambda prompt, seed: LONG
    server.engine.holds = "background" in fields and "stream" not in fields
    body = {**ASKED, **fields, "request_id": f"same-{len(fields)}"}
    path = f"{server.url}/v1/responses/resp_{body['request_id']}"
    try:
        answers = post_at_once(server, [body] * 8)
        assert Counter(one.status_code for one in answers) == {200: 1, 400: 7}
        refused = [one.json()["error"] for one in answers if one.status_code == 400]
        assert {one["param"] for one in refused} == {"request_id"}
        if server.engine.holds:
            server.wait_until(lambda: len(server.engine.live) == 1)
            assert httpx.post(f"{path}/cancel").json()["status"] == "cancelled"
        server.wait_until(lambda: not server.engine.live and num_under_way(server) == 0)
        assert httpx.get(path).json()["status"] in ("cancelled", "completed")
        assert httpx.delete(path).json()["deleted"]
        assert httpx.get(path).status_code == 404
        assert post_at_once(server, [body])[0].status_code == 200, "the id is free again"
    finally:
        server.engine.holds = False


def test_a_response_that_is_deleted_while_it_runs_never_comes_back(server: RunningServer):
    server.engine.holds = True
    try:
        response = ask(server, LONG, background=True)

        async def delete_and_cancel() -> list[int]:
            path = f"{server.url}/v1/responses/{response.id}"
            async with httpx.AsyncClient() as client:
                calls = [client.delete(path), client.post(f"{path}/cancel"), client.delete(path)]
                return [one.status_code for one in await asyncio.gather(*calls)]

        codes = asyncio.run(delete_and_cancel())
        assert set(codes) <= {200, 404} and 200 in codes
    finally:
        server.engine.holds = False
    server.wait_until(lambda: not server.engine.live)
    assert httpx.get(f"{server.url}/v1/responses/{response.id}").status_code == 404
    assert httpx.get(f"{server.url}/v1/responses/{response.id}?stream=true").status_code == 404


def num_objects() -> Counter[str]:
    gc.collect()
    return Counter(type(one).__name__ for one in gc.get_objects() if type(one) in WORK)


def test_ended_responses_keep_their_events_and_nothing_of_the_work(server: RunningServer):
    ask(server, "Hi")
    server.wait_until(lambda: num_under_way(server) == 0)
    before = num_objects()
    ids = [stream(server, "Hi", background=True, input="word " * 500)[-1].response.id for _ in range(5)]
    ids += [ask(server, "Hi", background=True).id for _ in range(5)]
    server.wait_until(lambda: num_under_way(server) == 0)
    server.wait_until(lambda: not num_objects() - before)
    with server.client() as client:
        assert all(len(list(client.responses.retrieve(one, stream=True))) > 5 for one in ids[:5])
        server.wait_until(lambda: {client.responses.retrieve(one).status for one in ids} == {"completed"})


def log(num_bytes: int) -> EventLog:
    made = EventLog()
    made.note(b"x" * num_bytes)
    return made


def test_the_events_of_one_tenant_push_out_its_own_and_not_those_of_others():
    logs = EndedLogs(10_000)
    logs.put(("bob", "first"), log(2000))
    for number in range(50):
        logs.put(("alice", str(number)), log(2000))
    assert logs.get(("bob", "first")) is not None
    kept = [number for number in range(50) if logs.get(("alice", str(number))) is not None]
    assert kept == [47, 48, 49], "the last ones, as far as there is room beside bob's"
    logs.forget(("bob", "first"))
    logs.put(("alice", "huge"), log(20_000))
    assert logs.get(("alice", "huge")) is None
    logs.put(("alice", "again"), log(9000))
    assert logs.get(("alice", "again")) is not None, "what was pushed out is no longer counted"


def test_many_small_events_are_weighed_with_what_they_take():
    made = EventLog()
    for _ in range(1000):
        made.note(b"")
    assert made.num_bytes >= 1000 * 41, "an empty bytes object and its place in the list"


def test_a_store_that_fails_ends_responses_all_the_same_and_says_so(server: RunningServer, monkeypatch):
    put = MemoryShelf.put

    def put_unless_done(self: MemoryShelf, key: Any, record: bytes, now_s: float) -> None:
        if b'"completed_at":null' not in record:
            raise ShelfError("the disk is full")
        put(self, key, record, now_s)

    monkeypatch.setattr(MemoryShelf, "put", put_unless_done)
    events = stream(server, "Hi", background=True)
    assert events[-1].type == "response.completed", "who follows it has the answer"
    with server.client() as client:
        server.wait_until(lambda: num_under_way(server) == 0)
        told = client.responses.retrieve(events[-1].response.id)
        assert (told.status, told.error.message) == ("failed", "the response was completed but could not be stored")
        assert ask(server, "Hi").output_text == "Hi"


def test_a_store_that_cannot_be_used_is_503_and_starts_nothing(server: RunningServer, monkeypatch):
    def fail(*_: Any) -> Any:
        raise ShelfError("it is damaged")

    kept = ask(server, "Hi")
    for name in ("get", "put", "delete"):
        monkeypatch.setattr(MemoryShelf, name, fail)
    url = f"{server.url}/v1/responses"
    body = {**ASKED, "background": True}
    answers = [
        httpx.get(f"{url}/{kept.id}"), httpx.get(f"{url}/{kept.id}?stream=true"), httpx.delete(f"{url}/{kept.id}"),
        httpx.get(f"{url}/{kept.id}/input_items"), httpx.post(f"{url}/{kept.id}/cancel"), httpx.post(url, json=body),
        httpx.post(url, json={**ASKED, "previous_response_id": kept.id}),
        httpx.post(url, json={**ASKED, "request_id": "own"}),
    ]  # fmt: skip
    assert [one.status_code for one in answers] == [503] * 8
    assert {one.json()["error"]["message"].partition(" cannot")[0] for one in answers} == {"the response store"}
    assert all(one.headers["retry-after"] == "5" for one in answers)
    assert httpx.post(url, json=ASKED).status_code == 200, "an answer that cannot be kept is given all the same"
    server.wait_until(lambda: not server.engine.live and num_under_way(server) == 0)


def test_what_a_removed_key_has_started_goes_on_to_its_end(tmp_path):
    (tmp_path / "keys").write_text("red=red-key-1234\nblue=blue-key-1234\n")
    with RunningServer(WritingEngine(), api_key_file=str(tmp_path / "keys")) as server:
        server.engine.write = lambda prompt, seed: LONG
        server.engine.holds = True
        red = {"authorization": "Bearer red-key-1234"}
        url = f"{server.url}/v1/responses"
        background = httpx.post(url, json={**ASKED, "background": True}, headers=red).json()["id"]
        with httpx.stream("POST", url, json={**ASKED, "background": True, "stream": True}, headers=red) as answer:
            lines = answer.iter_lines()
            assert next(lines) == "event: response.created"
            server.state.tenants.replace(ApiKeys({"blue-key-1234": "blue"}))
            assert httpx.get(f"{url}/{background}", headers=red).status_code == 401
            assert httpx.post(url, json=ASKED, headers=red).status_code == 401
            server.engine.holds = False
            assert "event: response.completed" in list(lines)
        server.wait_until(lambda: not server.engine.live)
        server.state.tenants.replace(ApiKeys({"red-key-5678": "red"}))
        again = {"authorization": "Bearer red-key-5678"}
        server.wait_until(lambda: httpx.get(f"{url}/{background}", headers=again).json()["status"] == "completed")
        assert httpx.get(f"{server.url}/load", headers=again).json()["server_load"] == 0
