"""Responses that are kept: turns that follow each other, who finds them, restarts, and work in the background."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from quire.config.build import build_config
from quire.engine.llm_engine import LLMEngine
from quire.errors import ConfigError
from quire.server.api.responses import background
from tests.server.engines import SteppedEngine, WritingEngine
from tests.server.servers import RunningServer
from tests.server.test_responses import ASKED, TOOLS, ask, kinds, prompt_of, stream
from tests.server.test_safety import bearer
from tests.structured.libraries import needs_libraries

KEYS = "red=red-key-1234\nblue=blue-key-1234\n"


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with RunningServer(WritingEngine()) as running:
        yield running


def test_a_turn_follows_another_as_if_all_had_been_sent(server):
    first = ask(server, "Hello Ada.", input="I am Ada.", instructions="Be kind.")
    second = ask(server, "Ada.", input="Who am I?", previous_response_id=first.id, instructions="Be kind.")
    third = ask(server, "No.", input="Sure?", previous_response_id=second.id)
    assert second.previous_response_id == first.id
    prompt = prompt_of(server)
    said = [prompt.index(text) for text in ("I am Ada.", "Hello Ada.", "Who am I?", "\nAda.", "Sure?")]
    assert said == sorted(said) and "Be kind." not in prompt
    ask(
        server, "No.",
        input=[
            {"role": "user", "content": "I am Ada."}, {"role": "assistant", "content": "Hello Ada."},
            {"role": "user", "content": "Who am I?"}, {"role": "assistant", "content": "Ada."},
            {"role": "user", "content": "Sure?"},
        ],
    )  # fmt: skip
    assert prompt_of(server) == prompt and third.status == "completed"


def test_a_stream_can_be_followed_once_its_last_event_was_read(server):
    events = stream(server, "Hello Ada.", input="I am Ada.")
    ask(server, "Ada.", input="Who am I?", previous_response_id=events[-1].response.id)
    assert "I am Ada." in prompt_of(server)


def test_a_kept_response_is_what_was_answered_until_it_is_deleted(server):
    whole = ask(server, "Hi")
    streamed = stream(server, "Hi")[-1].response
    with server.client() as client:
        for response in (whole, streamed):
            assert client.responses.retrieve(response.id) == response
            client.responses.delete(response.id)
            with pytest.raises(openai.NotFoundError) as caught:
                client.responses.retrieve(response.id)
            assert (caught.value.type, caught.value.param) == ("invalid_request_error", "response_id")
            with pytest.raises(openai.NotFoundError):
                client.responses.delete(response.id)
            with pytest.raises(openai.NotFoundError) as caught:
                ask(server, "x", previous_response_id=response.id)
            assert caught.value.param == "previous_response_id"


def test_a_turn_whose_first_turn_was_deleted_cannot_be_followed(server):
    first = ask(server, "a")
    second = ask(server, "b", previous_response_id=first.id)
    with server.client() as client:
        client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError, match=first.id):
        ask(server, "c", previous_response_id=second.id)


def test_what_is_not_to_be_stored_leaves_nothing(server):
    response = ask(server, "Hi", store=False)
    assert response.store is False
    with server.client() as client, pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)
    streamed = stream(server, "Hi", store=False)[-1].response
    with server.client() as client, pytest.raises(openai.NotFoundError):
        client.responses.retrieve(streamed.id)


def test_a_stream_whose_client_goes_away_is_not_kept(server):
    server.engine.interval_s = 0.01
    try:
        server.engine.write = lambda prompt, seed: "word " * 400
        with server.client() as client, client.responses.create(**{**ASKED, "stream": True}) as events:
            response_id = next(iter(events)).response.id
        server.wait_until(lambda: not server.engine.live)
    finally:
        server.engine.interval_s = 0.0
    with server.client() as client, pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response_id)


def test_input_items_come_in_pages(server):
    given = [{"role": "user", "content": f"Line {number}"} for number in range(5)]
    response = ask(server, "Hi", input=given)
    with server.client() as client:
        page = client.responses.input_items.list(response.id, order="asc", limit=2)
        texts = [item.content[0].text for item in page]
        assert texts == [f"Line {number}" for number in range(5)], "the client asks for page after page"
        assert page.data[0].id.startswith("msg_") and page.has_more
        latest = client.responses.input_items.list(response.id)
        assert [item.content[0].text for item in latest.data] == texts[::-1]
        for query in ({"limit": 0}, {"after": "nothing"}, {"order": "up"}):
            with pytest.raises(openai.BadRequestError):
                client.responses.input_items.list(response.id, **query)


def test_a_call_that_was_cut_short_does_not_end_the_conversation(server):
    tools = [{"type": "function", "name": "add", "parameters": {"type": "object"}}]
    cut = ask(server, '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b"', tools=tools, input="Add")
    assert cut.output[-1].type == "function_call"
    assert ask(server, "Fine.", tools=tools, input="Go on", previous_response_id=cut.id).output_text == "Fine."


def test_a_request_id_names_one_response_only(server):
    named = {"extra_body": {"request_id": "once"}}
    assert ask(server, "Hi", **named).id == "resp_once"
    with pytest.raises(openai.BadRequestError) as caught:
        ask(server, "Hi", **named)
    assert caught.value.param == "request_id"


def test_no_tenant_finds_the_response_of_another(tmp_path):
    file = tmp_path / "keys"
    file.write_text(KEYS)
    with RunningServer(WritingEngine(), api_key_file=str(file)) as server:
        red, blue = server.client(api_key="red-key-1234"), server.client(api_key="blue-key-1234")
        kept = red.responses.create(**ASKED)
        running = red.responses.create(**ASKED, background=True, stream=True)
        live_id = next(iter(running)).response.id
        path = f"{server.url}/v1/responses/"
        for response_id in (kept.id, live_id):
            for method, tail in (
                ("GET", ""),
                ("GET", "?stream=true"),
                ("DELETE", ""),
                ("POST", "/cancel"),
                ("GET", "/input_items"),
            ):
                answer = httpx.request(method, path + response_id + tail, headers=bearer("blue-key-1234"))
                assert answer.status_code == 404, (method, tail)
            with pytest.raises(openai.NotFoundError):
                blue.responses.create(**ASKED, previous_response_id=response_id)
        assert red.responses.retrieve(kept.id).output_text == kept.output_text
        assert httpx.get(path + kept.id).status_code == 401
        blue.responses.create(**ASKED, extra_body={"request_id": "same"})
        red.responses.create(**ASKED, extra_body={"request_id": "same"})


def test_limits_of_tenants_and_receipts_hold_as_for_chats(tmp_path):
    file = tmp_path / "keys.yaml"
    file.write_text(
        "tenants: {red: {keys: [red-key-1234], requests_per_minute: 3, tokens_per_minute: 9000, max_tokens: 50}}"
    )
    with RunningServer(WritingEngine(), api_key_file=str(file), enable_per_request_metrics=True) as server:
        client = server.client(api_key="red-key-1234")
        with pytest.raises(openai.BadRequestError) as refused:
            client.responses.create(**ASKED)
        assert refused.value.param == "max_output_tokens"
        asked = {**ASKED, "max_output_tokens": 5}
        whole = client.responses.create(**asked)
        streamed = list(client.responses.create(**asked, stream=True))[-1].response
        background = client.responses.create(**asked, background=True)
        for one in (whole, streamed):
            assert one.metrics["total_ms"] > 0 and "prefix_cache" in one.model_dump()
        with pytest.raises(openai.RateLimitError) as limited:
            client.responses.create(**asked, background=True)
        assert limited.value.code == "rate_limit_exceeded"
        server.wait_until(lambda: client.responses.retrieve(background.id).status == "completed")


def test_a_response_in_a_file_outlives_the_server(tmp_path):
    path = tmp_path / "responses.db"
    with RunningServer(WritingEngine(), response_store=str(path)) as server:
        first = ask(server, "Hello Ada.", input="I am Ada.")
        assert path.stat().st_mode & 0o777 == 0o600
    with RunningServer(WritingEngine(), response_store=str(path)) as server:
        with server.client() as client:
            assert client.responses.retrieve(first.id) == first
        second = ask(server, "Ada.", input="Who am I?", previous_response_id=first.id)
        assert "Hello Ada." in prompt_of(server) and second.status == "completed"
        with server.client() as client:
            client.responses.delete(first.id)
    with RunningServer(WritingEngine(), response_store=str(path)) as server:
        client = server.client()
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(first.id)
        client.close()


def test_a_file_that_cannot_be_used_is_named_before_anything_starts(tmp_path):
    (tmp_path / "other").write_text("no database, but longer than nothing")
    for name in ("other", "no/such/directory"):
        with pytest.raises(ConfigError, match="response_store"):
            RunningServer(WritingEngine(), response_store=str(tmp_path / name))


def test_a_server_without_a_store_says_so():
    with RunningServer(WritingEngine(), response_store="none") as server:
        response = ask(server, "Hi")
        assert response.store is False and not hasattr(response, "warnings")
        assert "store" in " ".join(ask(server, "Hi", store=True).warnings)
        for fields in ({"background": True}, {"previous_response_id": response.id}):
            with pytest.raises(openai.BadRequestError) as caught:
                ask(server, "Hi", **fields)
            assert caught.value.param == next(iter(fields))
        with server.client() as client, pytest.raises(openai.NotFoundError):
            client.responses.retrieve(response.id)


def held(server: RunningServer, **fields: Any) -> Any:
    """A response in the background that has to wait."""
    server.engine.holds = True
    return ask(server, " ".join(["One two three"] * 20), background=True, **fields)


def test_a_response_in_the_background_is_queued_then_running_then_complete(server):
    response = held(server)
    try:
        assert response.status == "queued" and response.background and response.output == [] and response.usage is None
        with server.client() as client:
            assert client.responses.retrieve(response.id).status == "queued"
            with pytest.raises(openai.BadRequestError) as caught:
                client.responses.create(**ASKED, previous_response_id=response.id)
            assert caught.value.param == "previous_response_id"
            server.engine.interval_s, server.engine.holds = 0.02, False
            server.wait_until(lambda: client.responses.retrieve(response.id).status == "in_progress")
            server.engine.interval_s = 0.0
            server.wait_until(lambda: client.responses.retrieve(response.id).status == "completed")
            done = client.responses.retrieve(response.id)
            assert done.output_text.startswith("One two three One") and done.usage.output_tokens > 0
            assert client.responses.cancel(response.id) == done, "what has ended stays as it is"
    finally:
        server.engine.holds, server.engine.interval_s = False, 0.0


def test_cancelling_ends_the_work_and_is_kept(server):
    response = held(server)
    try:
        with server.client() as client:
            server.wait_until(lambda: server.engine.live)
            assert client.responses.cancel(response.id).status == "cancelled"
            server.wait_until(lambda: not server.engine.live)
            assert client.responses.retrieve(response.id).status == "cancelled"
            client.responses.delete(held(server).id)
            server.wait_until(lambda: not server.engine.live)
            synchronous = ask_now(server)
            with pytest.raises(openai.BadRequestError) as caught:
                client.responses.cancel(synchronous.id)
            assert caught.value.type == "invalid_request_error"
    finally:
        server.engine.holds = False


def ask_now(server: RunningServer) -> Any:
    server.engine.holds = False
    return ask(server, "Hi")


def test_the_events_of_a_response_in_the_background_can_be_resumed(server):
    server.engine.interval_s = 0.01
    try:
        server.engine.write = lambda prompt, seed: "One two three four five six"
        with server.client() as client:
            events = iter(client.responses.create(**ASKED, background=True, stream=True))
            seen = [next(events) for _ in range(6)]
            client.close()
        response_id = seen[0].response.id
        with server.client() as client:
            rest = list(client.responses.retrieve(response_id, stream=True, starting_after=seen[-1].sequence_number))
            again = list(client.responses.retrieve(response_id, stream=True))
    finally:
        server.engine.interval_s = 0.0
    assert [event.sequence_number for event in [*seen, *rest]] == list(range(len(seen) + len(rest)))
    assert again == [*seen, *rest]
    assert kinds(again)[:3] == ["response.created", "response.queued", "response.in_progress"]
    assert again[-1].type == "response.completed" and again[-1].response.output_text == "One two three four five six"
    for other in (ask(server, "Hi"), ask(server, "Hi", background=True)):
        with server.client() as client, pytest.raises(openai.BadRequestError, match="background=true and stream=true"):
            list(client.responses.retrieve(other.id, stream=True))


def test_what_ran_when_the_server_ended_is_failed_afterwards(tmp_path):
    path = str(tmp_path / "responses.db")
    with RunningServer(WritingEngine(), response_store=path, shutdown_timeout=0) as server:
        response = held(server)
        assert response.status == "queued"
    with RunningServer(WritingEngine(), response_store=path) as server, server.client() as client:
        ended = client.responses.retrieve(response.id)
        assert ended.status == "failed" and ended.error.code == "server_error"
        with pytest.raises(openai.BadRequestError):
            ask(server, "x", previous_response_id=response.id)


def test_a_failure_in_the_background_is_told_by_the_response():
    with RunningServer(WritingEngine(fails_after=1)) as server, server.client() as client:
        response = ask(server, "One two three", background=True)
        server.wait_until(lambda: client.responses.retrieve(response.id).status == "failed")
        assert "failed inside the engine" in client.responses.retrieve(response.id).error.message


def test_events_of_ended_responses_are_kept_while_there_is_memory_for_them(monkeypatch):
    monkeypatch.setattr(background, "MAX_ENDED_BYTES", 8000)
    with RunningServer(WritingEngine()) as server, server.client() as client:
        first, second = (stream(server, "Hi", background=True)[-1].response for _ in range(2))
        assert list(client.responses.retrieve(second.id, stream=True))[-1].response == second
        with pytest.raises(openai.BadRequestError, match="are not stored"):
            list(client.responses.retrieve(first.id, stream=True))
        assert client.responses.retrieve(first.id) == first


@pytest.fixture(scope="module")
def leaf() -> Iterator[RunningServer]:
    config = build_config(model="leaf", num_gpu_blocks_override=256, block_size=16, packing_cache=False)
    stepped = SteppedEngine(LLMEngine.from_config(config))
    with RunningServer(stepped) as running:
        yield running
    stepped.shutdown()


def test_the_second_turn_finds_the_first_in_the_prefix_cache(leaf):
    asked: dict[str, Any] = {"model": "leaf", "temperature": 0, "max_output_tokens": 24}
    with leaf.client() as client:
        first = client.responses.create(**asked, input="What is 27 + 58? Say nothing but the sum, please.")
        second = client.responses.create(**asked, input="And 3 + 4?", previous_response_id=first.id)
    assert "85" in first.output_text and second.status in ("completed", "incomplete")
    before = first.usage.input_tokens // 16 * 16
    assert second.usage.input_tokens_details.cached_tokens >= before > 0


def test_a_schema_holds_for_the_embedded_model_too(leaf):
    schema = {
        "type": "object",
        "properties": {"sum": {"type": "integer"}},
        "required": ["sum"],
        "additionalProperties": False,
    }
    form = {"format": {"type": "json_schema", "name": "sum", "schema": schema, "strict": True}}
    with leaf.client() as client:
        response = client.responses.create(
            model="leaf", input="What is 2 + 3?", text=form, max_output_tokens=40, temperature=0
        )
    if response.status == "completed":
        assert isinstance(json.loads(response.output_text)["sum"], int)
    assert response.text.format.type == "json_schema"


@needs_libraries
@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
def test_a_call_that_is_forced_is_made_by_the_embedded_model_too(leaf, streams):
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "add"}]}
    named = {"type": "function", "name": "get_weather"}
    for choice, name in ((allowed, "add"), (named, "get_weather")):
        asked = {"model": "leaf", "input": "Hi", "tools": TOOLS, "tool_choice": choice, "seed": 3}
        extra = {"extra_body": {"seed": asked.pop("seed")}, "max_output_tokens": 200}
        with leaf.client() as client:
            if streams:
                response: Any = list(client.responses.create(**asked, **extra, stream=True))[-1].response
            else:
                response = client.responses.create(**asked, **extra)
        calls = [item for item in response.output if item.type == "function_call"]
        assert {call.name for call in calls} == {name} and response.tool_choice.to_dict() == choice
        if response.status == "completed":
            assert all(isinstance(json.loads(call.arguments), dict) for call in calls)
