"""Usage and metrics are told as vLLM tells them."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from quire.config.build import build_config
from quire.core.stats import RequestStateStats
from quire.metrics.engine_metrics import EngineMetrics
from quire.metrics.records import read
from quire.server.http.timing_breakdown import make_receipt
from tests.server.engines import ScriptedEngine
from tests.server.servers import RunningServer

CHAT = "/v1/chat/completions"
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}


@pytest.mark.parametrize("options", [None, {"include_usage": True}, {"continuous_usage_stats": False}])
def test_usage_that_the_operator_forces_is_in_every_chunk_unless_the_client_says_otherwise(options):
    with RunningServer(ScriptedEngine(), enable_force_include_usage=True) as running:
        fields = {} if options is None else {"stream_options": options}
        text = httpx.post(running.url + CHAT, json={**HELLO, "stream": True, **fields}).text
    chunks = [json.loads(line[6:]) for line in text.split("\n\n") if line.startswith("data: {")]
    with_usage = [chunk for chunk in chunks if chunk.get("usage")]
    assert chunks[-1]["usage"]["completion_tokens"] == 3 and chunks[-1]["choices"] == []
    assert len(with_usage) == (1 if options == {"continuous_usage_stats": False} else len(chunks))


def test_requests_are_counted_by_path_and_status(server):
    httpx.post(server.url + CHAT, json=HELLO)
    httpx.post(server.url + CHAT, json={})
    httpx.get(server.url + "/v1/models/leaf")
    httpx.get(server.url + "/nothing/at/all")
    page = httpx.get(server.url + "/metrics").text
    for line in (
        f'http_requests_total{{handler="{CHAT}",method="POST",status="2xx"}} 1.0',
        f'http_requests_total{{handler="{CHAT}",method="POST",status="4xx"}} 1.0',
        'http_requests_total{handler="/v1/models/{model:path}",method="GET",status="2xx"} 1.0',
        'http_requests_total{handler="none",method="GET",status="4xx"} 1.0',
        f'http_request_duration_seconds_count{{handler="{CHAT}",method="POST"}} 2.0',
    ):
        assert line in page
    assert 'handler="/metrics"' not in page


def test_the_cache_s_settings_have_the_names_that_gateways_read():
    config = build_config(model="leaf", num_gpu_blocks_override=101, block_size=16, max_model_len=400)
    (info,) = [one for one in read(EngineMetrics(config, "leaf").registry.collect()) if "cache_config" in one.name]
    expected = {
        "num_gpu_blocks": "101", "block_size": "16", "cache_dtype": "auto", "gpu_memory_utilization": "0.9",
        "kv_cache_size_tokens": "1600", "kv_cache_max_concurrency": "4.00",
    }  # fmt: skip
    assert {name: info.labels[name] for name in expected} == expected


def test_an_answer_of_one_token_has_a_rate_and_no_interval():
    stats = RequestStateStats(queued_ts=1.0, scheduled_ts=1.5, first_token_ts=2.0, last_token_ts=2.0, output_ts=2.0)
    content = make_receipt(1.0, stats, 2.5, num_new_tokens=1).content()
    assert content["tokens_per_second"] == 2.0 and "mean_itl_ms" not in content
    assert make_receipt(1.0, RequestStateStats(), 2.5).content()["tokens_per_second"] == 0.0
