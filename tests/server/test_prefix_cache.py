"""What a client and an operator are told of the prefix cache, and who may reset it."""

from __future__ import annotations

import re

import httpx
import pytest

from quire.config.build import build_config
from quire.engine.llm_engine import LLMEngine
from tests.server.engines import SteppedEngine
from tests.server.servers import RunningServer
from tests.server.test_protocol import CHAT, error_of, events, post
from tests.server.test_safety import bearer

COMPLETE = "/v1/completions"
KEYS = """\
tenants:
  ops: {keys: [ops-key-1234], operator: true}
  red: {keys: [red-key-1234]}
  blue: {keys: [blue-key-1234]}
"""
BLOCK_SIZE = 16
TEXT = list(range(300, 380))  # five pages, of which four can be used


@pytest.fixture(scope="module")
def engine():
    config = build_config(model="leaf", num_gpu_blocks_override=128, block_size=BLOCK_SIZE, packing_cache=False)
    stepped = SteppedEngine(LLMEngine.from_config(config))
    client = stepped._engine._client
    run_step = client.get_output

    def step_and_tell():
        outputs = run_step()
        for listener in stepped.step_listeners if outputs is not None else ():
            listener(outputs)
        return outputs

    client.get_output = step_and_tell
    yield stepped
    stepped.shutdown()


@pytest.fixture
def fresh(engine):
    """The engine, with nothing cached and nothing remembered."""
    index = engine._engine._client._core._scheduler._kv._pool.prefix_index
    index.clear()
    index.clear()  # of the last one, too
    return engine


def ask(server: RunningServer, prompt: list[int], key: str | None = None, **fields: object) -> dict[str, object]:
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "return_cache_info": True, **fields}
    answer = post(server, COMPLETE, body, headers=bearer(key) if key else {})
    assert answer.status_code == 200, answer.text
    info: dict[str, object] = answer.json()["prefix_cache"]
    return info


def misses(server: RunningServer, key: str | None = None) -> dict[str, int]:
    page = httpx.get(server.url + "/metrics", headers=bearer(key) if key else {}).text
    found = re.findall(r'^quire:prefix_cache_misses_total{.*reason="(\w+)"} (\S+)$', page, re.MULTILINE)
    return {reason: int(float(count)) for reason, count in found if float(count)}


def test_an_answer_tells_what_was_cached_and_why_not_more(fresh):
    with RunningServer(fresh) as server:
        assert ask(server, TEXT) == {"cached_tokens": 0, "reason": "cold", "position": 0}
        other = [*TEXT[:37], 7, *TEXT[38:]]
        assert ask(server, other) == {"cached_tokens": 32, "reason": "different_token", "position": 37}
        assert ask(server, TEXT[:70]) == {"cached_tokens": 64, "reason": None, "position": None}
        assert ask(server, TEXT[:5]) == {"cached_tokens": 0, "reason": "below_one_page", "position": 0}
        skipping = ask(server, TEXT, skip_reading_prefix_cache=True)
        assert skipping == {"cached_tokens": 0, "reason": "reading_skipped", "position": 0}
        both = ask(server, [TEXT[:70], TEXT[:5]])
        assert [info["cached_tokens"] for info in both] == [64, 0]
        counts = misses(server)
    assert counts == {"cold": 1, "different_token": 1, "below_one_page": 2, "reading_skipped": 1}


