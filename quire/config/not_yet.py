"""Settings and values that users of vLLM know and Quire does not have yet.

Read by `config.build` and the configs: a neutral value of such a setting is accepted and dropped, any other is refused
by name.
"""

from __future__ import annotations

from typing import Any

_OFF: tuple[Any, ...] = (None, False)
_NONE: tuple[Any, ...] = (None,)
_ANY_BOOL: tuple[Any, ...] = (None, False, True)

# Values of `quantization`.
QUANTIZATIONS_NOT_YET = (
    "auto_awq", "auto_gptq", "awq", "awq_marlin", "bitsandbytes", "compressed-tensors", "deepseek_v4_fp8",
    "experts_int8", "fbgemm_fp8", "fp8", "fp8_per_block", "fp8_per_channel", "fp8_per_tensor", "fp_quant", "gguf",
    "gpt_oss_mxfp4", "gptq", "gptq_marlin", "humming", "inc", "int8_per_channel_weight_only", "modelopt",
    "modelopt_fp4", "modelopt_mixed", "modelopt_mxfp8", "moe_wna16", "mxfp4", "mxfp8", "nvfp4_per_token", "online",
    "quark", "torchao",
)  # fmt: skip

# Setting -> the values that ask for nothing.
NOT_YET: dict[str, tuple[Any, ...]] = {
    # Honoured by having nothing to turn off.
    "disable_custom_all_reduce": _ANY_BOOL,
    # Model and tokenizer.
    "runner": (None, "auto", "generate"),
    "convert": (None, "auto", "none"),
    "tokenizer_mode": (None, "auto", "hf"),
    "tokenizer_revision": _NONE,
    "hf_token": (None, False),
    "hf_overrides": (None, {}),
    "hf_config_path": _NONE,
    "model_impl": (None, "auto"),
    "override_generation_config": (None, {}),
    "logits_processors": (None, []),
    "allowed_local_media_path": (None, ""),
    "allowed_media_domains": (None, []),
    "model_loader_extra_config": (None, {}),
    "quantization_config": (None, {}),
    "pooler_config": _NONE,
    "enable_prompt_embeds": _OFF,
    "additional_config": (None, {}),
    # Reasoning and structured output.
    "reasoning_parser": (None, ""),
    "reasoning_parser_plugin": (None, ""),
    # Multimodal.
    "limit_mm_per_prompt": (None, {}),
    "mm_processor_kwargs": (None, {}),
    "mm_processor_cache_gb": (None, 0, 4),
    "mm_processor_cache_type": (None, "lru"),
    "mm_encoder_tp_mode": (None, "weights"),
    "language_model_only": _OFF,
    "enable_mm_embeds": _OFF,
    "interleave_mm_strings": _OFF,
    "skip_mm_profiling": _ANY_BOOL,
    "disable_chunked_mm_input": _OFF,
    # LoRA.
    "enable_lora": _OFF,
    "max_loras": (None, 1),
    "max_lora_rank": (None, 16),
    "max_cpu_loras": _NONE,
    "fully_sharded_loras": _OFF,
    "lora_target_modules": _NONE,
    "default_mm_loras": (None, {}),
    # Parallelism.
    "data_parallel_rank": _NONE,
    "data_parallel_start_rank": _NONE,
    "data_parallel_size_local": _NONE,
    "data_parallel_address": _NONE,
    "data_parallel_rpc_port": _NONE,
    "data_parallel_backend": (None, "mp"),
    "data_parallel_hybrid_lb": _OFF,
    "data_parallel_external_lb": _OFF,
    "decode_context_parallel_size": (None, 1),
    "prefill_context_parallel_size": (None, 1),
    "enable_expert_parallel": _OFF,
    "all2all_backend": _NONE,
    "enable_eplb": _OFF,
    "eplb_config": (None, {}),
    "enable_dbo": _OFF,
    "enable_elastic_ep": _OFF,
    "enable_fault_tolerance": _OFF,
    "fault_tolerance_config": (None, {}),
    "worker_cls": (None, "auto"),
    "worker_extension_cls": (None, ""),
    # Memory and cache.
    "prefix_cache_retention_interval": (None, 0),
    "prefix_match_unit": _NONE,
    "kv_offloading_size": (None, 0),
    "kv_offloading_backend": (None, "native"),
    "cpu_offload_gb": (None, 0),
    "offload_group_size": (None, 0),
    "offload_num_in_group": (None, 1),
    "offload_prefetch_step": (None, 1),
    "offload_params": _NONE,
    "enable_sleep_mode": _OFF,
    "sleep_mode_backend": (None, "cumem"),
    # Scheduling.
    "max_num_scheduled_tokens": _NONE,
    "max_num_active_seqs": _NONE,
    "max_num_queued_reqs": _NONE,
    "max_num_queued_tokens": _NONE,
    "long_prefill_token_threshold_adaptive": _OFF,
    "scheduler_cls": _NONE,
    "prefill_schedule_interval": (None, 1),
    "async_scheduling": (None, False),
    "stream_interval": (None, 1),
    "performance_mode": (None, "balanced"),
    "optimization_level": _NONE,
    # Compilation, attention, speculation, transfer.
    "compilation_config": (None, 0, {}),
    "attention_config": (None, {}),
    "cudagraph_capture_sizes": (None, []),
    "max_cudagraph_capture_size": _NONE,
    "speculative_config": (None, {}),
    "spec_method": _NONE,
    "spec_model": _NONE,
    "spec_tokens": _NONE,
    "kv_transfer_config": (None, {}),
    "ec_transfer_config": (None, {}),
    "enable_return_routed_experts": _OFF,
    "return_sampling_mask": _OFF,
    # Watching.
    "profiler_config": (None, {}),
    "watchdog_config": (None, {}),
    "shutdown_timeout": (None, 0),
    "aggregate_engine_logging": _OFF,
    "enable_log_requests": _OFF,
    "otlp_traces_endpoint": _NONE,
    "collect_detailed_traces": _NONE,
    "kv_cache_metrics": _OFF,
    "kv_cache_metrics_sample": (None, 0.01),
    "cudagraph_metrics": _OFF,
    "enable_mfu_metrics": _OFF,
    "per_request_spec_decode_metrics": (None, "none"),
    "custom_histogram_buckets": _NONE,
    "show_hidden_metrics_for_version": _NONE,
}


def is_neutral(name: str, value: object) -> bool:
    """True when `value` asks for nothing of the not-yet-supported setting `name`."""
    return any(type(value) is type(one) and value == one for one in NOT_YET[name])
