"""`kv_transfer_params` over HTTP: what a prefill server answers makes a decode server load the prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.config.build import build_config
from quire.engine.llm_engine import LLMEngine
from tests.server.engines import SteppedEngine
from tests.server.servers import RunningServer

PROMPT = [(i * 37) % 900 + 5 for i in range(70)]
ASK = {"do_remote_decode": True, "do_remote_prefill": False, "remote_block_ids": None}


def engine(path: Path, **more: Any) -> SteppedEngine:
    transfer = {"kv_connector": "ExampleConnector", "kv_connector_extra_config": {"shared_storage_path": str(path)}}
    settings: dict[str, Any] = {"num_gpu_blocks_override": 64, "max_model_len": 256, "block_size": 16}
    return SteppedEngine(
        LLMEngine.from_config(build_config(model="leaf", kv_transfer_config={**transfer, **more}, **settings))
    )


def ask(url: str, max_tokens: int, params: dict[str, Any] | None, **more: Any) -> Any:
    body = {"prompt": PROMPT, "max_tokens": max_tokens, "temperature": 0.0, "kv_transfer_params": params, **more}
    return httpx.post(url + "/v1/completions", json=body, timeout=60.0)


def test_what_a_prefill_server_answers_makes_a_decode_server_load_the_prompt(tmp_path):
    with (
        RunningServer(engine(tmp_path, kv_role="kv_producer")) as prefill,
        RunningServer(engine(tmp_path, kv_role="kv_consumer")) as decode,
    ):
        first = ask(prefill.url, 1, ASK).json()
        params = first["kv_transfer_params"]
        assert params["do_remote_prefill"] and params["remote_num_tokens"] == 64
        plain = ask(prefill.url, 8, None).json()
        assert "kv_transfer_params" not in plain
        second = ask(decode.url, 8, params, return_token_ids=True).json()
        assert second["choices"][0]["text"] == plain["choices"][0]["text"]
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 64
        messages = {
            "messages": [{"role": "user", "content": "hello " * 40}],
            "max_tokens": 1,
            "kv_transfer_params": ASK,
        }
        chat = httpx.post(prefill.url + "/v1/chat/completions", json=messages, timeout=60.0).json()
        assert chat["kv_transfer_params"]["do_remote_prefill"]


@pytest.mark.parametrize("params", [[1], "x", {"a": "b" * 70000}])
def test_what_is_not_an_object_of_a_bearable_size_is_refused(params, tmp_path):
    with RunningServer(engine(tmp_path)) as server:
        answer = ask(server.url, 1, params)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "kv_transfer_params"
