"""`/metrics`: the names that dashboards read, with values that agree with what was asked."""

from __future__ import annotations

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from quire.metrics.buckets import decades
from tests.server.engines import ScriptedEngine
from tests.server.servers import RunningServer
from tests.server.test_protocol import CHAT, HELLO, events, post

NAMES = [
    "num_requests_running", "num_requests_waiting", "num_requests_waiting_by_reason", "kv_cache_usage_perc",
    "cache_config_info", "prefix_cache_queries", "prefix_cache_hits", "num_preemptions", "prompt_tokens",
    "generation_tokens", "prompt_tokens_by_source", "prompt_tokens_cached", "request_success",
    "admission_rejections", "request_prompt_tokens", "request_generation_tokens",
    "request_max_num_generation_tokens", "request_params_max_tokens", "request_prefill_kv_computed_tokens",
    "iteration_tokens_total", "request_params_n", "request_num_preemptions", "time_to_first_token_seconds",
    "inter_token_latency_seconds", "request_time_per_output_token_seconds", "e2e_request_latency_seconds",
    "request_queue_time_seconds", "request_inference_time_seconds", "request_prefill_time_seconds",
    "request_decode_time_seconds",
]  # fmt: skip


@pytest.fixture(scope="module")
def replayed():
    """A page after a known replay: 3 whole answers, 2 streams, one of them with n = 2, one stopped."""
    with RunningServer(ScriptedEngine()) as server:
        for _ in range(3):
            post(server, CHAT, {**HELLO, "max_tokens": 4})
        post(server, CHAT, {**HELLO, "max_tokens": 6, "stream": True})
        post(server, CHAT, {**HELLO, "max_tokens": 5, "n": 2, "stream": True})
        stream = server.client().completions.create(model="leaf", prompt=[7] * 10, max_tokens=2000, stream=True)
        next(iter(stream))
        stream.close()
        server.wait_until(lambda: not server.engine.live)
        server.engine.step(
            num_running=3, num_waiting=2, kv_cache_usage=0.25, prefix_cache_queries=64, prefix_cache_hits=32,
            num_preemptions=1, num_scheduled_tokens=100,
        )  # fmt: skip
        page = httpx.get(server.url + "/metrics").text
        prompt = len(server.engine.prompts[0])
    samples = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            labels = {name: value for name, value in sample.labels.items() if name not in ("model_name", "engine")}
            samples[(sample.name, *sorted(labels.items()))] = sample.value
    return samples, prompt, page


def test_every_documented_name_is_there(replayed):
    page = replayed[2]
    assert [name for name in NAMES if f"# TYPE vllm:{name}" not in page] == []
    assert "# TYPE quire:engine_info gauge" in page and "# TYPE quire:engine_restarts gauge" in page
    assert "process_resident_memory_bytes" in page


def test_counts_agree_with_a_replay(replayed):
    samples, prompt, _ = replayed
    assert samples["vllm:request_success_total", ("finished_reason", "length")] == 3 + 1 + 2
    assert samples["vllm:request_success_total", ("finished_reason", "abort")] == 1
    assert samples["vllm:prompt_tokens_total",] == 5 * prompt
    assert samples["vllm:prompt_tokens_cached_total",] == 5 * (prompt // 2)
    assert samples["vllm:request_generation_tokens_sum",] == 3 * 4 + 6 + 2 * 5
    assert samples["vllm:request_params_n_sum",] == 3 + 1 + 2
    assert samples["vllm:time_to_first_token_seconds_count",] == 5
    assert samples["vllm:e2e_request_latency_seconds_count",] == 5


def test_between_two_tokens_there_is_one_interval(replayed):
    samples, _, page = replayed
    at_least = 3 * 3 + 5 + 2 * 4
    assert at_least <= samples["vllm:inter_token_latency_seconds_count",] <= at_least + 2000
    assert 'vllm:inter_token_latency_seconds_bucket{engine="0",le="+Inf",model_name="leaf"}' in page


def test_steps_are_counted(replayed):
    samples = replayed[0]
    assert samples["vllm:num_requests_running",] == 3 and samples["vllm:num_requests_waiting",] == 2
    assert samples["vllm:kv_cache_usage_perc",] == 0.25
    assert samples["vllm:prefix_cache_queries_total",] == 64 and samples["vllm:prefix_cache_hits_total",] == 32
    assert samples["vllm:num_preemptions_total",] == 1
    assert samples["vllm:iteration_tokens_total_sum",] == 100


def test_bounds_are_of_decades():
    assert decades(2048) == (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)


def test_the_receipt_of_a_request_adds_up_to_its_wall_time():
    with RunningServer(ScriptedEngine(interval_s=0.002), enable_per_request_metrics=True) as server:
        whole = post(server, CHAT, HELLO).json()["metrics"]
        streamed = events(post(server, CHAT, {**HELLO, "stream": True}))[-1]["metrics"]
    for receipt in (whole, streamed):
        phases = [receipt[name] for name in ("prepare_ms", "queued_ms", "prefill_ms", "decode_ms", "deliver_ms")]
        assert min(phases) >= 0 and abs(sum(phases) - receipt["total_ms"]) <= 0.01 * receipt["total_ms"] + 0.01
        assert receipt["tokens_per_second"] > 0 and receipt["time_to_first_token_ms"] > 0
