from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.config import QuireConfig
from quire.config.build import build_config
from quire.config.families.registry import parse_config
from quire.config.model_arch import ModelArch
from quire.config.recurrent_arch import ShortConvArch
from quire.config.resolve import GIB, Decision, UsageContext, resolve
from quire.config.scheduler import SchedulerConfig
from quire.errors import ConfigError, QuireClientError, UnsupportedError
from quire.platforms.interface import GpuInfo, Platform
from quire.utils.memory import MemoryInfo
from tests.unit.utils.test_cpus import FakeMachine


def make_platform(flags: frozenset[str] = frozenset(), num_cpus: int = 2) -> Platform:
    memory = MemoryInfo(total_bytes=16 * GIB, available_bytes=8 * GIB, limited_by="test")
    return Platform(device="cpu", cpu_name="test", cpu_flags=flags, num_cpus=num_cpus, memory=memory)


def make_gpu(total_gib: int, name: str = "H100", capability: tuple[int, int] = (9, 0)) -> Platform:
    memory = MemoryInfo(total_bytes=16 * GIB, available_bytes=8 * GIB, limited_by="test")
    gpus = (GpuInfo(name=name, total_bytes=total_gib * GIB, capability=capability),)
    return Platform(device="cuda", cpu_name="test", cpu_flags=frozenset(), num_cpus=2, memory=memory, gpus=gpus)


def make_arch(torch_dtype: str = "bfloat16", max_position_embeddings: int = 2048) -> ModelArch:
    return parse_config(
        {
            "architectures": ["LlamaForCausalLM"], "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
            "max_position_embeddings": max_position_embeddings, "torch_dtype": torch_dtype or None,
        }
    )  # fmt: skip


BF16_CPU = make_platform(frozenset({"avx512_bf16"}))
PLAIN_CPU = make_platform()


def decided(decisions: list[Decision]) -> dict[str, object]:
    return {decision.name: decision.value for decision in decisions}


def test_every_auto_becomes_a_value_with_a_reason() -> None:
    config, decisions = resolve(QuireConfig(), PLAIN_CPU, make_arch())
    values = decided(decisions)
    assert values == {
        "device": "cpu", "num_threads": 2, "attention_backend": "torch_reference",
        "distributed_executor_backend": "uni", "served_model_name": "leaf", "load_format": "safetensors",
        "model_impl": "quire",
        "dtype": "float32", "kv_cache_dtype": "float32", "block_size": 16, "max_model_len": 2048,
        "max_num_seqs": 256, "max_num_batched_tokens": 4096, "max_decode_slowdown": 0.0,
    }  # fmt: skip
    assert all(decision.reason for decision in decisions)
    assert config.cache.block_size == 16 and config.model.max_model_len == 2048
    assert str(decisions[0]) == "device=cpu (cpu: test, 2 usable cores)"


def test_two_memory_nodes_have_a_rank_each_for_a_large_model(tmp_path):
    cores = [f"{core},{core + 8}" for core in range(8)]
    two = FakeMachine(tmp_path / "two", *cores).node(0, "0-3,8-11").node(1, "4-7,12-15").read(*range(16))
    one = FakeMachine(tmp_path / "one", *cores).node(0, "0-15").read(*range(16))
    uneven = FakeMachine(tmp_path / "uneven", *cores).node(0, "0-6,8-14").node(1, "7,15").read(*range(16))
    tiers = {"kernel_tiers": {"avx2": None}}
    large = dataclasses.replace(make_arch(), layers=make_arch().layers * 50_000)

    def ranks(cpus, arch=large, **given):
        platform = dataclasses.replace(make_platform(num_cpus=8), cpus=cpus)
        config, decisions = resolve(build_config(**given), platform, arch, **tiers)
        found = {decision.name: decision.reason for decision in decisions}
        parallel = config.parallel
        return (
            parallel.tensor_parallel_size, config.device.num_threads, parallel.distributed_executor_backend,
            found.get("tensor_parallel_size"),
        )  # fmt: skip

    why = "two memory nodes: a rank on each, next to its weights and cache"
    assert ranks(two) == (2, 4, "mp", why)
    assert two.rank_cpus(0, 2, 4) == (0, 1, 2, 3) and two.rank_cpus(1, 2, 4) == (4, 5, 6, 7)
    assert ranks(one) == ranks(None) == (1, 8, "uni", None), "one node: nothing is decided"
    assert ranks(two, numa_ranks="off") == (1, 8, "uni", None)
    assert ranks(two, distributed_executor_backend="uni")[0] == 1 and ranks(two, tensor_parallel_size=4)[0] == 4
    assert ranks(two, data_parallel_size=2)[0] == ranks(two, num_threads=8)[0] == 1
    assert ranks(two, make_arch())[3].startswith("two memory nodes, but 0 million weights gain less")
    assert "quantization_report is not supported" in ranks(two, quantization_report=True)[3]
    assert ranks(uneven)[3].startswith("two memory nodes, but of different sizes")


