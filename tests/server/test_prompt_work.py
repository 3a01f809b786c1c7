"""Work on prompts is charged before it begins, and tenants take turns at it."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import httpx
import pytest

from quire.server.http.places import Places
from quire.server.http.prompt_workers import FairLane
from tests.server.engines import ScriptedEngine, scripted_config
from tests.server.servers import RunningServer
from tests.server.test_protocol import CHAT, HELLO, error_of

KEYS = """
tenants:
  red: {keys: [key-of-red], requests_per_minute: 3, tokens_per_minute: 20000}
  blue: {keys: [key-of-blue]}
"""
COUNT = "/v1/messages/count_tokens"


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    path = tmp_path_factory.mktemp("keys") / "keys.yaml"
    path.write_text(KEYS)
    path.chmod(0o600)
    return str(path)


@pytest.fixture
def counted(keys):
    """A server with tenants, and the lengths of the texts that its tokenizer was given."""
    engine = ScriptedEngine()
    lengths: list[int] = []
    encode = engine.tokenizer.encode

    def counting(text: str, *arguments: Any, **options: Any) -> list[int]:
        lengths.append(len(text))
        return encode(text, *arguments, **options)

    engine.tokenizer.encode = counting
    with RunningServer(engine, api_key_file=keys) as server:
        yield server, lengths


def ask(server: RunningServer, path: str, body: dict[str, Any], key: str = "key-of-red") -> httpx.Response:
    return httpx.post(server.url + path, json=body, headers={"authorization": f"Bearer {key}"}, timeout=30)


WORK = {
    "tokenize": ("/tokenize", {"prompt": "one two"}),
    "detokenize": ("/detokenize", {"tokens": [5] * 10}),
    "count": (COUNT, {"messages": [{"role": "user", "content": "one two"}], "model": "leaf"}),
    "refused": ("/v1/completions", {"prompt": "a b " * 1500, "max_tokens": 1}),
}


@pytest.mark.parametrize("kind", WORK)
def test_work_that_makes_no_answer_is_charged_and_refused_before_it_begins(counted, kind):
    server, lengths = counted
    path, body = WORK[kind]
    expected = 400 if kind == "refused" else 200
    assert [ask(server, path, body).status_code for _ in range(3)] == [expected] * 3
    del lengths[:]
    refused = ask(server, path, body)
    assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1 and not lengths
    assert ask(server, path, body, "key-of-blue").status_code == expected


def test_tokens_are_guessed_before_they_are_counted_and_then_charged_exactly(counted):
    server, _ = counted
    red = server.state.tenants.of(b"Bearer key-of-red")
    count = ask(server, "/tokenize", {"prompt": "some words and more " * 100}).json()["count"]
    used = 20000 - int(dict(red.headers())[b"x-ratelimit-remaining-tokens"])
    assert count - 100 <= used <= count, "the bucket refills meanwhile"


def test_a_tenant_in_debt_is_refused_before_its_prompt_is_read(counted):
    server, lengths = counted
    assert ask(server, "/detokenize", {"tokens": [5] * 60_000}).status_code == 200
    for path, body in (WORK["tokenize"], WORK["count"], (CHAT, HELLO)):
        refused = ask(server, path, body)
        assert refused.status_code == 429 and refused.json()["error"]["type"] in ("tokens", "rate_limit_error")
    assert not lengths


def test_each_prompt_of_a_request_counts_as_a_request(counted):
    server, lengths = counted
    refused = ask(server, "/v1/completions", {"prompt": ["a"] * 4, "max_tokens": 1})
    assert refused.status_code == 400 and "4 prompts" in error_of(refused)["message"]
    assert error_of(refused)["param"] == "prompt" and not lengths
    taken = ask(server, "/v1/completions", {"prompt": ["a"] * 2, "max_tokens": 1})
    assert taken.status_code == 200 and taken.headers["x-ratelimit-remaining-requests"] == "1"
    late = ask(server, "/v1/completions", {"prompt": ["a"] * 2, "max_tokens": 1})
    assert late.status_code == 429 and "needs 2" in late.text


def test_many_prompts_are_refused_at_the_first_that_cannot_fit(counted):
    server, lengths = counted
    prompts = ["a", *["one two three " * 1000] * 250]
    refused = ask(server, "/v1/completions", {"prompt": prompts, "max_tokens": 1}, "key-of-blue")
    assert refused.status_code == 400 and error_of(refused)["param"] == "prompt"
    assert len(lengths) == 2 and server.engine.peak == 0


def test_tenants_take_turns_at_a_lane_however_much_one_of_them_sent():
    async def run() -> list[str]:
        lane = FairLane(1, "test")
        goes_on, order = threading.Event(), []
        first = asyncio.ensure_future(lane.run("red", goes_on.wait))
        await asyncio.sleep(0)
        jobs = [lane.run("red", lambda: order.append("red")) for _ in range(5)]
        jobs += [lane.run(name, lambda name=name: order.append(name)) for name in ("blue", "blue", "green")]
        tasks = [asyncio.ensure_future(job) for job in jobs]
        await asyncio.sleep(0)
        tasks[0].cancel()
        goes_on.set()
        await asyncio.gather(first, *tasks, return_exceptions=True)
        lane.close()
        return order

    order = asyncio.run(run())
    assert order == ["red", "blue", "green", "red", "blue", "red", "red"], "and what was given up is not run"


def test_one_tenant_does_not_get_every_thread_of_a_lane():
    async def run() -> None:
        lane = FairLane(2, "test")
        goes_on = threading.Event()
        held = [asyncio.ensure_future(lane.run("red", goes_on.wait)) for _ in range(4)]
        assert await asyncio.wait_for(lane.run("blue", lambda: "done"), 60) == "done"
        with pytest.raises(ZeroDivisionError):
            await lane.run("blue", lambda: 1 // 0)
        goes_on.set()
        assert await asyncio.gather(*held) == [True] * 4
        lane.close()

    asyncio.run(run())


def test_many_prompts_leave_rows_to_requests_that_come_later():
    engine = ScriptedEngine(config=scripted_config(max_num_seqs=8), holds=True)
    with RunningServer(engine) as server:
        answers: list[httpx.Response] = []
        body = {"prompt": [[7 + number] for number in range(40)], "max_tokens": 2, "temperature": 0}
        threads = [
            threading.Thread(target=lambda: answers.append(httpx.post(f"{server.url}/v1/completions", json=body)))
            for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        server.wait_until(lambda: server.state.admission.num_answers == 80 and len(engine.live) == 9)
        engine.holds = False
        for thread in threads:
            thread.join()
        assert engine.peak == 9, "seven, and the first of each"
        for answer in answers:
            choices = answer.json()["choices"]
            assert [choice["index"] for choice in choices] == list(range(40))
            assert all(choice["finish_reason"] == "length" for choice in choices)
        assert server.state.places.num_free == 7 and not server.state.running
        engine.fails_after = 1
        failed = httpx.post(f"{server.url}/v1/completions", json=body)
        assert failed.status_code == 500
        server.wait_until(lambda: not engine.live)
        assert server.state.places.num_free == 7 and server.state.admission.num_answers == 0


def test_places_are_given_in_turn_and_those_of_who_left_are_free():
    async def run() -> None:
        places = Places(8)
        assert places.try_take(places.needed(100)) and not places.try_take(1)
        waiting = [asyncio.ensure_future(places.take(count)) for count in (3, 5, 1)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        await asyncio.sleep(0)
        places.give_back(7)
        await asyncio.gather(*waiting[1:])
        assert not places.try_take(2), "six are taken"
        places.give_back(6)
        assert places.try_take(7)

    asyncio.run(run())
