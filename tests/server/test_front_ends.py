"""Two front-end processes on one port: limits as of one, responses found from both, one killed under load."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from tests.robustness.http_streams import Exchange, ask
from tests.robustness.server_process import ServerProcess, front_ends_of, wait_until

RED, BLUE, OPS = "red-key-123456", "blue-key-123456", "ops-key-123456"
ENDED = "vllm:e2e_request_latency_seconds_count"
KEYS = f"""
tenants:
  red: {{keys: [{RED}], requests_per_minute: 7}}
  blue: {{keys: [{BLUE}], max_concurrent: 4}}
  ops: {{keys: [{OPS}], operator: true}}
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    directory = tmp_path_factory.mktemp("keys")
    keys = directory / "keys.yaml"
    keys.write_text(KEYS)
    keys.chmod(0o600)
    flags = ("--api-key-file", str(keys), "--usage-ledger", str(directory / "usage.db"), "--max-model-len", "512")
    with ServerProcess("--api-server-count", "2", *flags) as running:
        yield running
        running.stop()
        assert not running.leftovers


def stream(seed: int, max_tokens: int = 400) -> dict[str, Any]:
    return {"model": "leaf", "prompt": "Once", "max_tokens": max_tokens, "ignore_eos": True, "stream": True,
            "seed": seed}  # fmt: skip


async def metric(server: ServerProcess, start: str) -> float:
    page = (await ask(server.port, "/metrics", key=OPS)).body.decode()
    return sum(float(line.rpartition(" ")[2]) for line in page.splitlines() if line.startswith(start))


def test_both_serve_the_same_bytes_and_each_counts_for_all(server):
    async def run() -> None:
        before = await metric(server, "vllm:generation_tokens_total")
        answers = await asyncio.gather(*(ask(server.port, "/v1/completions", stream(1, 32), key=OPS) for _ in range(4)))
        texts = {"".join(json.loads(event)["choices"][0]["text"] for event in one.events[:-1]) for one in answers}
        assert len(texts) == 1 and all(one.is_whole for one in answers)
        for _ in range(4):
            assert await metric(server, "vllm:generation_tokens_total") == before + 4 * 32
            assert await metric(server, 'vllm:request_success_total{engine="0",finished_reason="length"') >= 4
        for _ in range(2):
            shown = json.loads((await ask(server.port, "/debug/requests", key=OPS)).body)["requests"]
            assert sum(one["output_tokens"] == 32 for one in shown) == 4
            assert json.loads((await ask(server.port, "/debug/state", key=OPS)).body)["models"][0]["engines"]
        assert (await ask(server.port, "/health")).status == 200
        assert (await ask(server.port, "/reset_prefix_cache", {}, key=OPS)).status == 200

    asyncio.run(run())


def test_a_limit_holds_for_both_together(server):
    async def run() -> list[int]:
        body = {"model": "leaf", "prompt": "Once", "max_tokens": 2}
        answers = await asyncio.gather(*(ask(server.port, "/v1/completions", body, key=RED) for _ in range(24)))
        return [one.status for one in answers]

    statuses = asyncio.run(run())
    assert statuses.count(200) == 7 and statuses.count(429) == 17


def test_a_response_is_found_from_both_while_it_is_made_and_after(server):
    async def run() -> None:
        body = {"model": "leaf", "input": "Once", "max_output_tokens": 150, "background": True, "stream": True}
        made = Exchange()
        making = asyncio.create_task(ask(server.port, "/v1/responses", body, made, key=OPS))
        while (found := re.search(rb'"(resp_[^"]+)"', made.body)) is None:
            await asyncio.sleep(0.005)
        name = found[1].decode()
        streams = [ask(server.port, f"/v1/responses/{name}?stream=true", key=OPS) for _ in range(4)]
        for one in await asyncio.gather(*streams):
            assert one.body == (await making).body and one.is_complete
        looks = await asyncio.gather(*(ask(server.port, f"/v1/responses/{name}", key=OPS) for _ in range(4)))
        assert {json.loads(one.body)["status"] for one in looks} <= {"completed", "incomplete"}
        assert len({one.body for one in looks}) == 1
        follow = {"model": "leaf", "input": "And", "max_output_tokens": 4, "previous_response_id": name}
        turns = await asyncio.gather(*(ask(server.port, "/v1/responses", follow, key=OPS) for _ in range(2)))
        assert [one.status for one in turns] == [200, 200]
        assert (await ask(server.port, f"/v1/responses/{name}", key=BLUE)).status == 404

    asyncio.run(run())


def test_an_id_of_a_response_is_taken_at_both(server):
    async def run() -> list[int]:
        body = {"model": "leaf", "input": "Once", "max_output_tokens": 60, "request_id": "mine"}
        answers = await asyncio.gather(*(ask(server.port, "/v1/responses", body, key=OPS) for _ in range(6)))
        assert all(b"mine" in one.body for one in answers if one.status != 200)
        return [one.status for one in answers]

    assert sorted(asyncio.run(run())) == [200, 400, 400, 400, 400, 400]


