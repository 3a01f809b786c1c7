"""One server, several models: requests go by name, models come and go within the memory, and nothing is lost."""

from __future__ import annotations

import concurrent.futures
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from quire.errors import ModelError
from tests.server.engines import scripted_config
from tests.server.pools import NumberedEngine, RunningPool
from tests.server.servers import RunningServer
from tests.server.test_metrics import documented
from tests.server.test_metrics import families as families_of

HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def pool() -> Iterator[RunningPool]:
    """Shared by tests that leave every model usable."""
    with RunningPool() as running:
        yield running


def post(server: RunningServer, path: str, **body: Any) -> httpx.Response:
    return httpx.post(server.url + path, json=body, headers=body.pop("headers", None))


def complete(server: RunningServer, model: str, prompt: str = "hello", **fields: Any) -> str:
    answer = post(server, "/v1/completions", model=model, prompt=prompt, max_tokens=8, **fields)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == model
    return str(answer.json()["choices"][0]["text"])


def alone(number: int) -> RunningServer:
    """A server of one of the models."""
    return RunningServer(NumberedEngine(scripted_config(served_model_name="abc"[number - 1]), number=number))


BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hello", "max_tokens": 4},
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 4},
    "/v1/chat/completions/batch": {"messages": [HELLO, HELLO], "max_tokens": 4},
    "/v1/responses": {"input": "hello", "max_output_tokens": 4},
    "/v1/responses/input_tokens": {"input": "hello"},
    "/v1/messages": {"messages": HELLO, "max_tokens": 4},
    "/v1/messages/count_tokens": {"messages": HELLO},
    "/invocations": {"prompt": "hello", "max_tokens": 4},
    "/tokenize": {"prompt": "hello"},
    "/detokenize": {"tokens": [100, 200]},
}
OWN = ("id", "created", "created_at", "completed_at", "item_id", "system_fingerprint")


def without_ids(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: without_ids(one) for name, one in value.items() if name not in OWN}
    return [without_ids(one) for one in value] if isinstance(value, list) else value


@pytest.mark.parametrize("path", BODIES)
def test_every_api_goes_to_the_model_that_is_named(pool: RunningPool, path: str):
    with alone(2) as single:
        expected = post(single, path, model="b", **BODIES[path])
    got = post(pool, path, model="b", **BODIES[path])
    assert expected.status_code == got.status_code == 200, got.text
    assert without_ids(got.json()) == without_ids(expected.json())


def test_a_model_answers_to_all_its_names_and_the_first_model_where_none_is_given(pool: RunningPool):
    assert complete(pool, "bee") == complete(pool, "b") != complete(pool, "a")
    answer = post(pool, "/v1/completions", prompt="hello", max_tokens=8).json()
    assert answer["model"] == "a" and answer["choices"][0]["text"] == complete(pool, "a")


def test_an_unknown_name_is_answered_with_what_is_served(pool: RunningPool):
    answer = post(pool, "/v1/chat/completions", model="d", messages=HELLO)
    assert answer.status_code == 404 and answer.json()["error"]["param"] == "model"
    assert "this server has a, b, bee, c" in answer.json()["error"]["message"]
    assert httpx.get(f"{pool.url}/v1/models/d").status_code == 404