NATIVE = {"kernel_tiers": {"avx2": None}}


def test_a_request_is_drafted_for_from_its_own_text_where_nothing_is_said_of_drafts() -> None:
    config, decisions = resolve(QuireConfig(), PLAIN_CPU, make_arch(), **NATIVE)
    speculative = config.speculative
    assert speculative is not None and speculative.method == ("suffix",) and speculative.acceptance == "sampled"
    assert (
        speculative.enable_adaptive_verification and config.max_step_drafts == speculative.max_step_draft_tokens == 32
    )
    assert speculative.suffix_decoding_max_cached_requests == 0, "what others wrote changes nothing"
    assert "speculative_config" in decided(decisions)
    again, more = resolve(config, PLAIN_CPU, make_arch(), **NATIVE)
    assert again == config and not more


@pytest.mark.parametrize(
    "given",
    [
        {"attention_backend": "torch_reference"}, {"model_impl": "transformers"}, {"tensor_parallel_size": 2},
        {"distributed_executor_backend": "mp"},
        {"pipeline_parallel_size": 2}, {"scheduler_cls": "another"},
        {"sparse_attention_blocks": 8, "block_size": 16},
        {"kv_transfer_config": '{"kv_connector": "ExampleConnector", "kv_role": "kv_both"}'},
    ],
    ids=lambda given: next(iter(given)),
)  # fmt: skip
def test_nothing_is_drafted_unasked_where_that_was_not_measured(given: dict[str, object]) -> None:
    platform = make_platform(num_cpus=4)
    assert resolve(build_config(**given), platform, make_arch(), **NATIVE)[0].speculative is None
    asked = resolve(build_config(speculative_config="off", **given), platform, make_arch(), **NATIVE)[0].speculative
    assert asked is not None and asked.is_off


def test_models_with_states_draft_nothing_unasked() -> None:
    arch = make_arch()
    layer = dataclasses.replace(arch.layers[0], short_conv=ShortConvArch(conv_size=3))
    with_states = dataclasses.replace(arch, layers=(layer,))
    assert with_states.has_states
    assert resolve(QuireConfig(), PLAIN_CPU, with_states, **NATIVE)[0].speculative is None


def test_what_was_said_of_drafts_is_kept() -> None:
    for said in ({"speculative_config": "off"}, {"spec_method": "ngram"}, {"spec_tokens": 3, "spec_method": "suffix"}):
        config = build_config(**said)
        resolved, decisions = resolve(config, PLAIN_CPU, make_arch(), **NATIVE)
        assert resolved.speculative == config.speculative and "speculative_config" not in decided(decisions)


def test_resolving_twice_decides_nothing_more() -> None:
    config, _ = resolve(QuireConfig(), PLAIN_CPU, make_arch())
    again, decisions = resolve(config, PLAIN_CPU, make_arch())
    assert again == config and decisions == []


def test_what_the_user_gave_is_kept() -> None:
    given_config = build_config(
        dtype="half", max_model_len=100, max_num_seqs=3, max_num_batched_tokens=50, block_size=8, num_threads=1
    )
    config, decisions = resolve(given_config, PLAIN_CPU, make_arch())
    assert config.model.dtype == "float16" and config.model.max_model_len == 100 and config.cache.block_size == 8
    assert config.scheduler.max_num_seqs == 3 and config.scheduler.max_num_batched_tokens == 50
    assert not {"dtype", "max_model_len", "max_num_seqs", "max_num_batched_tokens"} & set(decided(decisions))


