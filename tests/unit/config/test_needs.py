from __future__ import annotations

from typing import Any

import pytest

from quire.config.base import SettingInfo
from quire.config.build import SECTIONS, SERVER_SECTIONS, all_settings, build_config, build_server_config
from quire.config.needs import is_on
from quire.errors import ConfigError
from tests.each import each

# Settings that have an effect whatever else is set, or say by themselves what they need (another module refuses them).
ALONE = """
model served_model_name skip_tokenizer_init revision hf_overrides model_impl dtype quantization
quantization_report max_model_len seed max_logprobs logprobs_mode generation_config override_generation_config
enforce_eager logits_processors load_format packing_cache download_dir
block_size gpu_memory_utilization kv_cache_memory_bytes num_gpu_blocks_override kv_cache_dtype enable_prefix_caching
prefix_caching_hash_algo disable_hybrid_kv_cache_manager sparse_attention_blocks watermark swap_space kv_offloading_size
kv_offloading_backend kv_disk max_num_batched_tokens max_num_seqs scheduling_policy scheduler_cls enable_chunked_prefill
max_decode_slowdown queue_timeout scheduler_reserve_full_isl preemption_mode
device num_threads attention_backend kernel_tier tensor_parallel_size pipeline_parallel_size pipeline_layer_partition
data_parallel_size numa_ranks enable_expert_parallel distributed_executor_backend
log_level log_format disable_log_stats stat_loggers profile profiler_config enable_mfu_metrics flight_recorder
kv_events_config hang_timeout_s crash_reports max_restarts enable_sleep_mode sleeping_requests
structured_outputs_backend structured_outputs_disable_any_whitespace structured_outputs_disable_additional_properties
structured_outputs_reasoning_parser structured_outputs_enable_in_reasoning structured_outputs_compile_timeout
structured_outputs_compile_memory speculative_config spec_method spec_model spec_tokens kv_transfer_config
per_request_spec_decode_metrics
uds api_server_count root_path ssl_certfile allowed_origins allowed_hosts timeout_keep_alive shutdown_timeout
disable_access_log disable_fastapi_docs disable_page disable_debug
api_key api_key_file shared_prefixes strict_requests allow_special_tokens trust_request_chat_template
default_chat_template_kwargs exclude_tools_when_tool_choice_none chat_template_content_format enable_auto_tool_choice
tool_call_parser tool_call_format reasoning_parser response_role return_tokens_as_token_ids enable_force_include_usage
enable_tokenizer_info_endpoint enable_per_request_metrics enable_log_requests sse_keep_alive_interval
max_body_bytes max_bodies_bytes max_header_bytes max_json_depth max_json_containers max_json_entries max_connections
head_timeout body_timeout write_timeout max_completion_prompts max_answers max_stop_strings max_stop_chars
max_id_entries max_num_queued_reqs max_num_queued_tokens otlp_traces_endpoint response_store usage_ledger headless
"""
INFOS = {one.info.name: one.info for one in all_settings({**SECTIONS, **SERVER_SECTIONS})}
DEPENDENT = sorted(name for name, info in INFOS.items() if info.needs or info.overruled_by)
# Values that a rule of another kind asks for.
SAMPLES: dict[str, Any] = {
    "speculative_config": '{"method": "ngram"}', "spec_method": "ngram", "headless": True,
    "kv_events_config": '{"enable_kv_cache_events": true}',
}  # fmt: skip
BESIDE: dict[str, dict[str, Any]] = {"headless": {"data_parallel_rpc_port": 5}, "spec_model": {"spec_method": "eagle"}}


def build(**settings: Any) -> None:
    """Engine or server, whichever has the settings."""
    (
        build_server_config
        if set(settings) <= {one.info.name for one in all_settings(SERVER_SECTIONS)}
        else build_config
    )(**settings)


def other_value(info: SettingInfo) -> Any:
    """An allowed value that is not the default, and asks for something where the default does not."""
    if info.name in SAMPLES:
        return SAMPLES[info.name]
    if info.kind in ("int", "float"):
        return (info.default or info.minimum or 0) + 1
    if info.kind == "list":
        return ["x"]
    return not info.default if info.kind == "bool" else next(x for x in info.choices or ("x",) if x != info.default)


def test_every_setting_declares_what_it_needs() -> None:
    """A new setting says `needs` or `overruled_by` in its declaration, or is among `ALONE`."""
    assert sorted([*ALONE.split(), *DEPENDENT]) == sorted(INFOS)


@each("name", DEPENDENT)
def test_a_setting_without_effect_is_refused_or_warned_of_by_name(name: str, caplog: pytest.LogCaptureFixture) -> None:
    info = INFOS[name]
    own = {name: other_value(info)}
    off = {one: {bool: False, str: "none"}[type(INFOS[one].default)] for one in info.needs if is_on(INFOS[one].default)}
    if info.needs:
        with pytest.raises(ConfigError, match=f"^{name} has no effect without") as caught:
            build(**own, **off)
        assert caught.value.field == name and name in str(caught.value.hint)
    for one in info.overruled_by:
        with caplog.at_level("WARNING", "quire"):
            build(**own, **{one: other_value(INFOS[one])})
        assert f"{name} has no effect with {one}; leave one of them out" in caplog.text
    for one in info.needs:
        build(**{**BESIDE.get(one, {}), one: INFOS[one].default if one in off else other_value(INFOS[one]), **own})


def test_a_value_that_asks_for_nothing_needs_nothing() -> None:
    build_server_config(ssl_cert_reqs=0)
    build_config(kv_disk_size=20 << 30, num_state_checkpoints=0, enable_prefix_caching=False)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_events_config": {"topic": "t"}}, "topic has no effect without enable_kv_cache_events"),
        (
            {"kv_events_config": {"enable_kv_cache_events": True, "buffer_steps": 5}},
            "buffer_steps has no effect without replay_endpoint",
        ),
        (
            {"profiler_config": {"profiler": "kernels", "torch_profiler_dir": "x", "torch_profiler_with_stack": True}},
            "torch_profiler_with_stack has no effect with profiler='kernels'",
        ),
        (
            {"speculative_config": {"method": "ngram", "suffix_share_tenants": True}},
            "suffix_share_tenants has no effect with method ngram",
        ),
    ],
)
def test_a_key_of_a_json_setting_without_effect_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_config(**settings)
