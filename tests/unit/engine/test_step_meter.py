"""Operations and bytes of steps against limits that are measured: counted by hand, in metrics, and in the log."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from prometheus_client import generate_latest

from quire import LLM, SamplingParams
from quire.config import QuireConfig
from quire.config.build import build_config
from quire.core.step_perf import StepPerf, WeightBytes
from quire.engine.config_lookup import resolve_config
from quire.engine.stat_logger import StatLogger, describe_perf
from quire.engine.step_meter import make_meter
from quire.kernels.native.limits import measure_limits
from quire.kernels.native.runtime import NativeRuntime
from quire.metrics.engine_metrics import EngineMetrics
from quire.simulator.costs import StepShape
from quire.simulator.work import StepWork
from tests.server.test_metrics import PERF, documented, families
from tests.unit.engine.test_stat_logger import step


@pytest.fixture(scope="module")
def config() -> QuireConfig:
    resolved, _ = resolve_config(build_config(model="leaf", dtype="bfloat16", max_model_len=512))
    return resolved


def shape(num_decoding: int, context: int, num_prompt: int = 0) -> StepShape:
    """Decoding rows with `context` tokens each, and one prompt from its first token on."""
    return StepShape(
        num_tokens=num_decoding + num_prompt, num_prompt_tokens=num_prompt,
        num_sampling=num_decoding + bool(num_prompt),
        decode_context=num_decoding * context, prompt_pairs=num_prompt * (num_prompt + 1) / 2,
        num_rows=num_decoding + bool(num_prompt), num_new=0,
    )  # fmt: skip


def test_a_step_s_work_is_what_is_counted_by_hand(config: QuireConfig):
    arch = config.arch
    assert arch is not None
    weights, head = arch.num_layer_weights, arch.vocab_size * arch.hidden_size
    pair = sum(4 * one.num_heads * one.head_size for one in arch.attention_layers)
    key = sum(2 * 2 * one.num_kv_heads * one.head_size for one in arch.attention_layers)
    work = StepWork(config)
    one = work.of(shape(3, 100), 0.5)
    assert (one.kind, one.seconds) == ("decode", 0.5)
    assert one.flops == 2 * 3 * (weights + head) + 300 * pair
    assert one.read_bytes == 2 * (weights + head) + 300 * key and one.write_bytes == 3 * key
    prompt = work.of(shape(0, 0, 64), 0.5)
    assert arch.layers[-1].mlp is not None
    left_out = 63 * arch.layers[-1].mlp.num_weights(
        arch.hidden_size
    )  # in the last layer, of tokens that are not sampled
    assert prompt.kind == "prefill" and prompt.flops == 2 * (64 * weights - left_out + head) + 64 * 65 / 2 * pair
    assert prompt.read_bytes == 2 * (weights + head) + 64 * key
    assert work.of(shape(1, 5, 2), 0.5).kind == "mixed"


def test_quantized_weights_and_ranks_are_counted_as_they_are_stored_and_divided(config: QuireConfig):
    int8 = dataclasses.replace(config, model=dataclasses.replace(config.model, quantization="int8"))
    assert StepWork(int8).of(shape(1, 1), 1.0).read_bytes < 0.6 * StepWork(config).of(shape(1, 1), 1.0).read_bytes
    two = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, tensor_parallel_size=2))
    assert 2 * StepWork(two).of(shape(1, 1), 1.0).flops == StepWork(config).of(shape(1, 1), 1.0).flops


def test_limits_are_measured_once_and_kept(config: QuireConfig, tmp_path: Path, monkeypatch, caplog):
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path))
    calls = []

    class FakeExecutor:
        def call_worker(self, method: str) -> Any:
            if method == "weight_bytes":
                return WeightBytes(1000, 100, 500)
            calls.append(method)
            return 1e12, 5e10

    executor: Any = FakeExecutor()
    observed = dataclasses.replace(config.observability, enable_mfu_metrics=True, disable_log_stats=False)
    asked = dataclasses.replace(config, observability=observed)
    assert make_meter(config, executor) is None and not calls
    for _ in range(2):
        assert make_meter(asked, executor) is not None
    assert calls == ["measure_limits"]
    (kept,) = (tmp_path / "limits").iterdir()
    assert json.loads(kept.read_text()) == [1e12, 5e10]
    kept.write_text("no figures")
    assert make_meter(asked, executor) is not None and len(calls) == 2 and "measured again" in caplog.text
    kept.unlink()
    monkeypatch.setattr(FakeExecutor, "call_worker", lambda _, method: None)
    assert make_meter(asked, executor) is not None and "are not measured" in caplog.text


def test_the_native_kernels_measure_this_machine():
    flops, bandwidth = measure_limits(NativeRuntime(num_threads=1), torch.bfloat16, 1 << 22)
    assert flops > 1e8 and bandwidth > 1e8


PERF_STEP = StepPerf("decode", 0.5, 2e9, 3e9, 1e9, flops_limit=40e9, bytes_limit=16e9)


def test_the_line_of_the_log_has_shares_of_the_limits_by_kind(caplog):
    unknown = StepPerf("prefill", 1.0, 1e9, 1e9, 0.0)
    assert describe_perf([PERF_STEP, PERF_STEP, unknown]) == (
        "steps: prefill 1.0 GFLOP/s, 1.0 GB/s; decode 4.0 GFLOP/s, 8.0 GB/s (MFU 10.0%, MBU 50.0%)"
    )
    logger = StatLogger(name="replica 1: ")
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            logger.record(dataclasses.replace(step(1), perf=PERF_STEP))
            logger.flush()
    assert [one for one in caplog.messages if "MFU" in one] == [
        "replica 1: steps: decode 4.0 GFLOP/s, 8.0 GB/s (MFU 10.0%, MBU 50.0%)"
    ] * 2


def test_metrics_have_vllm_s_names_and_those_of_the_reference(config: QuireConfig):
    observed = dataclasses.replace(config.observability, enable_mfu_metrics=True, disable_log_stats=False)
    metrics = EngineMetrics(dataclasses.replace(config, observability=observed), "leaf")
    before = metrics.totals()
    metrics.record_step(dataclasses.replace(step(1), perf=PERF_STEP))
    metrics.record_step(step(1))
    page = generate_latest(metrics.registry).decode()
    shown = {name: (kind, labels) for name, kind, labels in families(page) if name.startswith(PERF)}
    assert shown == {name: of for name, of in documented().items() if name.startswith(PERF)} and len(shown) == 8
    assert 'vllm:estimated_flops_per_gpu_total{engine="0",model_name="leaf"} 2e+09' in page
    assert 'quire:step_seconds_total{engine="0",kind="decode",model_name="leaf"} 0.5' in page
    new = metrics.totals().since(before)
    assert new.flops / new.possible_flops == 0.1 and new.moved_bytes / new.possible_bytes == 0.5


def test_an_engine_counts_when_it_is_asked(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("quire.worker.device.native_cpu.measure_limits", lambda *_: (4e10, 2e10))
    llm = LLM("leaf", max_model_len=256, max_num_seqs=2, enable_mfu_metrics=True, disable_log_stats=False)
    llm.generate(["Once upon a time"], SamplingParams(max_tokens=4, temperature=0.0))
    found = {one.name: one for one in llm.get_metrics()}
    flops: Any = found["vllm:estimated_flops_per_gpu"]
    assert flops.value > 4 * 1e6
