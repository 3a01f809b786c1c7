"""Cost models: the roofline worked out by hand, and fits that find what they were made from."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from scipy.optimize import nnls

from quire.config.cache import CacheConfig
from quire.config.families.registry import parse_config
from quire.config.model_arch import ModelArch
from quire.config.scheduler import SchedulerConfig
from quire.core.kv_spec import KVCacheConfig
from quire.errors import ConfigError, NotEnoughMemoryError, ValidationError
from quire.simulator.calibration import (
    CalibratedCosts,
    fit,
    load_calibration,
    nonnegative_least_squares,
    save_calibration,
    verdict,
)
from quire.simulator.costs import StepShape
from quire.simulator.divided import DividedCosts
from quire.simulator.division import Division, Exchanges, rank_weights
from quire.simulator.hardware import HARDWARE, Hardware
from quire.simulator.interconnect import INTERCONNECTS, find_interconnect
from quire.simulator.observed import StepSample, observe, requests_of
from quire.simulator.roofline import Assumptions, Roofline
from tests.unit.flight_recorder.test_recording import read_recording, record_some
from tests.unit.scheduler.harness import make_setup

IDEAL = Assumptions(
    compute_share=1.0, attention_share=1.0, memory_share=1.0, link_share=1.0, collective_s=0.0, step_s=0.0,
    workspace=0.0, memory_use=1.0,
)  # fmt: skip
DEVICE = Hardware(name="test", flops={"bfloat16": 1e12}, bandwidth=1e9, capacity=1e9, link=1e8, source="made up")


def arch(**changes: object) -> ModelArch:
    return parse_config(
        {
            "architectures": ["LlamaForCausalLM"], "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 128,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
            "max_position_embeddings": 512, **changes,
        }
    )  # fmt: skip


LAYER_PARAMS = 2 * (64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 128)
HEAD_PARAMS = 64 * 1000


def cache_of(roofline: Roofline) -> KVCacheConfig:
    return roofline.kv_cache(CacheConfig(block_size=16), SchedulerConfig(), 512)


def decode(num_rows: int, context: int) -> StepShape:
    return StepShape(num_rows, 0, num_rows, context, 0.0, num_rows, 0)


def test_a_decode_step_reads_the_weights_and_the_context():
    seconds = Roofline(arch(), DEVICE, assumptions=IDEAL).step_seconds(decode(1, 100))
    kv_bytes = 100 * 2 * 2 * 16 * 2 * 2
    assert seconds == pytest.approx((2 * (LAYER_PARAMS + HEAD_PARAMS) + kv_bytes) / 1e9)


def test_a_long_prompt_computes():
    shape = StepShape(500_000, 500_000, 1, 0, 1e9, 1, 1)
    seconds = Roofline(arch(), DEVICE, assumptions=IDEAL).step_seconds(shape)
    flops = 2 * 500_000 * LAYER_PARAMS + 4 * 1e9 * 64 * 2
    assert seconds == pytest.approx(flops / 1e12 + 2 * HEAD_PARAMS / 1e9)


def test_ranks_divide_the_weights_and_exchange_outputs():
    one = Roofline(arch(), DEVICE, assumptions=IDEAL).step_seconds(decode(1, 0))
    two = Roofline(arch(), DEVICE, division=Division(num_ranks=2), assumptions=IDEAL)
    # heads, hidden, intermediate, hidden of each layer, and the embedding: half of them come from the other rank
    received = (2 * (64 + 64 + 128 + 64) + 64) * 2 / 2 + 1000 * 4 / 2
    assert two.exchanges.num_bytes(decode(1, 0)) == received
    assert two.step_seconds(decode(1, 0)) == pytest.approx(one / 2 + received / 1e8)


def test_a_pipeline_adds_memory_and_no_speed():
    one = Roofline(arch(), DEVICE, assumptions=IDEAL)
    two = Roofline(arch(), DEVICE, division=Division(num_stages=2), assumptions=IDEAL)
    there_and_back = 2 * 64 * 2
    assert two.exchanges.num_bytes(decode(1, 0)) == there_and_back
    assert two.step_seconds(decode(1, 0)) == pytest.approx(one.step_seconds(decode(1, 0)) + there_and_back / 1e8)
    assert cache_of(two).num_blocks > 1.9 * cache_of(one).num_blocks
    first, last = two.memory(cache_of(two))
    assert first["layers"] == [0, 1] and last["layers"] == [1, 2]
    assert first["weights_bytes"] - last["weights_bytes"] == 2 * 2 * HEAD_PARAMS, "the tables are on the first stage"


def test_norms_and_scarce_key_heads_are_on_every_rank():
    layer = 2 * (64 * 64) + 3 * 64 * 128  # queries, outputs and the MLP of a layer
    for num_ranks, key_heads in ((1, 2), (2, 1), (4, 1)):
        division = Division(num_ranks=num_ranks)
        expected = 2 * (layer / num_ranks + 2 * 64 * 16 * key_heads + 2 * 64) + 2 * HEAD_PARAMS / num_ranks
        assert rank_weights(arch(), division, 0) == expected


def test_experts_are_whole_on_one_rank_with_expert_parallelism():
    mixture = parse_config(LATENT | {"first_k_dense_replace": 0, "num_hidden_layers": 1})
    of_expert, num_all = 3 * 64 * 40, mixture.num_layer_weights
    two, all_whole = Division(num_ranks=2), Division(num_ranks=2, divides_experts=True)
    assert rank_weights(mixture, two, 0) == rank_weights(mixture, all_whole, 0), "4 experts divide evenly"
    replicas = Division(num_replicas=4, divides_experts=True)
    tables = mixture.num_table_weights
    assert rank_weights(mixture, replicas, 0) == num_all - 3 * of_expert + tables + 2 * 64
    roofline = Roofline(mixture, DEVICE, division=replicas, assumptions=IDEAL)
    assert roofline.exchanges.num_bytes(decode(8, 0)) == 2 * 8 * 2 * 64 * 2 * 3 / 4, "to experts, and back"
    with pytest.raises(ConfigError, match="4 experts cannot be divided among 8 ranks"):
        Division(num_ranks=8, divides_experts=True).check(mixture)
    with pytest.raises(ConfigError, match="0 experts"):
        Division(num_ranks=2, divides_experts=True).check(arch())
    with pytest.raises(ConfigError, match="2 layers cannot be divided among 3 stages"):
        Division(num_stages=3).check(arch())


def test_a_measured_interconnect_is_read_between_its_points_and_beyond(tmp_path):
    path = tmp_path / "here.json"
    sizes = [{"bytes": 100, "all_gather_us": 10.0, "copy_us": 1.0}, {"bytes": 300, "all_gather_us": 20.0}]
    path.write_text(json.dumps({"ranks": 2, "sizes": sizes, "more": 1}))
    link = find_interconnect(str(path))
    seconds = [link.gather_seconds(size, 2) for size in (1, 100, 200, 300, 600)]
    assert seconds == pytest.approx([10e-6, 10e-6, 15e-6, 20e-6, 40e-6])
    assert link.gather_seconds(200, 4) == pytest.approx(45e-6) and link.gather_seconds(200, 1) == 0.0
    assert link.with_share(0.5) is link and "measured" in link.source
    with pytest.raises(ConfigError, match="did you mean 'nvlink'"):
        find_interconnect("nvlonk")
    for text in ("{}", json.dumps({"ranks": 1, "sizes": sizes}), json.dumps({"ranks": 2, "sizes": sizes[::-1]})):
        path.write_text(text)
        with pytest.raises(ValidationError, match=r"is not a measured interconnect.*"):
            find_interconnect(str(path))


def test_every_interconnect_says_where_its_figures_are_from():
    for link in INTERCONNECTS.values():
        assert ("assumed" in link.source) != ("measured" in link.source)
        assert link.gather_seconds(1e6, 2) > link.gather_seconds(64, 2) > 0


def test_a_calibration_is_divided_by_cores_and_pays_for_exchanges():
    calibration = fit(
        samples(300, 0.0),
        [0.001],
        [(1, 1e-4), (2, 1e-4)],
        request_each_s=1e-4,
        model="m",
        machine="here",
        setup=make_setup(),
    )
    link = INTERCONNECTS["shared-memory"]
    exchanges = Exchanges(arch(), Division(num_ranks=2), 2, link, link)
    shape = decode(8, 4000)
    costs = DividedCosts(calibration, 0, 2.0, exchanges)
    alone = calibration.sampling_s * 8
    expected = (calibration.fitted_seconds(shape) - alone) / 2 + alone + exchanges.seconds(shape)
    assert costs.step_seconds(shape) == pytest.approx(expected, rel=0.02)
    assert exchanges.seconds(shape) >= 10 * 8.5e-6, "nine all-gathers and the logits"
    assert costs.gap_seconds(shape) == CalibratedCosts(calibration).gap_seconds(shape)


def test_pages_fill_what_the_weights_leave():
    roofline = Roofline(arch(), DEVICE, assumptions=IDEAL)
    weights = 2 * (LAYER_PARAMS + 2 * HEAD_PARAMS)
    assert roofline.weight_bytes == weights
    assert cache_of(roofline).num_blocks == int((1e9 - weights) // (16 * 2 * 2 * 16 * 2 * 2))


HEADS = {"vocab_size": 1000, "hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 4096}
WINDOWS = {
    **HEADS, "architectures": ["Gemma3ForCausalLM"], "intermediate_size": 128, "num_hidden_layers": 6,
    "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 256, "sliding_window_pattern": 6,
}  # fmt: skip
HYBRID = {
    **HEADS, "architectures": ["Qwen3_5ForCausalLM"], "intermediate_size": 128, "num_hidden_layers": 4,
    "num_key_value_heads": 2, "head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4,
}  # fmt: skip
LATENT = {
    **HEADS, "architectures": ["DeepseekV3ForCausalLM"], "intermediate_size": 128, "num_hidden_layers": 1,
    "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 16, "moe_intermediate_size": 40, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "n_shared_experts": 1, "first_k_dense_replace": 1, "routed_scaling_factor": 1.0,
}  # fmt: skip


def of_context(raw: dict[str, object], context: int) -> float:
    """Seconds that a context of one request adds to a decode step."""
    roofline = Roofline(parse_config(raw), DEVICE, assumptions=IDEAL)
    return roofline.step_seconds(decode(1, context)) - roofline.step_seconds(decode(1, 0))


def test_a_window_is_read_once_it_is_full_and_no_more():
    of_token = 2 * 2 * 16 * 2 / 1e9  # keys and values of two heads in bfloat16
    assert of_context(WINDOWS, 200) == pytest.approx(6 * 200 * of_token)
    assert of_context(WINDOWS, 4000) == pytest.approx((5 * 256 + 4000) * of_token)


def test_a_latent_is_read_once_for_all_heads():
    assert of_context(LATENT, 1000) == pytest.approx(1000 * (32 + 8) * 2 / 1e9)


def test_a_state_is_read_and_written_whatever_the_context():
    assert of_context(HYBRID, 1000) == pytest.approx(1000 * 2 * 2 * 16 * 2 / 1e9)
    roofline = Roofline(parse_config(HYBRID), DEVICE, assumptions=IDEAL)
    channels = 2 * 2 * 16 + 4 * 16
    state, conv = 4 * 16 * 16 * 4, 3 * channels * 2
    of_rows = roofline.step_seconds(decode(9, 0)) - roofline.step_seconds(decode(1, 0))
    flops = 6 * 4 * 16 * 16 + 2 * 4 * channels
    assert of_rows == pytest.approx(3 * 8 * (2 * (state + conv) / 1e9 + flops / 1e12))


def test_states_and_pages_share_the_memory_as_in_the_engine():
    roofline = Roofline(parse_config(HYBRID), DEVICE, assumptions=IDEAL)
    pages, states = roofline.kv_cache(CacheConfig(block_size=16), SchedulerConfig(max_num_seqs=8), 4096).pool_sizes()
    assert states.num_blocks == 1 + 3 * 8 and pages.num_blocks > 1000
    with pytest.raises(NotEnoughMemoryError, match="max_model_len"):
        small = dataclasses.replace(DEVICE, capacity=roofline.weight_bytes + 20_000)
        cache_of(Roofline(parse_config(HYBRID), small, assumptions=IDEAL))


def test_what_does_not_fit_or_divide_is_refused():
    with pytest.raises(NotEnoughMemoryError, match="do not fit in 1 x L4"):
        big = arch(hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, head_dim=128)
        Roofline(big, HARDWARE["l4"])
    divided, whole = (Roofline(arch(), DEVICE, division=Division(num_ranks=n), assumptions=IDEAL) for n in (2, 3))
    assert cache_of(divided).num_blocks > 1.9 * cache_of(whole).num_blocks, "4 heads do not divide by 3: all keep all"
    with pytest.raises(ConfigError, match="does not have a rate for dtype 'fp8'"):
        Roofline(arch(), HARDWARE["a100"], dtype="fp8")


@pytest.mark.parametrize("name", HARDWARE)
def test_every_device_says_where_its_figures_are_from(name):
    device = HARDWARE[name]
    assert device.source and device.flops["bfloat16"] / device.bandwidth > 50


def true_seconds(shape: StepShape) -> float:
    return 0.002 + 3e-5 * shape.num_tokens + 1e-4 * shape.num_sampling + 2e-7 * shape.decode_context


def samples(count: int, noise: float) -> list[StepSample]:
    rng = np.random.default_rng(1)
    found = []
    for _ in range(count):
        num_rows = int(rng.integers(1, 40))
        prompt = int(rng.choice([0, 0, rng.integers(2, 900)]))
        context = int(rng.integers(10, 500)) * num_rows
        shape = StepShape(num_rows + prompt, prompt, num_rows, context, 0.0, num_rows + (prompt > 0), int(prompt > 0))
        seconds = true_seconds(shape) * float(rng.lognormal(0, noise))
        found.append(StepSample(shape, seconds, 1e-4 + 1e-6 * shape.num_rows, 0.0, np.arange(num_rows)))
    return found


def test_a_fit_finds_the_costs_that_made_its_steps(tmp_path):
    calibration = fit(
        samples(3000, 0.05), [0.001, 0.003, 0.002], [(n, 2e-4 + 1e-5 * n) for n in range(1, 40)],
        request_each_s=1e-4, model="m", machine="here", setup=make_setup(),
    )  # fmt: skip
    for one in samples(200, 0.0):
        assert calibration.fitted_seconds(one.shape) == pytest.approx(true_seconds(one.shape), rel=0.05)
    assert calibration.request_wait_s == 0.002
    assert calibration.delivery_s == pytest.approx((2e-4, 1e-5))
    assert calibration.gap_s[:2] == pytest.approx((1e-4, 1e-6), rel=0.01)
    save_calibration(calibration, tmp_path / "c.json")
    assert load_calibration(tmp_path / "c.json") == calibration
    costs = CalibratedCosts(calibration, seed=3)
    drawn = [costs.step_seconds(decode(10, 1000)) for _ in range(2000)]
    assert np.mean(drawn) == pytest.approx(true_seconds(decode(10, 1000)), rel=0.05)
    assert np.std(np.log(drawn)) == pytest.approx(0.05, rel=0.3)


def test_earlier_tokens_of_prompts_have_a_cost_of_their_own():
    steps = samples(1000, 0.0)
    rng = np.random.default_rng(2)
    for place, step in enumerate(steps):
        if step.shape.num_prompt_tokens:
            shape = dataclasses.replace(step.shape, prompt_context=int(rng.integers(0, 4000)))
            steps[place] = dataclasses.replace(step, shape=shape, seconds=step.seconds + 2e-6 * shape.prompt_context)
    calibration = fit(steps, [0.001], [(1, 2e-4)], request_each_s=1e-4, model="m", machine="here", setup=make_setup())
    assert calibration.prompt_context_s == pytest.approx(2e-6, rel=0.01)


def test_a_slow_stretch_of_the_machine_is_a_stretch_in_simulations():
    steps = [
        dataclasses.replace(step, end_s=0.01 * place, seconds=step.seconds * (1.9 if place % 1000 >= 800 else 1.0))
        for place, step in enumerate(samples(4000, 0.0))
    ]  # fmt: skip
    calibration = fit(steps, [0.001], [(1, 2e-4)], request_each_s=1e-4, model="m", machine="here", setup=make_setup())
    costs = CalibratedCosts(calibration, seed=1)
    is_slow = np.array([costs.step_seconds(decode(10, 1000)) for _ in range(5000)])
    is_slow = is_slow > 1.3 * np.median(is_slow)
    assert 0.1 < is_slow.mean() < 0.4
    assert (is_slow[1:] == is_slow[:-1]).mean() > 0.95


def test_too_little_to_fit_is_said():
    with pytest.raises(ValidationError, match="12 steps were observed"):
        fit(samples(12, 0.0), [0.1], [(1, 0.1)], request_each_s=1e-4, model="m", machine="here", setup=make_setup())


def test_what_is_no_calibration_is_refused(tmp_path):
    path = tmp_path / "c.json"
    path.write_text('{"version": 1}')
    with pytest.raises(ValidationError, match="is not a calibration"):
        load_calibration(path)
    with pytest.raises(ConfigError, match="create one with quire plan --calibrate"):
        load_calibration(tmp_path / "missing")


def test_non_negative_least_squares_agree_with_scipy():
    rng = np.random.default_rng(0)
    for _ in range(20):
        rows, targets = rng.normal(size=(40, 8)), rng.normal(size=40)
        assert nonnegative_least_squares(rows, targets) == pytest.approx(nnls(rows, targets)[0], abs=1e-8)


def test_a_recording_gives_its_steps_and_its_requests(tmp_path):
    recorded = record_some(tmp_path)
    observed = observe(read_recording(tmp_path))
    measured = [step.shape.num_tokens for step in observed.steps]
    assert 0 < len(measured) <= len(recorded.scheduled)
    assert {name for name, _ in observed.queued.values()} == {f"r{n}" for n in range(12)}
    requests = requests_of(read_recording(tmp_path))
    assert len(requests) >= 11 and requests[0].arrival_s == 0.0
    assert all(0 < one.output_len <= 9 for one in requests)


@pytest.mark.parametrize(("error", "word"), [(0.03, "good"), (0.15, "fair"), (0.253, "rough")])
def test_a_calibration_says_what_its_error_means(error: float, word: str):
    assert verdict(error).startswith(f"{word}: ")
