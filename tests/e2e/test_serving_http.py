"""The whole server with an engine core apart: what one request does to itself and to its neighbours, told in HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from quire.config.build import build_config
from quire.engine.async_llm import AsyncLLM
from tests.e2e.serving import SETTINGS
from tests.e2e.tiny_model import write_tiny_model
from tests.robustness.http_streams import DONE, Exchange, answer_of, ask
from tests.robustness.soak import metric
from tests.server.servers import RunningServer


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    root = tmp_path_factory.mktemp("http")
    model = str(write_tiny_model(root / "model", root / "marker"))
    settings = {**SETTINGS, "num_gpu_blocks_override": None, "kv_cache_memory_bytes": 1 << 20}
    engine = AsyncLLM.from_config(
        build_config(model=model, served_model_name="tiny", **settings),
        logits_processors=["tests.e2e.evil_processor:Evil"],
    )
    with RunningServer(engine) as server:
        yield server
    engine.shutdown()


def request(i: int, **fields: Any) -> dict[str, Any]:
    """A stream of its own, greedy or seeded, some with two answers or logprobs."""
    body = {"prompt": [i + 1, 2, 3], "stream": True, "max_tokens": 40, "ignore_eos": True, "temperature": 0}
    body |= {"temperature": 1, "seed": i, "n": 1 + i % 4 // 3} if i % 2 else {"logprobs": 2}
    return {**body, **fields}


async def ask_all(server: RunningServer, bodies: list[dict[str, Any]]) -> list[Exchange]:
    return await asyncio.gather(*(ask(server.port, "/v1/completions", body) for body in bodies))


def test_the_request_whose_step_raises_gets_a_typed_error_and_its_neighbours_what_they_always_get(
    server: RunningServer,
):
    neighbours = [request(i) for i in range(7)]
    undisturbed = [answer_of(one) for one in asyncio.run(ask_all(server, neighbours))]
    faulty = request(7, n=1, vllm_xargs={"raise_at": 5})
    failed, *others = asyncio.run(ask_all(server, [faulty, *neighbours]))
    assert [answer_of(one) for one in others] == undisturbed
    assert failed.status == 200 and failed.is_complete and failed.events[-1] == DONE
    error = json.loads(failed.events[-2])["error"]
    assert (error["type"], error["code"]) == ("InternalServerError", 500)
    assert "other requests are not affected" in error["message"] and "token 5" not in error["message"]
    whole = asyncio.run(ask(server.port, "/v1/completions", {**faulty, "stream": False}))
    assert whole.status == 500 and json.loads(whole.body)["error"]["type"] == "InternalServerError"
    assert server.engine.num_restarts == 0


def test_restarts_and_the_answers_that_went_on_are_counted_and_the_next_core_has_as_many_pages(server: RunningServer):
    bodies = [request(1, max_tokens=110), request(2, max_tokens=110), request(3, max_tokens=110, n=2)]
    supervisor = server.engine._supervisor

    async def disturb() -> tuple[list[Exchange], int]:
        streams = asyncio.ensure_future(ask_all(server, bodies))
        while not supervisor._live:
            await asyncio.sleep(0)
        os.kill(supervisor.core_pid, signal.SIGSTOP)
        await asyncio.sleep(0.2)  # what it has sent is taken in
        num_live = sum(live.is_sent for live in list(supervisor._live.values()))
        os.kill(supervisor.core_pid, signal.SIGKILL)
        return await streams, num_live

    undisturbed = [answer_of(one) for one in asyncio.run(ask_all(server, bodies))]
    before, num_blocks = counts(server), supervisor._core.wait_ready().num_blocks
    exchanges, num_live = asyncio.run(disturb())
    assert [answer_of(one) for one in exchanges] == undisturbed
    assert 1 <= num_live <= 4
    assert counts(server) == (before[0] + 1, before[1] + num_live)
    assert server.engine.config.cache.num_blocks == num_blocks, "the first core divided the memory"
    assert supervisor._core._config.cache.num_blocks == num_blocks == supervisor._core.wait_ready().num_blocks


def counts(server: RunningServer) -> tuple[float, float]:
    page = asyncio.run(ask(server.port, "/metrics")).body.decode()
    return metric(page, "quire:engine_restarts"), metric(page, "quire:resumed_streams")