@pytest.mark.parametrize(
    ("platform", "checkpoint", "expected"),
    [
        (BF16_CPU, "bfloat16", "bfloat16"),
        (PLAIN_CPU, "bfloat16", "float32"),
        (PLAIN_CPU, "float16", "float32"),
        (BF16_CPU, "float16", "float32"),
        (BF16_CPU, "float32", "float32"),
        (BF16_CPU, "", "float32"),
        (make_gpu(80), "bfloat16", "bfloat16"),
        (make_gpu(80), "float16", "float16"),
        (make_gpu(16, "T4", (7, 5)), "bfloat16", "float32"),
    ],
    ids=lambda value: getattr(value, "device", value),
)
def test_dtype_follows_checkpoint_and_platform(platform: Platform, checkpoint: str, expected: str) -> None:
    config, _ = resolve(QuireConfig(), platform, make_arch(checkpoint))
    assert config.model.dtype == expected == config.cache.kv_cache_dtype


@pytest.mark.parametrize(
    ("platform", "usage", "expected"),
    [
        (PLAIN_CPU, UsageContext.LLM_CLASS, (4096, 256)),
        (PLAIN_CPU, UsageContext.API_SERVER, (2048, 128)),
        (make_gpu(180), UsageContext.LLM_CLASS, (16384, 1024)),
        (make_gpu(180), UsageContext.API_SERVER, (16384, 1024)),
        (make_gpu(80), UsageContext.LLM_CLASS, (16384, 1024)),
        (make_gpu(80), UsageContext.API_SERVER, (8192, 1024)),
        (make_gpu(80, "NVIDIA A100 80GB"), UsageContext.API_SERVER, (2048, 256)),
        (make_gpu(24, "L4"), UsageContext.LLM_CLASS, (8192, 256)),
        (make_gpu(24, "L4"), UsageContext.API_SERVER, (2048, 256)),
    ],
)
def test_batch_limits_follow_device_and_usage(
    platform: Platform, usage: UsageContext, expected: tuple[int, int]
) -> None:
    config, _ = resolve(QuireConfig(), platform, make_arch(), usage=usage)
    assert (config.scheduler.max_num_batched_tokens, config.scheduler.max_num_seqs) == expected


def test_the_token_budget_is_not_above_what_the_requests_could_fill() -> None:
    config, _ = resolve(build_config(max_num_seqs=2, max_model_len=100), PLAIN_CPU, make_arch())
    assert config.scheduler.max_num_batched_tokens == 200


def test_a_small_token_budget_lowers_the_number_of_requests() -> None:
    config, _ = resolve(build_config(max_num_batched_tokens=64), PLAIN_CPU, make_arch())
    assert config.scheduler.max_num_seqs == 64


def test_many_requests_raise_the_token_budget() -> None:
    config, _ = resolve(build_config(max_num_seqs=5000), PLAIN_CPU, make_arch())
    assert config.scheduler.max_num_batched_tokens == 5000


def test_states_are_kept_for_as_many_requests_as_run_where_there_are_recurrent_layers() -> None:
    arch = make_arch()
    layer = dataclasses.replace(arch.layers[0], short_conv=ShortConvArch(conv_size=3))
    hybrid = dataclasses.replace(arch, layers=(layer,))
    for given_settings, expected in (
        ({}, 256),
        ({"num_state_checkpoints": 4}, 4),
        ({"enable_prefix_caching": False}, 0),
    ):
        config, _ = resolve(build_config(**given_settings), PLAIN_CPU, hybrid)
        assert config.cache.num_state_checkpoints == expected


def test_without_chunked_prefill_a_step_holds_the_longest_prompt() -> None:
    config, _ = resolve(build_config(enable_chunked_prefill=False), PLAIN_CPU, make_arch("float32", 8192))
    assert config.scheduler.max_num_batched_tokens == 8192


def test_the_backend_chooses_its_page_size() -> None:
    config, _ = resolve(QuireConfig(), PLAIN_CPU, make_arch(), block_sizes={"torch_reference": 32})
    assert config.cache.block_size == 32