def test_steps_are_paused_for_both(server):
    async def run() -> None:
        waiting = asyncio.create_task(ask(server.port, "/v1/completions", stream(3, 200), key=OPS))
        paused = await ask(server.port, "/pause?mode=keep&clear_cache=false", {}, key=OPS)
        assert (paused.status, paused.body) == (200, b'{"status":"paused"}')
        late = asyncio.create_task(ask(server.port, "/v1/completions", stream(4, 8), key=OPS))
        for _ in range(2):
            while (await ask(server.port, "/is_paused", key=OPS)).body != b'{"is_paused":true}':
                await asyncio.sleep(0.005)
        assert not late.done()
        assert (await ask(server.port, "/resume", {}, key=OPS)).body == b'{"status":"resumed"}'
        assert (await waiting).is_whole and (await late).is_whole
        assert (await ask(server.port, "/pause?mode=no", {}, key=OPS)).status == 400
        assert (await ask(server.port, "/pause", {}, key=BLUE)).status == 403

    asyncio.run(run())


async def used(server: ServerProcess) -> dict[str, int]:
    """Tokens that were generated, by tenant, in the ledger and as counted."""
    rows = json.loads((await ask(server.port, "/v1/usage", key=OPS)).body)["data"]
    total = dict.fromkeys(("red", "blue", "ops"), 0)
    for row in rows:
        total[row["tenant"]] += row["generated_tokens"]
    for tenant, count in total.items():
        assert await metric(server, f'quire:tenant_generated_tokens_total{{tenant="{tenant}"}}') == count
    return total


def test_what_was_used_is_counted_exactly_whoever_is_asked(server):
    async def run() -> None:
        before = await used(server)
        assert before["ops"] > before["red"] == 14
        body = {"model": "leaf", "prompt": "Once", "max_tokens": 16, "ignore_eos": True}
        await asyncio.gather(*(ask(server.port, "/v1/completions", body, key=OPS) for _ in range(6)))
        assert await used(server) == {**before, "ops": before["ops"] + 96}

    asyncio.run(run())


def test_one_that_is_killed_breaks_its_own_connections_alone_and_leaves_nothing_behind(server):
    async def run() -> None:
        before, num_ended = front_ends_of(server.pid), await metric(server, ENDED)
        exchanges = [Exchange() for _ in range(4)]
        asked = [
            asyncio.create_task(ask(server.port, "/v1/completions", stream(seed), one, key=BLUE))
            for seed, one in enumerate(exchanges)
        ]
        while not all(one.pieces for one in exchanges):
            await asyncio.sleep(0.005)
        assert (await ask(server.port, "/v1/completions", stream(9), key=BLUE)).status == 429
        short = [ask(server.port, "/v1/completions", stream(seed, 4), key=OPS) for seed in range(4)]
        assert all(one.is_whole for one in await asyncio.gather(*short))
        os.kill(before[0], signal.SIGKILL)
        await asyncio.gather(*asked)
        assert [one.is_whole for one in exchanges].count(True) == 2, "two streams of each"
        answers = await asyncio.gather(
            *(ask(server.port, "/v1/completions", stream(seed, 16), key=BLUE) for seed in range(4))
        )
        assert all(one.is_whole for one in answers), "none of the four places is lost"
        assert await metric(server, ENDED) == num_ended + 2 + 4 + 4, "it had counted what ended until its last moment"

    asyncio.run(run())
    wait_until(lambda: "serves again" in server.log, "the front end is replaced")
    assert len(front_ends_of(server.pid)) == 2
    for name, value in {"front_ends": 2, "front_ends_ready": 2, "front_end_restarts_total": 1}.items():
        assert asyncio.run(metric(server, f"quire:{name} ")) == value, name


def test_the_owner_leaves_nothing_behind_whoever_kills_it(server):
    children = front_ends_of(server.pid)
    os.kill(server.pid, signal.SIGKILL)
    server.wait()
    wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in children), "its front ends end")
    assert not server.leftovers


def test_limits_and_counts_are_exact_with_replicas_behind_both(tmp_path):
    keys = tmp_path / "keys.yaml"
    keys.write_text(KEYS)
    keys.chmod(0o600)
    flags = ("--api-key-file", str(keys), "--usage-ledger", str(tmp_path / "usage.db"), "--max-model-len", "512")

    async def run(server: ServerProcess) -> None:
        def ask_all(count: int, max_tokens: int, key: str) -> Any:
            return [ask(server.port, "/v1/completions", stream(n, max_tokens), key=key) for n in range(count)]

        asked = [*ask_all(24, 2, RED), *ask_all(12, 200, BLUE), *ask_all(6, 32, OPS)]
        statuses = [one.status for one in await asyncio.gather(*asked)]
        assert [statuses[:24].count(200), statuses[24:36].count(200), statuses[36:].count(200)] == [7, 4, 6]
        assert statuses.count(429) == 17 + 8
        for _ in range(4):  # whichever answers
            assert await used(server) == {"red": 7 * 2, "blue": 4 * 200, "ops": 6 * 32}
        by_replica = [await metric(server, f'vllm:generation_tokens_total{{engine="{index}"') for index in (0, 1)]
        assert sum(by_replica) == 7 * 2 + 4 * 200 + 6 * 32 and all(by_replica), "both had some"
        again = await asyncio.gather(*ask_all(4, 2, BLUE))
        assert [one.status for one in again] == [200] * 4, "its four places are free again"

    with ServerProcess("--api-server-count", "2", "--data-parallel-size", "2", *flags) as server:
        asyncio.run(run(server))
