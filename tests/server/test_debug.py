"""What operators look at: the state of the engines, recent requests, settings, sizing; and who may."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import httpx
import msgspec
import pytest

from quire.core.cache_info import CacheMiss, MissReason
from quire.core.stats import EventKind, RequestEvent, RequestStateStats
from quire.errors import ValidationError
from quire.metrics.live_totals import Distribution
from quire.models.hub import resolve_model_path
from quire.scheduler.live_state import live_state
from quire.server.app import make_app
from quire.server.debug import feed as feed_module
from quire.server.debug import planning
from quire.server.debug.feed import INTERVAL_S, StateFeed
from quire.server.debug.planning import Planner, PlanRequest
from quire.server.debug.routes import MAX_VIEWERS
from quire.server.debug.state import DebugState
from quire.server.http.recent_requests import MAX_ENDED, RecentRequests, RequestTimeline
from quire.server.http.request_scope import RequestScope
from tests.server.engines import ScriptedEngine, scripted_config
from tests.server.servers import RunningServer, server_config
from tests.server.test_protocol import CHAT, HELLO, post
from tests.unit.scheduler.harness import make_request, make_scheduler
from tests.unit.scheduler.test_live_state import run_step

PATHS = ("/debug/state", "/debug/requests", "/debug/config")


def engine_state() -> Any:
    """Of an engine with one request that runs and two that wait."""
    scheduler = make_scheduler(max_num_seqs=1)
    for handle in range(3):
        scheduler.add_request(make_request(handle, 9, max_tokens=20))
    return live_state(scheduler, run_step(scheduler).plan.blocked)


@pytest.fixture(scope="module")
def looked_at():
    engine = ScriptedEngine(states=[engine_state()])
    with RunningServer(engine) as server:
        yield server


def get(server: RunningServer, path: str, **options: Any) -> Any:
    answer = httpx.get(server.url + path, **options)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_the_state_has_the_documented_shape_and_the_engine_s_rows(looked_at):
    found = msgspec.convert(get(looked_at, "/debug/state"), DebugState, strict=True)
    (model,) = found.models
    assert model.names == ["leaf"] and not model.problem and model.speculation is None
    (engine,) = model.engines
    assert (engine.index, engine.num_running, engine.num_waiting) == (0, 1, 2)
    assert [one.id for one in engine.batch] == ["r0"] and [one.id for one in engine.queue] == ["r1", "r2"]
    assert found.server.rss_bytes > 0 and found.tenants[0].is_operator


def test_events_go_on_with_the_points_that_the_viewer_does_not_have(looked_at):
    looked_at.engine.step(num_new_tokens=3, num_running=1, num_scheduled_tokens=5)
    with httpx.stream(
        "GET", looked_at.url + "/debug/state?interval=0.5", headers={"accept": "text/event-stream"}
    ) as it:
        assert it.headers["content-type"].startswith("text/event-stream") and it.headers["cache-control"] == "no-store"
        states, times = [], []
        for line in it.iter_lines():
            if line.startswith("data: "):
                states.append(msgspec.json.decode(line[6:], type=DebugState))
                times += states[-1].models[0].series.time
            if len(states) == 3:
                break
    assert times == sorted(set(times)) and len(times) >= 2, "each point comes once"
    assert states[0].num_viewers == 1 and states[0].interval_s == INTERVAL_S
    looked_at.wait_until(lambda: get(looked_at, "/debug/state")["num_viewers"] == 0)


def test_viewers_that_come_at_once_are_no_more_than_allowed():
    app, statuses = make_app(ScriptedEngine(), server_config()), []
    head = {"type": "http", "method": "GET", "path": "/debug/state", "query_string": b"stream=1"}

    async def view() -> None:
        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                statuses.append(message["status"])
            await asyncio.sleep(0)

        async def receive() -> Any:
            await asyncio.sleep(0.05)
            return {"type": "http.disconnect"}

        await app({**head, "headers": [(b"host", b"127.0.0.1")]}, receive, send)

    async def all_at_once() -> None:
        await asyncio.gather(*(view() for _ in range(MAX_VIEWERS + 5)))

    asyncio.run(all_at_once())
    assert Counter(statuses) == {200: MAX_VIEWERS, 429: 5}


def test_a_server_that_drains_ends_the_streams_of_events():
    path = "/debug/state?stream=1&interval=0.5"
    with RunningServer(ScriptedEngine()) as server, httpx.stream("GET", server.url + path) as it:
        lines = it.iter_lines()
        assert next(lines) == "event: state"
        server.state.begin_drain()
        assert [line for line in lines if line.startswith("event: ")][-1] == "event: end"


@pytest.mark.parametrize(
    ("query", "field"),
    [("since=-1", "since"), ("since=x", "since"), ("stream=1&interval=0.1", "interval"), ("sinse=1", "sinse")],
)
def test_wrong_queries_are_refused_by_name(looked_at, query, field):
    answer = httpx.get(f"{looked_at.url}/debug/state?{query}")
    assert answer.status_code == 400 and answer.json()["error"]["param"] == field


def test_rates_and_quantiles_are_of_what_came_between_two_looks():
    before = Distribution((0.1, 0.2, 0.4), (1, 0, 0, 0), 0.05)
    now = Distribution((0.1, 0.2, 0.4), (1, 2, 2, 0), 1.25)
    new = now.since(before)
    assert new.num_values == 4 and new.mean == pytest.approx(0.3)
    assert new.quantile(0.5) == pytest.approx(0.2) and new.quantile(0.75) == pytest.approx(0.3)
    assert before.since(before).quantile(0.5) is None and before.since(before).mean is None
    assert Distribution((0.1,), (0, 3), 9.0).quantile(0.9) == 0.1


def test_viewers_share_one_look_and_a_core_that_does_not_answer_is_asked_once(monkeypatch):
    monkeypatch.setattr(feed_module, "PATIENCE_S", 0.02)

    class SilentEngine(ScriptedEngine):
        asked = 0

        async def live_states(self):
            self.asked += 1
            await asyncio.Event().wait()

    engine = SilentEngine()
    with RunningServer(engine) as server:
        feed = StateFeed(lambda: [server.state], server.state.parts)

        async def look() -> None:
            many = await asyncio.gather(*(feed.state() for _ in range(5)))
            assert engine.asked == 1 and all("has not answered" in one.models[0].problem for one in many)
            feed._looked_s = 0.0
            assert (await feed.state()).models[0].engines == [] and engine.asked == 1
            for task in feed._asked.values():
                task.cancel()

        asyncio.run(look())


def test_recent_requests_have_phases_events_and_the_parts_of_prompts(looked_at):
    engine = looked_at.engine
    answer = post(looked_at, CHAT, {**HELLO, "max_tokens": 4}, headers={"x-request-id": "mine"})
    assert answer.status_code == 200
    assert post(looked_at, CHAT, {**HELLO, "temperature": -1}).status_code == 400
    found = msgspec.convert(get(looked_at, "/debug/requests?id=mine"), dict[str, list[RequestTimeline]])
    (one,) = found["requests"]
    assert (one.status, one.path, one.output_tokens, one.model) == (200, CHAT, 4, "leaf")
    assert one.id == answer.json()["id"] and sum(one.phases.values()) == pytest.approx(one.metrics["total_ms"])
    statuses = [one["status"] for one in get(looked_at, "/debug/requests")["requests"]]
    assert statuses[:2] == [400, 200] and len(get(looked_at, "/debug/requests?limit=1")["requests"]) == 1
    engine.holds = True
    looked_at.give_up(CHAT, HELLO, lambda: get(looked_at, "/debug/requests?limit=1")["requests"][0]["status"] == 0)
    engine.holds = False


def test_a_timeline_says_why_a_prefix_ended_and_keeps_no_body():
    known = RequestScope("r", 100.0)
    known.is_metered = True
    known.tenant = type("T", (), {"name": "red"})()  # type: ignore[assignment]
    miss = CacheMiss(MissReason.COLD, 5, MissReason.OTHER_TENANT)
    stats = RequestStateStats(queued_ts=100.5, events=[
        RequestEvent(7, EventKind.QUEUED, 100.5), RequestEvent(7, EventKind.SCHEDULED, 101.0, 4, miss)
    ])  # fmt: skip

    class Answer:
        model, answer_id, num_prompts, num_prompt_tokens, num_new_tokens = "m", "a", 1, 9, 0

        def receipt(self, now_s):
            from quire.server.http.timing_breakdown import make_receipt

            return make_receipt(100.0, stats, now_s)

    known.answer = Answer()  # type: ignore[assignment]
    recent = RecentRequests()
    recent.begin(known, "/v1/x")
    assert [one.status for one in recent.timelines()] == [0]
    recent.end(known, 200, 102.0)
    for _ in range(MAX_ENDED + 3):
        recent.begin(known, "/v1/x")
        recent.end(known, 200, 102.0)
    timelines = list(recent.timelines())
    assert len(timelines) == MAX_ENDED and timelines[0].tenant == "red"
    queued, scheduled = timelines[0].events
    assert (queued.kind, queued.at_ms, scheduled.handle, scheduled.cached_tokens) == ("queued", 500.0, 7, 4)
    assert (scheduled.miss, scheduled.miss_position) == ("other_tenant", 5), "operators see the whole reason"


def test_settings_are_shown_with_their_defaults_and_no_secret(tmp_path):
    keys = tmp_path / "keys.yaml"
    keys.write_text("tenants:\n  ops: {keys: [ops-key-1234], operator: true}\n  red: {keys: [red-key-1234]}\n")
    operator = {"authorization": "Bearer ops-key-1234"}
    connector = {"kv_connector": "RedisConnector", "kv_connector_extra_config": {"url": "redis://me:hidden1@host"}}
    resolved = replace(scripted_config(), reasons=(("block_size", "it suits the kernels"),))
    transfer = replace(resolved.transfer, kv_transfer_config=json.dumps({**connector, "kv_role": "kv_both"}))
    engine = ScriptedEngine(config=replace(resolved, transfer=transfer))
    with RunningServer(engine, api_key_file=str(keys), api_key=("very-secret-key",)) as server:
        config = get(server, "/debug/config", headers=operator)
        settings = {one["name"]: one for one in config["models"][0]["settings"]}
        assert settings["block_size"]["reason"] == "it suits the kernels"
        assert settings["kv_transfer_config"]["value"] == "(hidden)"
        assert settings["max_num_seqs"]["value"] == 64 and settings["max_num_seqs"]["doc"]
        assert "secret" not in json.dumps(config) and "H100" in config["plan_hardware"]
        assert "nvlink" in config["plan_interconnects"]
        resolved = get(server, "/server_info", headers=operator)["config"]
        assert "secret" not in json.dumps(resolved) and resolved["model"]["max_model_len"] == 2048
        for path in PATHS:
            for headers, status in (({}, 401), ({"authorization": "Bearer red-key-1234"}, 403), (operator, 200)):
                assert httpx.get(server.url + path, headers=headers).status_code == status, path
        red = {"authorization": "Bearer red-key-1234"}
        assert httpx.post(server.url + "/debug/plan", json={"hardware": "L4"}, headers=red).status_code == 403


def test_without_keys_only_loopback_addresses_show_the_state():
    with RunningServer(ScriptedEngine(), host="0.0.0.0") as server:
        for path in PATHS:
            answer = httpx.get(server.url + path)
            assert answer.status_code == 403 and "--api-key-file" in answer.json()["error"]["message"]


def test_one_flag_turns_all_of_it_off():
    with RunningServer(ScriptedEngine(), disable_debug=True) as server:
        for path in PATHS:
            assert httpx.get(server.url + path).status_code == 404
        assert post(server, CHAT, HELLO).status_code == 200 and server.state.parts.recent is None


def test_plans_are_simulated_in_a_process_of_their_own_one_at_a_time(monkeypatch):
    asked = PlanRequest(hardware="h100", rate=2.5, slo_ttft=500.0, find_replicas=True, max_num_seqs=4)
    arguments = planning._arguments(asked, "/models/it")
    assert arguments[:4] == ["--model", "/models/it", "--hardware", "h100"]
    assert "--find-replicas" in arguments and arguments[arguments.index("--slo-ttft") + 1] == "500.0"
    monkeypatch.setattr(planning, "NICENESS", 0)
    planner = Planner()

    async def run() -> None:
        small = PlanRequest(hardware="xeon", num_requests=10, output_tokens=4)
        with pytest.raises(ValidationError, match="H100"):
            await planner.plan(PlanRequest(hardware="abacus"), "x")
        with pytest.raises(ValidationError, match="unknown interconnect") as refused:
            await planner.plan(msgspec.structs.replace(small, stage_interconnect="/etc/passwd"), "x")
        assert refused.value.field == "stage_interconnect"
        found = await planner.plan(small, str(resolve_model_path("leaf", None, None)))
        assert found["figures"]["num_answered"] == 10 and found["basis"]["kind"] == "analytic"
        with pytest.raises(ValidationError, match=r"quire plan: .*no-such-directory"):
            await planner.plan(small, "/no-such-directory")
        planner._is_busy = True
        with pytest.raises(Exception, match="another simulation"):
            await planner.plan(asked, "x")

    asyncio.run(run())


@pytest.mark.parametrize("body", [{}, {"hardware": "L4", "rate": -1}, {"hardware": "L4", "what": 1}, {"hardware": 3}])
def test_wrong_plans_are_refused(looked_at, body):
    answer = httpx.post(looked_at.url + "/debug/plan", json=body)
    assert answer.status_code == 400 and "the body is not a plan" in answer.json()["error"]["message"]


def test_the_reference_page_names_every_field():
    text = (Path(__file__).parents[2] / "docs/reference/debug-endpoints.md").read_text()
    named, seen = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]+)`", text)))), set()
    due: list[Any] = [DebugState, RequestTimeline, PlanRequest]
    while due:
        kind = due.pop()
        seen.add(kind)
        for one in msgspec.structs.fields(kind):
            assert one.name in named, f"{kind.__name__}.{one.name}"
            due += [found for found in (one.type, *get_args(one.type)) if is_struct(found) and found not in seen]
    assert len(seen) >= 15


def is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)