@pytest.mark.parametrize(
    ("content", "says"), [(b"{", "not a JSON object"), (b"[]", "not a JSON object"), (b'{"model": 7}', "not a string")]
)
def test_a_body_that_names_no_model_is_refused(pool: RunningPool, content: bytes, says: str):
    answer = httpx.post(f"{pool.url}/v1/completions", content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 400 and says in answer.json()["error"]["message"]


def test_what_is_wrong_with_a_request_is_found_by_its_model(pool: RunningPool):
    answer = post(pool, "/v1/completions", model="a", prompt="hello", max_tokens=-1)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "max_tokens"


def test_the_list_of_models_says_which_are_in_memory():
    with RunningPool(pinned="a") as server:
        complete(server, "b")
        cards = {card["id"]: card for card in httpx.get(f"{server.url}/v1/models").json()["data"]}
        assert list(cards) == ["a", "b", "bee", "c"]
        assert [cards[name]["state"] for name in cards] == ["ready", "ready", "ready", "unloaded"]
        assert [cards[name]["status"]["value"] for name in cards] == ["loaded", "loaded", "loaded", "unloaded"]
        assert cards["a"]["pinned"] and cards["a"]["root"] == "models/a" and cards["a"]["predicted_wait_s"] == 0
        assert cards["c"]["predicted_wait_s"] > 0
        assert httpx.get(f"{server.url}/models").json()["data"][0]["id"] == "a"
        assert httpx.get(f"{server.url}/v1/models/bee").json()["state"] == "ready"


def test_the_least_recently_used_model_is_unloaded_for_another_and_pinned_ones_stay():
    with RunningPool(pinned="a") as server:
        for name in "bcb":
            complete(server, name)
        assert server.state_of("a") == "ready" and server.state_of("c") != "ready"
        assert [len(server.loaders[name].engines) for name in "abc"] == [1, 2, 1]


def test_two_hundred_requests_in_random_order_are_answered_as_by_each_model_alone():
    rng = random.Random(7)
    asked = [(rng.choice("abc"), f"prompt {index}") for index in range(200)]
    expected = {}
    for number, name in enumerate("abc", 1):
        with alone(number) as single:
            expected |= {(name, prompt): complete(single, name, prompt) for own, prompt in asked if own == name}
    with RunningPool(switching={"busy_turn_s": 0.05}) as server:
        with concurrent.futures.ThreadPoolExecutor(16) as threads:
            answers = list(threads.map(lambda one: complete(server, *one), asked))
        assert answers == [expected[one] for one in asked]
        assert sum(len(loader.engines) for loader in server.loaders.values()) > 3


def test_a_request_waits_for_its_model_and_is_told_how_long():
    with RunningPool() as server:
        server.loaders["c"].gate.clear()
        with concurrent.futures.ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(post, server, "/v1/completions", model="c", prompt="x", max_tokens=2)
            server.wait_until(lambda: server.state_of("c") == "loading")
            card = httpx.get(f"{server.url}/v1/models/c").json()
            assert card["state"] == "loading" and card["requests_waiting"] == 1 and card["predicted_wait_s"] > 0
            server.loaders["c"].gate.set()
            answer = waiting.result()
        assert answer.status_code == 200 and float(answer.headers["x-quire-model-wait"]) > 0
        assert "x-quire-model-wait" not in post(server, "/v1/completions", model="c", prompt="x").headers


def test_a_request_with_a_queue_timeout_is_told_when_to_come_again():
    with RunningPool() as server:
        server.loaders["c"].gate.clear()
        answer = post(server, "/v1/completions", model="c", prompt="x", queue_timeout=0.05)
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "queue_timeout"
        assert int(answer.headers["retry-after"]) >= 1
        server.loaders["c"].gate.set()
        server.wait_until(lambda: server.state_of("c") == "ready")  # for the next one


def test_no_more_requests_wait_for_a_model_than_may_wait():
    with RunningPool(max_num_queued_reqs=1) as server:
        server.loaders["c"].gate.clear()
        with concurrent.futures.ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(complete, server, "c")
            server.wait_until(lambda: len(server.pool.schedule.slots["c"].waiting) == 1)
            refused = post(server, "/v1/completions", model="c", prompt="x")
            assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
            server.loaders["c"].gate.set()
            assert waiting.result()


def test_a_load_that_fails_is_told_to_those_that_wait_for_it_and_to_nobody_else():
    with RunningPool() as server:
        server.loaders["b"].error = ModelError("the weights are not there", hint="put them in place")
        with concurrent.futures.ThreadPoolExecutor(8) as threads:
            failing = [threads.submit(post, server, "/v1/completions", model="b", prompt="x") for _ in range(4)]
            others = [threads.submit(complete, server, name) for name in "acac"]
            refused = [one.result() for one in failing]
            assert all(one.result() for one in others)
        assert {one.status_code for one in refused} == {503}
        error = refused[0].json()["error"]
        assert (
            error["code"] == "model_load_failed" and "the weights are not there (put them in place)" in error["message"]
        )
        assert int(refused[0].headers["retry-after"]) >= 1
        card = httpx.get(f"{server.url}/v1/models/b").json()
        assert card["state"] == "failed" and card["status"] == {"value": "unloaded", "failed": True}
        server.loaders["b"].error = None
        server.pool.schedule.slots["b"].retry_s = 0.0
        assert complete(server, "b")


def test_a_model_whose_engine_has_stopped_is_loaded_again_and_the_others_go_on():
    with RunningPool() as server:
        complete(server, "a")
        complete(server, "b")
        server.loaders["a"].engines[0].errored = True
        server.wait_until(lambda: server.state_of("a") == "failed")
        assert complete(server, "b") and httpx.get(f"{server.url}/health").status_code == 200
        server.pool.schedule.slots["a"].retry_s = 0.0
        assert complete(server, "a") and len(server.loaders["a"].engines) == 2


def test_a_model_with_a_stream_or_a_background_response_is_not_unloaded_before_their_end():
    with RunningPool(switching={"busy_turn_s": 0.0}, sse_keep_alive_interval=1) as server:
        complete(server, "a")
        complete(server, "b")
        for name in "ab":
            server.loaders[name].engines[0].holds = True
        background = post(server, "/v1/responses", model="a", input="x", background=True, max_output_tokens=4).json()
        body = {"model": "b", "prompt": "x", "stream": True, "max_tokens": 4}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as stream:
            with concurrent.futures.ThreadPoolExecutor(1) as threads:
                waiting = threads.submit(complete, server, "c")
                server.wait_until(lambda: "draining" in (server.state_of("a"), server.state_of("b")))
                assert not server.loaders["c"].engines
                for name in "ab":
                    server.loaders[name].engines[0].holds = False
                assert waiting.result()
            assert list(stream.iter_lines())[-2] == "data: [DONE]"
        done = httpx.get(f"{server.url}/v1/responses/{background['id']}").json()
        assert done["status"] in ("completed", "incomplete") and done["model"] == "a"


def test_a_client_that_goes_away_waits_no_longer():
    with RunningPool() as server:
        server.loaders["c"].gate.clear()
        slot = server.pool.schedule.slots["c"]
        body = {"model": "c", "prompt": "x"}
        server.give_up("/v1/completions", body, lambda: len(slot.waiting) == 1)
        server.wait_until(lambda: not slot.waiting)
        server.loaders["c"].gate.set()


def test_a_server_that_ends_refuses_what_waits():
    with RunningPool(shutdown_timeout=1) as server:
        server.loaders["c"].gate.clear()
        with concurrent.futures.ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(post, server, "/v1/completions", model="c", prompt="x")
            server.wait_until(lambda: server.state_of("c") == "loading")
            server.server.begin_drain()
            assert waiting.result().status_code == 503
        server.loaders["c"].gate.set()


def test_operators_load_and_unload_models():
    with RunningPool(pinned="a") as server:
        assert post(server, "/models/load", model="b").json()["success"]
        assert server.state_of("b") == "ready"
        assert post(server, "/models/unload", model="bee").json()["success"]
        server.wait_until(lambda: server.state_of("b") == "unloaded")
        assert post(server, "/models/unload", model="b").json()["success"]
        pinned = post(server, "/models/unload", model="a")
        assert pinned.status_code == 400 and "pinned" in pinned.json()["error"]["message"]
        assert post(server, "/models/load", model="d").status_code == 404
        assert post(server, "/models/load", name="b").json()["error"]["param"] == "model"


def test_keys_protect_the_models_and_only_operators_load_and_unload(tmp_path: Path):
    keys = tmp_path / "keys"
    keys.write_text("tenants:\n  red: {keys: [red-key-1], operator: true}\n  blue: {keys: [blue-key]}\n")
    keys.chmod(0o600)
    with RunningPool(api_key_file=str(keys)) as server:
        for path in ("/models/load", "/models/unload", "/v1/completions"):
            assert post(server, path, model="b", prompt="x").status_code == 401
        blue, red = {"authorization": "Bearer blue-key"}, {"authorization": "Bearer red-key-1"}
        assert post(server, "/models/load", model="b", headers=blue).status_code == 403
        assert post(server, "/models/load", model="b", headers=red).status_code == 200
        assert post(server, "/v1/completions", model="b", prompt="x", headers=blue).status_code == 200
        assert httpx.get(f"{server.url}/server_info", headers=blue).status_code == 403
        assert set(httpx.get(f"{server.url}/server_info", headers=red).json()["models"]) == {"a", "b", "c"}
        assert httpx.post(f"{server.url}/reset_prefix_cache", headers=red).json() == {"success": True}
        external = httpx.post(f"{server.url}/reset_prefix_cache?reset_external=true", headers=red)
        assert external.status_code == 400 and external.json()["error"]["param"] == "reset_external"


def test_metrics_have_the_name_of_the_model_as_a_label():
    with RunningPool() as server:
        for name in "abc":
            complete(server, name)
        text = httpx.get(f"{server.url}/metrics").text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    names = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(names) == len(set(names))
    of_models = {name for name in documented() if name.startswith(("quire:model_", "quire:models_"))}
    shown = {name for name, _, _ in families_of(text) if name.startswith(("quire:model_", "quire:models_"))}
    assert len(of_models) > 5 and shown == of_models
    success = [one for one in families["vllm:request_success"].samples if one.name.endswith("_total") and one.value]
    assert {one.labels["model_name"] for one in success} == {"a", "b", "c"}
    loads = {one.labels["model_name"]: one.value for one in families["quire:model_loads"].samples if one.value == 1}
    assert set(loads) == {"a", "b", "c"}
    ready = [one for one in families["quire:model_state"].samples if one.value and one.labels["state"] == "ready"]
    assert {one.labels["model_name"] for one in ready} == {"b", "c"}
    assert families["quire:models_memory_budget_bytes"].samples[0].value == 2 << 30
    starts = {one.labels.get("model_name") for one in families["quire:startup_seconds"].samples}
    assert starts == {None, "a", "b", "c"}  # the server's own has no model
