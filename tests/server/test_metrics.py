"""`/metrics`: the names that dashboards read, with values that agree with what was asked."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from quire.core.cache_info import CacheMiss, MissReason
from quire.core.draft_stats import DraftOutcomes
from quire.core.process_stats import CoreProcesses
from quire.core.speculation_stats import BucketStats, ControllerStats, Reason, SpeculationStats
from quire.metrics.buckets import decades
from quire.metrics.engine_metrics import EngineMetrics
from quire.metrics.offload_metrics import OffloadMetrics
from quire.metrics.process_metrics import EXAMPLE_USAGE
from quire.server.http.timing_breakdown import PHASES
from tests.server.engines import ScriptedEngine, rule, scripted_config
from tests.server.servers import RunningServer
from tests.server.test_protocol import CHAT, HELLO, events, post

NAMES = [
    "num_requests_running", "num_requests_waiting", "num_requests_waiting_by_reason", "kv_cache_usage_perc",
    "cache_config_info", "prefix_cache_queries", "prefix_cache_hits", "external_prefix_cache_queries",
    "external_prefix_cache_hits", "num_preemptions", "prompt_tokens", "generation_tokens",
    "prompt_tokens_by_source", "prompt_tokens_cached", "request_success",
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
            num_preemptions=1, num_scheduled_tokens=90, num_first_tokens=10, num_swapped=4,
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
    assert samples["quire:num_requests_swapped",] == 4
    assert samples["vllm:iteration_tokens_total_sum",] == 100


def test_processes_of_engine_cores_are_shown_by_rank(replayed):
    samples = replayed[0]

    def of(name: str, rank: int = 0, **labels: str) -> float:
        found: float = samples[(f"quire:core_{name}", *sorted({**labels, "rank": str(rank)}.items()))]
        return found

    for rank in (0, 1):
        assert of("resident_memory_bytes", rank) > 0 and of("threads", rank) >= 1
        assert of("page_faults_total", rank, kind="minor") > 0
    own = of("resident_memory_bytes")
    assert own / 2 < of("proportional_memory_bytes") <= 1.1 * own and of("open_fds") > 3
    assert of("cpu_seconds_total", mode="user") > 0.1
    assert of("huge_page_bytes", kind="asked") == 1 << 21 and of("huge_page_bytes", 1, kind="asked") == 0
    assert of("memory_bytes", part="kv_cache") == 1 << 20
    assert abs(of("memory_bytes", part="other") + (1 << 20) - own) <= 0.2 * own


PERF = ("vllm:estimated_", "quire:step_", "quire:limit_")
DOCUMENTED = Path(__file__).parents[2] / "docs" / "reference" / "server.md"


def families(page: str) -> Iterator[tuple[str, str, set[str]]]:
    """(name, type, labels) of Quire's own and vLLM's families on a page, as the reference writes them."""
    for family in text_string_to_metric_families(page):
        if family.name.startswith(("vllm:", "quire:")) and not family.name.endswith("_created"):
            name = f"{family.name}_total" if family.type == "counter" else family.name
            yield name, family.type, {label for one in family.samples for label in one.labels if label != "le"}


def documented() -> dict[str, tuple[str, set[str] | None]]:
    """Name -> type and labels of every metric of the reference; no labels where it only describes them."""
    section = DOCUMENTED.read_text().partition("## Metrics")[2]
    rows = re.findall(r"^\| `((?:vllm|quire):\w+)` \| (\w+) \| ([^|]*) \|", section, re.MULTILINE)
    return {
        name: (kind, None if labels == "its settings" else set(re.findall(r"`(\w+)`", labels)))
        for name, kind, labels in rows
    }


def test_the_page_and_the_reference_have_the_same_metrics(replayed):
    shown = {name: (kind, labels) for name, kind, labels in families(replayed[2])}
    # Those of a server of several models: tests/server/test_many_models.py; of drafts and of offloaded blocks: below
    others = (
        *PERF,
        "quire:model_",
        "quire:models_",
        "vllm:spec_decode_",
        "quire:spec_decode_",
        "quire:kv_offload_",
        "quire:replicas_",
        "quire:front_end",
    )
    known = {name: of for name, of in documented().items() if not name.startswith(others)}
    assert len(known) > 30 and shown.keys() == known.keys()
    for name, (kind, labels) in known.items():
        assert shown[name][0] == kind
        if labels is not None:
            assert shown[name][1] - {"tenant"} == labels - {"tenant"}, name


TIMES = (  # counted exactly; their sums are seconds
    "time_to_first_token_seconds", "inter_token_latency_seconds", "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds", "request_queue_time_seconds", "request_inference_time_seconds",
    "request_prefill_time_seconds", "request_decode_time_seconds",
)  # fmt: skip


def own_counts(page: str) -> dict[str, float]:
    """Every counter, and count and sum of every histogram, by name and labels; sums of seconds are left out."""
    counts = {}
    for family in text_string_to_metric_families(page):
        is_own = family.name.startswith(("vllm:", "quire:")) and not family.name.startswith("quire:core_")
        for sample in family.samples if is_own and family.type in ("counter", "histogram") else ():
            labels = [value for name, value in sorted(sample.labels.items()) if name not in ("model_name", "engine")]
            if sample.name.endswith(("_total", "_count", "_sum")):
                counts[" ".join([sample.name.partition(":")[2], *filter(None, labels)])] = sample.value
    return {
        name: value for name, value in counts.items() if not any(name == f"{time}_sum" for time in TIMES)
    }  # fmt: skip


def test_every_counter_and_histogram_agrees_with_a_replayed_count():
    complete = "/v1/completions"
    engine = ScriptedEngine(config=scripted_config(max_num_seqs=2, sleeping_requests="reject"))
    with RunningServer(engine, max_num_queued_reqs=0, max_num_queued_tokens=10**6) as server:
        # (prompt tokens, n, max_tokens): whole, as streams, with a stop of its own, and one of two prompts
        asked = [(10, 1, 4), (11, 1, 5), (20, 2, 6), (8, 2, 1)]
        for number, (num_prompt, n, max_tokens) in enumerate(asked):
            body = {"prompt": [7] * num_prompt, "n": n, "max_tokens": max_tokens, "stream": number % 2 == 1}
            assert post(server, complete, body).status_code == 200
        assert post(server, complete, {"prompt": [[7] * 6, [8] * 6], "max_tokens": 3}).status_code == 200
        text = engine.tokenizer.decode([rule([7] * 10, 0, 0)])
        stopped = post(server, complete, {"prompt": [7] * 10, "max_tokens": 9, "stop": [text]})
        assert stopped.json()["choices"][0]["finish_reason"] == "stop"
        engine.holds = True  # from here on nothing is answered
        for _ in range(2):
            server.give_up(complete, {"prompt": [7] * 5}, lambda: engine.live)
            server.wait_until(lambda: not engine.live)
        bodies = [{"prompt": ""}, {"prompt": "x", "n": 0}, {"prompt": "x", "model": "other"}]
        assert [post(server, complete, body).status_code for body in bodies] == [400, 400, 404]
        assert httpx.get(server.url + "/nothing").status_code == 404
        assert httpx.get(server.url + complete).status_code == 405
        engine.is_paused = True
        assert post(server, complete, {"prompt": "x"}).status_code == 503
        assert httpx.get(server.url + "/ready").status_code == 503, "a probe is not refused, it is answered"
        engine.is_paused, engine.holds, engine.fails_after = False, False, 1
        assert post(server, complete, {"prompt": [7] * 5}).status_code == 500
        for tokens in (1, 30, 300):
            engine.step(
                num_new_tokens=tokens, num_scheduled_tokens=2 * tokens, num_preemptions=1, prefix_cache_queries=64,
                prefix_cache_hits=32, num_swap_preemptions=tokens // 30 % 2, swapped_out_bytes=100, swapped_in_bytes=10,
                kv_event_batches_dropped=2, kv_connector={"loaded_blocks": 4},
                external_prefix_cache_queries=32, external_prefix_cache_hits=16,
                misses=[CacheMiss(MissReason.COLD, 0), CacheMiss(MissReason.COLD, 0, MissReason.OTHER_SALT)],
            )  # fmt: skip
        page = httpx.get(server.url + "/metrics").text
    ended = [*asked, (6, 1, 3), (6, 1, 3), (10, 1, 1)]
    prompts, cached = sum(one[0] for one in ended), sum(one[0] // 2 for one in ended)
    tokens = sum(n * max_tokens for _, n, max_tokens in ended)
    expected = {
        "prefix_cache_queries_total": 3 * 64, "prefix_cache_hits_total": 3 * 32, "num_preemptions_total": 3,
        "gpu_prefix_cache_queries_total": 3 * 64, "gpu_prefix_cache_hits_total": 3 * 32,
        "external_prefix_cache_queries_total": 3 * 32, "external_prefix_cache_hits_total": 3 * 16,
        "generation_tokens_total": 331, "iteration_tokens_total_count": 3, "iteration_tokens_total_sum": 662,
        "preemptions_total swap": 1, "preemptions_total recompute": 2,
        "swapped_bytes_total out": 300, "swapped_bytes_total in": 30, "kv_event_batches_dropped_total": 6,
        "kv_connector_total loaded_blocks": 12,
        "prompt_tokens_total": prompts, "prompt_tokens_cached_total": cached,
        "prompt_tokens_by_source_total local_compute": prompts - cached,
        "prompt_tokens_by_source_total local_cache_hit": cached,
        "request_success_total stop": 1, "request_success_total length": 1 + 1 + 2 + 2 + 2,
        "request_success_total abort": 2, "request_success_total error": 1, "request_success_total repetition": 0,
            "request_success_total queue_timeout": 0,
        "admission_rejections_total max_num_queued_reqs": 0, "admission_rejections_total max_num_queued_tokens": 0,
        "request_prompt_tokens_sum": prompts, "request_generation_tokens_sum": tokens,
        "request_max_num_generation_tokens_sum": sum(one[2] for one in ended),
        "request_params_max_tokens_sum": sum(one[2] for one in ended) + 9 - 1,
        "request_prefill_kv_computed_tokens_sum": prompts - cached,
        "request_params_n_sum": sum(one[1] for one in ended),
        "request_num_preemptions_sum": 0, "traces_dropped_total": 0, "crash_reports_total": 2,
        "tenant_requests_total default": len(ended) + 2 + 1, "tenant_prompt_tokens_total default": prompts,
        "tenant_cached_tokens_total default": cached, "tenant_generated_tokens_total default": tokens,
        "inter_token_latency_seconds_count": sum(n * (max_tokens - 1) for _, n, max_tokens in ended),
        "request_time_per_output_token_seconds_count": sum(n * max_tokens > 1 for _, n, max_tokens in ended),
    }  # fmt: skip
    missed = {"cold": 3, "other_salt": 3}
    refused = {"bad_request": 2, "not_found": 2, "method_not_allowed": 1, "paused": 1}
    for name in own_counts(page):
        if name.endswith("_count"):
            expected.setdefault(name, len(ended))
        elif name.startswith("prefix_cache_misses_total"):
            expected[name] = missed.pop(name.split()[1], 0)
        elif name.startswith("requests_refused_total"):
            expected[name] = refused.pop(name.split()[1], 0)
    assert own_counts(page) == expected and not refused and not missed


def test_bounds_are_of_decades():
    assert decades(2048) == (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000)


def test_the_receipt_of_a_request_adds_up_to_its_wall_time():
    with RunningServer(ScriptedEngine(interval_s=0.002), enable_per_request_metrics=True) as server:
        whole = post(server, CHAT, HELLO).json()["metrics"]
        streamed = events(post(server, CHAT, {**HELLO, "stream": True}))[-1]["metrics"]
    for receipt in (whole, streamed):
        phases = [receipt[f"{phase}_ms"] for phase in PHASES]
        assert min(phases) >= 0 and round(sum(phases), 3) == receipt["total_ms"]
        assert receipt["tokens_per_second"] > 0 and receipt["time_to_first_token_ms"] > 0


def test_drafts_are_counted_under_the_names_of_vllm_where_they_are_configured():
    config = scripted_config(speculative_config={"method": "ngram", "num_speculative_tokens": 3})
    with RunningServer(ScriptedEngine(config)) as server:
        outcomes = DraftOutcomes(np.arange(3), np.array([3, 3, 2], np.int32), np.array([3, 1, 0], np.int32))
        server.engine.step(drafts=outcomes)
        server.engine.step(drafts=outcomes)
        server.engine.step()
        page = httpx.get(server.url + "/metrics").text
    found = dict(
        re.findall(r"^vllm:spec_decode_(\w+?)_total\{.*engine=\"0\".*?(?:position=\"\d\")?\} (\S+)", page, re.M)
    )
    assert {name: float(found[name]) for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens")} == {
        "num_drafts": 6.0, "num_draft_tokens": 16.0, "num_accepted_tokens": 8.0,
    }  # fmt: skip
    known = {name: of for name, of in documented().items() if name.startswith("vllm:spec_decode")}
    assert len(known) == 4
    assert {name: (kind, labels) for name, kind, labels in families(page) if name.startswith("vllm:spec_d")} == known
    by_position = re.findall(r"accepted_tokens_per_pos_total\{.*position=\"(\d)\"\} (\S+)", page)
    assert by_position == [("0", "4.0"), ("1", "2.0"), ("2", "2.0")]


def test_the_reference_has_the_metrics_of_offloaded_blocks():
    registry = CollectorRegistry()
    OffloadMetrics(registry)
    known = {name: of for name, of in documented().items() if name.startswith("quire:kv_offload_")}
    shown = {name: (kind, labels) for name, kind, labels in families(generate_latest(registry).decode())}
    assert shown == known and len(known) == 11


def decided(num_drafted: int, ratio: float) -> SpeculationStats:
    buckets = (BucketStats("rows<=1 length>=0", ratio, is_closed=ratio < 1, num_closings=1),)
    reasons = {Reason.DRAFTED: num_drafted, Reason.NO_GAIN: 2}
    return SpeculationStats(
        controller=ControllerStats(reasons, 1.0, 0.0, 1, 10 * num_drafted, 0.25 * num_drafted, buckets),
        history_bytes=30, store_bytes=50, num_stored=2,
    )  # fmt: skip


def test_decisions_about_drafts_are_shown_with_their_reasons_across_restarts_of_the_core():
    config = scripted_config(spec_method="suffix")
    key = {"authorization": "Bearer a-key-of-12-chars"}
    with RunningServer(ScriptedEngine(config), api_key="a-key-of-12-chars") as server:
        for told in (decided(4, 1.5), decided(6, 0.75), decided(1, 1.25)):
            server.engine.step(speculation=told)  # the last one is of another core
        page = httpx.get(server.url + "/metrics", headers=key).text
        info = httpx.get(server.url + "/server_info", headers=key).json()["speculative_decoding"]
    found = {
        (one.name.removeprefix("quire:spec_decode_"), one.labels.get("reason") or one.labels.get("load", "")): one.value
        for family in text_string_to_metric_families(page)
        for one in family.samples
        if one.name.startswith("quire:spec_decode_") and not one.name.endswith("_created")
    }
    load = "rows<=1 length>=0"
    assert found == {
        ("closed", load): 0.0, ("closings_total", ""): 2.0, ("history_bytes", ""): 30.0,
        ("num_proposed_tokens_total", ""): 70.0, ("proposing_seconds_total", ""): 1.75, ("speed_ratio", load): 1.25,
        ("steps_total", "closed"): 0.0, ("steps_total", "control"): 0.0, ("steps_total", "drafted"): 7.0,
        ("steps_total", "no_gain"): 4.0, ("steps_total", "no_proposals"): 0.0, ("steps_total", "probe"): 0.0,
        ("store_answers", ""): 2.0, ("store_bytes", ""): 50.0,
    }  # fmt: skip
    known = {name: of for name, of in documented().items() if name.startswith("quire:spec_decode")}
    assert {name: (kind, labels) for name, kind, labels in families(page) if name.startswith("quire:spec_d")} == known
    assert info["method"] == ["suffix"] and info["num_speculative_tokens"] == 24 and info["store_bytes"] == 50
    assert info["controller"]["reasons"] == {"drafted": 1, "no_gain": 2}
    assert info["controller"]["buckets"][0]["name"] == load


def test_without_speculation_there_are_no_such_metrics(replayed):
    assert "spec_decode" not in replayed[2]


def test_a_core_that_is_gone_and_a_state_of_sleep_are_shown():
    metrics, states = EngineMetrics(scripted_config(), "m"), iter(["discard_all"] * 3)
    cores = [CoreProcesses(0, [1]), CoreProcesses(1, [], num_reports=4)]
    metrics.show_processes(lambda: [EXAMPLE_USAGE], lambda: cores)
    metrics.show_sleep(lambda: next(states))
    metrics.show_held(lambda: 3)
    page = metrics.render().decode()
    assert 'quire:core_up{engine="0",model_name="m"} 1.0' in page
    assert 'quire:core_up{engine="1",model_name="m"} 0.0' in page
    assert 'quire:crash_reports_total{engine="1",model_name="m"} 4.0' in page
    assert 'quire:num_requests_held{engine="0",model_name="m"} 3.0' in page
    of_sleep = [line for line in page.splitlines() if line.startswith("vllm:engine_sleep_state{")]
    assert [line.endswith(" 1.0") for line in of_sleep] == ["discard_all" in line for line in of_sleep]
    assert len(of_sleep) == 3