def test_a_stream_tells_it_in_its_last_event_and_nobody_is_told_unasked(fresh):
    body = {"messages": [{"role": "user", "content": "hello " * 20}], "max_tokens": 2}
    with RunningServer(fresh) as server:
        silent = post(server, CHAT, body).json()
        streamed = events(post(server, CHAT, {**body, "stream": True, "return_cache_info": True}))
        whole = post(server, CHAT, {**body, "return_cache_info": True}).json()
        quiet = events(post(server, CHAT, {**body, "stream": True}))
        turn = {"input": "hello " * 20, "max_output_tokens": 2, "return_cache_info": True}
        response = post(server, "/v1/responses", turn).json()
    assert "prefix_cache" in response
    assert "prefix_cache" not in silent and all("prefix_cache" not in event for event in quiet)
    cached = whole["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert streamed[-1]["prefix_cache"] == whole["prefix_cache"] and cached > 0
    assert whole["prefix_cache"]["cached_tokens"] == cached


def test_with_receipts_every_answer_tells_it(fresh):
    with RunningServer(fresh, enable_per_request_metrics=True) as server:
        answer = post(server, COMPLETE, {"prompt": TEXT, "max_tokens": 1}).json()
    assert answer["prefix_cache"]["reason"] == "cold" and answer["metrics"]["cached_tokens"] == 0


def test_what_other_tenants_hold_reads_like_cold_and_operators_are_told(fresh, tmp_path):
    (tmp_path / "keys").write_text(KEYS)
    with RunningServer(fresh, api_key_file=str(tmp_path / "keys")) as server:
        ask(server, TEXT, "red-key-1234")
        cold = {"cached_tokens": 0, "reason": "cold", "position": 0}
        assert ask(server, TEXT, "blue-key-1234") == cold
        assert ask(server, TEXT, "blue-key-1234", cache_salt="mine") == cold
        other = [*TEXT[:20], 7, *TEXT[21:]]
        assert ask(server, other, "red-key-1234")["position"] == 20
        before = {"cold": 1, "other_tenant": 1, "other_salt": 1, "different_token": 1}
        assert misses(server, "ops-key-1234") == before
        assert httpx.get(server.url + "/metrics", headers=bearer("red-key-1234")).status_code == 403


def test_parties_that_share_a_namespace_are_told_no_more_than_the_time_tells(fresh, tmp_path):
    (tmp_path / "keys").write_text(KEYS)
    with RunningServer(fresh, api_key_file=str(tmp_path / "keys"), isolate_tenants=False) as server:
        ask(server, TEXT, "red-key-1234")
        other = [*TEXT[:37], 7, *TEXT[38:]]
        assert ask(server, other, "blue-key-1234") == {"cached_tokens": 32, "reason": "cold", "position": 32}


def test_a_request_that_is_not_to_be_stored_leaves_no_page(fresh):
    with RunningServer(fresh) as server:
        ask(server, TEXT, no_store=True, n=2, temperature=1, max_tokens=20)
        assert len(fresh._engine._client._core._scheduler._kv._pool.prefix_index) == 0
        assert ask(server, TEXT) == {"cached_tokens": 0, "reason": "no_store", "position": 0}
        assert ask(server, TEXT, no_store=True)["cached_tokens"] == 64, "it may read what others stored"


def test_the_cache_is_reset_by_operators_and_says_what_it_did(fresh, tmp_path):
    (tmp_path / "keys").write_text(KEYS)
    path = "/reset_prefix_cache"
    with RunningServer(fresh, api_key_file=str(tmp_path / "keys")) as server:
        ask(server, TEXT, "red-key-1234")
        refused = post(server, path, {}, headers=bearer("red-key-1234"))
        assert refused.status_code == 403 and "lacks operator rights" in error_of(refused)["message"]
        done = post(server, path + "?reset_running_requests=true", {}, headers=bearer("ops-key-1234"))
        assert done.json() == {"success": True}
        wanted = {"cached_tokens": 0, "reason": "cache_reset", "position": 0}
        assert ask(server, TEXT, "red-key-1234") == wanted
        for query, field in (("reset_running_requests=perhaps",) * 2, ("reset_external=true",) * 2):
            wrong = post(server, f"{path}?{query}", {}, headers=bearer("ops-key-1234"))
            assert wrong.status_code == 400 and error_of(wrong)["param"] == field.partition("=")[0]
        fresh.reset_prefix_cache, real = _never, fresh.reset_prefix_cache
        in_use = post(server, path, {}, headers=bearer("ops-key-1234")).json()
        fresh.reset_prefix_cache = real
        assert in_use["success"] is False and "reset_running_requests=true" in in_use["message"]


async def _never(reset_running_requests: bool = False) -> bool:
    return False
