"""What routers and gateways for vLLM read of `/metrics`: their names, their types, and where they read it."""

from __future__ import annotations

import time

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.engines import ScriptedEngine
from tests.server.servers import RunningServer


@pytest.fixture(scope="module")
def page():
    """Name of a sample -> (type, labels, value), after a step under load."""
    with RunningServer(ScriptedEngine()) as server:
        server.engine.step(
            num_running=3, num_waiting=2, kv_cache_usage=0.25, prefix_cache_queries=64, prefix_cache_hits=16
        )
        text = httpx.get(server.url + "/metrics").text
    return {
        sample.name: (family.type, sample.labels, sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_the_endpoint_picker_of_the_gateway_api_inference_extension_finds_its_metrics(page):
    for name, value in (("num_requests_waiting", 2), ("num_requests_running", 3), ("kv_cache_usage_perc", 0.25)):
        assert (page[f"vllm:{name}"][0], page[f"vllm:{name}"][2]) == ("gauge", value)
    kind, labels, _ = page["vllm:cache_config_info"]
    assert kind == "gauge" and {"block_size", "num_gpu_blocks"} <= labels.keys()
    kind, labels, value = page["vllm:lora_requests_info"]
    assert labels == {"max_lora": "0", "running_lora_adapters": "", "waiting_lora_adapters": ""}
    assert kind == "gauge" and abs(value - time.time()) < 3600


def test_the_router_of_vllm_s_production_stack_finds_the_older_names(page):
    values = {name: page[f"vllm:{name}"][2] for name in (
        "gpu_cache_usage_perc", "gpu_prefix_cache_hits_total", "gpu_prefix_cache_queries_total",
        "gpu_prefix_cache_hit_rate",
    )}  # fmt: skip
    assert list(values.values()) == [0.25, 16, 64, 0.25]
