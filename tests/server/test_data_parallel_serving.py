"""`quire serve --data-parallel-size 2` as processes, one of which is killed; and the operators' route that scales."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass

import httpx

from quire import LLM, SamplingParams
from tests.models.families.cases import CASES
from tests.robustness import kill_matrix
from tests.robustness.server_process import ServerProcess, children_of
from tests.robustness.survive import undisturbed
from tests.server.engines import ScriptedEngine, scripted_config
from tests.server.servers import RunningServer
from tests.server.test_protocol import post
from tests.server.test_safety import bearer


def test_two_replicas_say_the_same_when_one_is_killed_and_metrics_have_both():
    """A small version of `make test-kill-matrix`."""
    tally = kill_matrix.Tally()
    with ServerProcess(*kill_matrix.BASE) as server:
        assert len(children_of(server.pid)) == 2
        usual = asyncio.run(undisturbed(server, kill_matrix.MOMENTS["structured"].requests(0)))
        asyncio.run(kill_matrix.play(server, "core", "structured", usual, tally, 1))
        page = httpx.get(f"http://127.0.0.1:{server.port}/metrics", timeout=60).text
        bad = httpx.post(
            f"http://127.0.0.1:{server.port}/v1/completions", json={"prompt": "a"}, timeout=60,
            headers={"X-data-parallel-rank": "7"},
        )  # fmt: skip
        assert "Traceback" not in server.log
    assert not tally.wrong and tally.moved > 0
    tokens = [line for line in page.splitlines() if line.startswith("vllm:generation_tokens_total{")]
    assert [('engine="0"' in line, 'engine="1"' in line) for line in tokens] == [(True, False), (False, True)]
    assert all(float(line.rsplit(" ", 1)[1]) > 0 for line in tokens)
    assert bad.status_code == 400 and bad.json()["error"]["param"] == "data_parallel_rank"


def test_llm_with_two_replicas_that_share_experts_generates_what_one_does_and_is_profiled_in_one_trace(tmp_path):
    prompts = [{"prompt_token_ids": [5 + 7 * i + j for j in range(2 + 5 * i)]} for i in range(6)]
    params = [SamplingParams(max_tokens=8, temperature=i % 2, seed=i, logprobs=1) for i in range(len(prompts))]

    def run(llm: LLM) -> list:
        try:
            llm.start_profile()
            found = [(one.outputs[0].token_ids, one.outputs[0].logprobs) for one in llm.generate(prompts, params)]
            llm.stop_profile()
            return found
        finally:
            llm.llm_engine.shutdown()

    CASES["mixtral"].write(tmp_path / "model")
    model = str(tmp_path / "model")
    settings = {"max_model_len": 256, "num_blocks": 64, "num_threads": 1}
    expected = run(LLM(model, profile=str(tmp_path / "one"), **settings))
    assert (
        run(LLM(model, data_parallel_size=2, enable_expert_parallel=True, profile=str(tmp_path / "two"), **settings))
        == expected
    )
    (file,) = (tmp_path / "two").iterdir()
    events = json.loads(file.read_text())["traceEvents"]
    assert {one["pid"] for one in events if one["name"] == "step: forward"} == {1, 1001}


@dataclass
class ScalingEngine(ScriptedEngine):
    """An engine whose replicas are numbers."""

    data_parallel_size: int = 2
    drain_timeout_s: float = 0.0

    @property
    def num_ready_replicas(self) -> int:
        return self.data_parallel_size

    async def scale(self, data_parallel_size: int, drain_timeout_s: float = 30.0) -> None:
        self.data_parallel_size, self.drain_timeout_s = data_parallel_size, drain_timeout_s

    async def restart_replicas(self, drain_timeout_s: float = 30.0) -> None:
        self.drain_timeout_s = drain_timeout_s


def test_an_operator_adds_and_removes_replicas(tmp_path):
    keys = tmp_path / "keys.yaml"
    keys.write_text("tenants:\n  ops: {keys: [ops-key-1234], operator: true}\n  red: {keys: [red-key-1234]}\n")
    engine = ScalingEngine(config=scripted_config(data_parallel_size=2))
    operator, path = bearer("ops-key-1234"), "/scale_elastic_ep"
    with RunningServer(engine, api_key_file=str(keys)) as server:
        body = {"new_data_parallel_size": 3, "drain_timeout": 7}
        assert post(server, path, body, headers=bearer("red-key-1234")).status_code == 403
        assert post(server, path, body, headers=operator).json()["data_parallel_size"] == 3
        assert engine.drain_timeout_s == 7.0
        sizes = [{"new_data_parallel_size": size} for size in (0, 1025)]
        for wrong in (*sizes, {}, {"new_data_parallel_size": 2, "drain_timeout": -1}):
            assert post(server, path, wrong, headers=operator).status_code == 400, wrong
        missing = post(server, path, {}, headers=operator).json()["error"]
        assert missing["param"] == "new_data_parallel_size" and "is missing" in missing["message"]
        assert post(server, "/restart_replicas", {}, headers=operator).json() == {"data_parallel_size": 3}
        assert engine.drain_timeout_s == 120.0
        info = httpx.get(server.url + "/server_info", headers=operator, verify=False).json()
        page = httpx.get(server.url + "/metrics", headers=operator, verify=False).text
    assert info["data_parallel_size"] == 3
    assert 'quire:replicas_ready{engine="0"} 3.0' in page
