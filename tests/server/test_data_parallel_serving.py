"""`quire serve --data-parallel-size 2` as processes: the same bytes as one core, also when a replica is killed."""

from __future__ import annotations

import asyncio
import json
import os
import signal

import httpx

from quire import LLM, SamplingParams
from tests.robustness.http_streams import answer_of, ask
from tests.robustness.server_process import ServerProcess, children_of

BODY = {"model": "leaf", "max_tokens": 24, "stream": True, "ignore_eos": True, "logprobs": 2}
KEYS = """\
tenants:
  default: {keys: [operator-key-1]}
  red: {keys: [red-key-1234], weight: 2.0}
"""


def requests() -> list[dict]:
    return [
        {**BODY, "prompt": f"Number {i}: " + "Once upon a time. " * (i % 3), "temperature": i % 2, "seed": i}
        for i in range(8)
    ]


def test_two_replicas_say_what_one_says_and_one_that_is_killed_loses_nothing(tmp_path):
    keys = tmp_path / "keys.yaml"
    keys.write_text(KEYS)
    headers = {"Authorization": "Bearer operator-key-1"}
    flags = ("--api-key-file", str(keys), "--disable-access-log", "--shutdown-timeout", "5")

    async def stream(server: ServerProcess, kill: bool) -> list[object]:
        streams = [
            asyncio.ensure_future(ask(server.port, "/v1/completions", body, key="operator-key-1"))
            for body in requests()
        ]
        if kill:
            await asyncio.sleep(0.3)
            os.kill(children_of(server.pid)[-1], signal.SIGKILL)
        return [answer_of(await one) for one in streams]

    with ServerProcess(*flags, "--data-parallel-size", "2", "--num-threads", "1") as server:
        url = f"http://127.0.0.1:{server.port}"
        assert len(children_of(server.pid)) == 2
        calm = asyncio.run(stream(server, False))
        pages = httpx.get(f"{url}/metrics", headers=headers, timeout=60).text
        for engine in ("0", "1"):
            (line,) = [
                one
                for one in pages.splitlines()
                if one.startswith("vllm:generation_tokens_total{") and f'engine="{engine}"' in one
            ]
            assert float(line.rsplit(" ", 1)[1]) >= 24
        killed = asyncio.run(stream(server, True))
        info = httpx.get(f"{url}/server_info", headers=headers, timeout=60).json()
        assert info["data_parallel_size"] == 2 and info["config"]["device"]["num_threads"] == 1
        bad = httpx.post(
            f"{url}/v1/completions", json={**BODY, "stream": False, "prompt": "a"}, timeout=60,
            headers={**headers, "X-data-parallel-rank": "7"},
        )  # fmt: skip
        assert bad.status_code == 400 and bad.json()["error"]["param"] == "data_parallel_rank"
        scaled = httpx.post(f"{url}/scale_elastic_ep", json={"new_data_parallel_size": 1}, headers=headers, timeout=60)
        assert scaled.json()["data_parallel_size"] == 1
        alone = asyncio.run(stream(server, False))
        refused = httpx.post(
            f"{url}/scale_elastic_ep", json={"new_data_parallel_size": 3},
            headers={"Authorization": "Bearer red-key-1234"}, timeout=60,
        )  # fmt: skip
        assert refused.status_code == 403
        assert "Traceback" not in server.log
    assert calm == killed == alone
    assert json.dumps(calm)


def test_llm_with_two_replicas_generates_what_one_does():
    prompts = [f"Once {word}" for word in ("upon", "there", "a", "in", "the", "when")]
    params = [SamplingParams(max_tokens=8, temperature=i % 2, seed=i, logprobs=1) for i in range(len(prompts))]

    def run(llm: LLM) -> list:
        try:
            return [(one.outputs[0].token_ids, one.outputs[0].logprobs) for one in llm.generate(prompts, params)]
        finally:
            llm.llm_engine.shutdown()

    settings = {"max_model_len": 256, "num_blocks": 64, "num_threads": 1}
    assert run(LLM("leaf", data_parallel_size=2, **settings)) == run(LLM("leaf", **settings))