BAD = {
    "longer than the model": ({"max_model_len": 4096}, ConfigError, "max_model_len", "<= 2048"),
    "more requests than tokens": (
        {"max_num_seqs": 9, "max_num_batched_tokens": 8}, ConfigError, "max_num_seqs", "max_num_seqs <= 8",
    ),
    "no chunks and too few tokens": (
        {"enable_chunked_prefill": False, "max_num_batched_tokens": 1024},
        ConfigError, "max_num_batched_tokens", ">= 2048",
    ),
    "threshold beyond the model": (
        {"long_prefill_token_threshold": 4096}, ConfigError, "long_prefill_token_threshold", "<= 2048",
    ),
    "a device that is not there": ({"device": "cuda"}, ConfigError, "device", "device='cpu'"),
    "another cache type": ({"kv_cache_dtype": "float16"}, UnsupportedError, "kv_cache_dtype", "leave out"),
    "a cache of eight bits without the native kernels": (
        {"kv_cache_dtype": "fp8", "dtype": "bfloat16"}, UnsupportedError, "kv_cache_dtype",
        "attention_backend='native_cpu'",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("given_settings", "error", "field", "fix"), BAD.values(), ids=BAD.keys())
def test_contradictions_are_refused_with_numbers_and_the_fix(
    given_settings: dict[str, object], error: type[Exception], field: str, fix: str
) -> None:
    with pytest.raises(error) as caught:
        resolve(build_config(**given_settings), PLAIN_CPU, make_arch())
    assert isinstance(caught.value, QuireClientError)
    assert caught.value.field == field and fix in str(caught.value.hint)


@settings(deadline=None, max_examples=200)
@given(
    seqs=st.none() | st.integers(1, 2000), tokens=st.none() | st.integers(1, 20000),
    length=st.none() | st.integers(1, 3000), chunked=st.booleans(), usage=st.sampled_from(UsageContext),
)  # fmt: skip
def test_any_limits_are_resolved_consistently_or_refused(
    seqs: int | None, tokens: int | None, length: int | None, chunked: bool, usage: UsageContext
) -> None:
    given_config = build_config(
        max_num_seqs=seqs, max_num_batched_tokens=tokens, max_model_len=length, enable_chunked_prefill=chunked
    )
    try:
        config, _ = resolve(given_config, PLAIN_CPU, make_arch(), usage=usage)
    except ConfigError as error:
        assert error.hint
        assert tokens is not None or (length or 0) > 2048
        return
    limits = config.scheduler
    assert 1 <= limits.max_num_seqs <= limits.max_num_batched_tokens  # type: ignore[operator]
    assert chunked or limits.max_num_batched_tokens >= config.model.max_model_len  # type: ignore[operator]
    assert seqs in (None, limits.max_num_seqs) and tokens in (None, limits.max_num_batched_tokens)


TIERS = {"amx": "no such instructions", "avx512": None, "portable": None}


def test_the_best_kernel_tier_that_runs_is_chosen_and_the_reason_names_the_others() -> None:
    config, decisions = resolve(QuireConfig(), PLAIN_CPU, make_arch(), kernel_tiers=TIERS)
    (decision,) = [decision for decision in decisions if decision.name == "kernel_tier"]
    assert config.device.kernel_tier == decision.value == "avx512"
    assert "avx512, portable" in decision.reason and "amx: no such instructions" in decision.reason


def test_a_kernel_tier_that_was_asked_for_is_kept_or_refused_with_the_reason() -> None:
    config, _ = resolve(build_config(kernel_tier="portable"), PLAIN_CPU, make_arch(), kernel_tiers=TIERS)
    assert config.device.kernel_tier == "portable"
    with pytest.raises(ConfigError, match="'amx' does not run on this machine: no such instructions") as caught:
        resolve(build_config(kernel_tier="amx"), PLAIN_CPU, make_arch(), kernel_tiers=TIERS)
    assert caught.value.hint == "use 'auto', or one of avx512, portable"
    with pytest.raises(ConfigError, match="not in this build"):
        resolve(build_config(kernel_tier="avx2"), PLAIN_CPU, make_arch(), kernel_tiers=TIERS)


def test_pages_that_the_native_kernels_lack_are_refused_unless_the_other_attention_is_named() -> None:
    with pytest.raises(ConfigError, match="block_size that is a multiple of 16, got 8") as caught:
        resolve(build_config(block_size=8), PLAIN_CPU, make_arch(), kernel_tiers=TIERS)
    assert caught.value.field == "block_size" and "torch_reference" in str(caught.value.hint)
    named = build_config(block_size=8, attention_backend="torch_reference")
    config, _ = resolve(named, PLAIN_CPU, make_arch(), kernel_tiers=TIERS)
    assert config.cache.block_size == 8


def test_without_native_kernels_no_tier_is_decided() -> None:
    config, decisions = resolve(QuireConfig(), PLAIN_CPU, make_arch())
    assert config.device.kernel_tier == "auto" and "kernel_tier" not in decided(decisions)


def test_a_server_bounds_how_much_prompts_slow_down_decoding_and_offline_generation_does_not():
    server, _ = resolve(QuireConfig(), PLAIN_CPU, make_arch(), usage=UsageContext.API_SERVER)
    offline, _ = resolve(QuireConfig(), PLAIN_CPU, make_arch())
    assert (server.scheduler.max_decode_slowdown, offline.scheduler.max_decode_slowdown) == (2.0, 0.0)
    given = QuireConfig(scheduler=SchedulerConfig(max_decode_slowdown=1.5))
    assert resolve(given, PLAIN_CPU, make_arch())[0].scheduler.max_decode_slowdown == 1.5


def test_prompts_that_cannot_be_cut_cannot_be_held_to_a_slowdown():
    whole = SchedulerConfig(enable_chunked_prefill=False)
    config, _ = resolve(QuireConfig(scheduler=whole), PLAIN_CPU, make_arch(), usage=UsageContext.API_SERVER)
    assert config.scheduler.max_decode_slowdown == 0.0
    asked = QuireConfig(scheduler=SchedulerConfig(enable_chunked_prefill=False, max_decode_slowdown=2.0))
    with pytest.raises(ConfigError, match="needs chunked prefill, which is off") as refused:
        resolve(asked, PLAIN_CPU, make_arch())
    assert refused.value.field == "max_decode_slowdown"


def test_a_slowdown_below_one_is_refused():
    with pytest.raises(ConfigError, match="at least 1") as refused:
        SchedulerConfig(max_decode_slowdown=0.5)
    assert refused.value.field == "max_decode_slowdown"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"preemption_mode": "swap"}, "needs swap_space, which is 0"),
        ({"preemption_mode": "recompute", "swap_space": 4}, "swap_space=4 is never used"),
    ],
)
def test_a_way_to_preempt_and_a_swap_space_that_contradict_each_other_are_refused(
    settings: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        resolve(build_config(model="m", **settings), make_platform(), make_arch())
    assert caught.value.field == "swap_space" and caught.value.hint


def test_with_a_swap_space_each_victim_s_way_is_chosen_by_cost_unless_one_is_named() -> None:
    config, _ = resolve(build_config(model="m", swap_space=0.5), make_platform(), make_arch())
    assert (config.scheduler.preemption_mode, config.cache.swap_space) == ("auto", 0.5)
    resolve(build_config(model="m", swap_space=1, preemption_mode="swap"), make_platform(), make_arch())


def test_settings_that_say_that_a_model_is_a_gguf_file_are_checked() -> None:
    plain, stored = make_arch(), dataclasses.replace(make_arch(), gguf_architecture="llama")
    for given_settings in ({}, {"load_format": "gguf"}, {"quantization": "gguf"}):
        config, decisions = resolve(build_config(**given_settings), BF16_CPU, stored)
        assert (config.load.load_format, config.model.quantization, config.model.dtype) == ("gguf", None, "bfloat16")
    assert decided(decisions)["quantization"] == "none"
    for given_settings, arch in (
        ({"load_format": "safetensors"}, stored), ({"load_format": "gguf"}, plain), ({"quantization": "gguf"}, plain),
    ):  # fmt: skip
        with pytest.raises(ConfigError) as caught:
            resolve(build_config(**given_settings), BF16_CPU, arch)
        assert caught.value.field in given_settings
