"""Settings of vLLM that Quire does not have yet, by feature: why, what to do instead, and their neutral values.

Read by `config.not_yet`. Names and neutral values are facts of vLLM 0.33; data only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_NONE: tuple[Any, ...] = (None,)
_OFF: tuple[Any, ...] = (None, False)
_EMPTY: tuple[Any, ...] = (None, {})
_LIST: tuple[Any, ...] = (None, [])
_TEXT: tuple[Any, ...] = (None, "")
_AUTO: tuple[Any, ...] = (None, "auto")


@dataclass(frozen=True, slots=True)
class Missing:
    """Settings that miss one feature.

    Attributes:
        why: what Quire lacks or does in place of it.
        instead: what to do.
        names: setting -> the values that ask for nothing.
    """

    why: str
    instead: str
    names: dict[str, tuple[Any, ...]]


MISSING: tuple[Missing, ...] = (
    Missing(
        "Quire generates text; it does not have pooling models", "run a separate server for embeddings",
        {
            "runner": (None, "auto", "generate"), "convert": (None, "auto", "none"), "pooler_config": _NONE,
            "enable_flash_late_interaction": _OFF, "io_processor_plugin": _TEXT,
        },
    ),
    Missing(
        "a prompt is text or token ids", "send one of these",
        {"enable_prompt_embeds": _OFF},
    ),
    Missing(
        "tokenizers are read from tokenizer.json, tokenizer.model or a GGUF file", "pass one with --tokenizer",
        {"tokenizer_mode": (None, "auto", "hf")},
    ),
    Missing(
        "a token on a command line is visible in the process list", "set HF_TOKEN in the environment",
        {"hf_token": _OFF},
    ),
    Missing(
        "models are read in Hugging Face format, by Quire's own classes", "give a directory in that format as --model",
        {
            "hf_config_path": _NONE, "config_format": (None, "auto", "hf"),
            "model_loader_extra_config": _EMPTY, "model_class_overrides": _EMPTY, "ignore_patterns": _LIST,
            "diffusion_config": _EMPTY, "engram_config": _EMPTY,
        },
    ),
    Missing(
        "a checkpoint's quantization is read from its config.json", "quantize while loading: --quantization int8",
        {"quantization_config": _EMPTY},
    ),
    Missing(
        "Quire loads no code from a file",
        "publish the parser as an entry point (quire.tool_parsers, quire.reasoning_parsers)",
        {"reasoning_parser_plugin": _TEXT, "tool_parser_plugin": _TEXT},
    ),
    Missing(
        "third-party middleware is not supported", "put a proxy in front of it",
        {"middleware": _LIST},
    ),
    Missing(
        "process-wide extra settings are not supported", "use the setting's own name",
        {"additional_config": _EMPTY, "aux_output_config": _EMPTY},
    ),
    Missing(
        "tools are executed by clients", "let the client execute tool calls",
        {"tool_server": _NONE, "tool_strict_level": _NONE},
    ),
    Missing(
        "reasoning has one format and one budget per request", "use --reasoning-parser and thinking_token_budget",
        {
            "reasoning_parser": _TEXT, "reasoning_config": _EMPTY, "reasoning_effort_map": _EMPTY,
            "anthropic_disabled_thinking_effort": _NONE, "cohere_format": _NONE, "cohere_is_reasoning_model": _OFF,
        },
    ),
    Missing(
        "Quire supports text input only", "serve the text-only model",
        {
            "allowed_local_media_path": _TEXT, "allowed_media_domains": _LIST, "limit_mm_per_prompt": _EMPTY,
            "mm_processor_kwargs": _EMPTY, "mm_processor_cache_gb": (None, 0, 4),
            "mm_processor_cache_type": (None, "lru"), "mm_encoder_tp_mode": (None, "weights"),
            "language_model_only": _OFF, "enable_mm_embeds": _OFF, "interleave_mm_strings": _OFF,
            "disable_chunked_mm_input": _OFF, "media_io_kwargs": _EMPTY,
            "mm_device_do_normalize": _OFF, "mm_encoder_attn_backend": _NONE, "mm_encoder_attn_dtype": _AUTO,
            "mm_encoder_fp8_scale_path": _NONE, "mm_encoder_fp8_scale_save_margin": _NONE,
            "mm_encoder_fp8_scale_save_path": _NONE, "mm_encoder_only": _OFF, "mm_hasher_algorithm": _NONE,
            "mm_ipc_gpu_memory_gb": (None, 0), "mm_processor_device": _NONE, "mm_shm_cache_max_object_size_mb": _NONE,
            "mm_tensor_ipc": _NONE, "trust_request_mm_kwargs": _OFF, "video_pruning_method": _NONE,
            "video_pruning_rate": _NONE, "enable_shm_tensor_arena": _OFF, "ec_manager_config": _EMPTY,
            "ec_transfer_config": _EMPTY,
        },
    ),
    Missing(
        "LoRA adapters are not supported", "merge the adapter into the weights",
        {
            "enable_lora": _OFF, "max_loras": (None, 1), "max_lora_rank": (None, 16), "max_cpu_loras": _NONE,
            "fully_sharded_loras": _OFF, "lora_target_modules": _NONE, "default_mm_loras": _EMPTY,
            "lora_modules": _LIST, "lora_dtype": _AUTO, "max_lora_cls_labels": _NONE, "specialize_active_lora": _OFF,
            "enable_tower_connector_lora": _OFF, "enable_mixed_moe_lora_format": _OFF, "enable_moe_shared_loras": _OFF,
        },
    ),
    Missing(
        "replicas' engine cores run on the machine of their server; Ray places the ranks of each",
        "use distributed_executor_backend='ray' with data_parallel_size, or Ray Serve (docs/how-to/hosts.md)",
        {"data_parallel_backend": (None, "mp")},
    ),
    Missing(
        "machines are joined by Ray or a launcher, not by addresses of nodes",
        "use --distributed-executor-backend ray (docs/how-to/many-machines.md), or external_launcher from Python",
        {
            "nnodes": (None, 1), "node_rank": (None, 0), "master_addr": _NONE, "master_port": _NONE,
            "ray_workers_use_nsight": _OFF,
        },
    ),
    Missing(
        "a server's replicas all run on its machine, and it balances the load itself",
        "give --data-parallel-size alone; on several machines run a server on each, behind a load balancer "
        "(docs/how-to/data-parallel.md)",
        {
            "data_parallel_rank": _NONE, "data_parallel_start_rank": (None, 0), "data_parallel_size_local": _NONE,
            "data_parallel_hybrid_lb": _OFF, "data_parallel_external_lb": _OFF,
            "data_parallel_multi_port_external_lb": _OFF, "data_parallel_supervisor_port": _NONE,
            "dp_supervisor_probe_failure_threshold": _NONE, "dp_supervisor_probe_interval_s": _NONE,
            "dp_supervisor_probe_timeout_s": _NONE, "dp_sync_interval": _NONE,
        },
    ),
    Missing(
        "a sequence's KV cache is divided by heads, not by tokens", "use --tensor-parallel-size",
        {
            "decode_context_parallel_size": (None, 1), "prefill_context_parallel_size": (None, 1),
            "dcp_comm_backend": _NONE, "dcp_kv_cache_interleave_size": (None, 1), "dcp_q_replicate": _OFF,
            "cp_kv_cache_interleave_size": (None, 1), "enable_hc_sp": _OFF,
        },
    ),
    Missing(
        "the number of ranks that share experts is fixed at the start", "start a new server with another size",
        {"enable_elastic_ep": _OFF, "elastic_ep_max_dp_size": _NONE},
    ),
    Missing(
        "an engine core that dies is restarted, and its requests continue, anyway", "see --max-restarts",
        {"enable_fault_tolerance": _OFF, "fault_tolerance_config": _EMPTY},
    ),
    Missing(
        "prompts are tokenized where requests are received", "use --api-server-count for more processes",
        {"enable_scale_out": _OFF, "renderer_num_workers": (None, 1)},
    ),
    Missing(
        "there is one worker class per device, and no class is added to it",
        "pass functions of the worker to LLM.collective_rpc, or write a plugin (docs/how-to/plugins.md)",
        {"worker_cls": _AUTO, "worker_extension_cls": _TEXT},
    ),
    Missing(
        "devices are those that the operating system shows", "use taskset or CUDA_VISIBLE_DEVICES",
        {"device_ids": _NONE},
    ),
    Missing(
        "weights are replaced from a directory", "use POST /update_weights or quire weights update PATH",
        {"weight_transfer_config": _EMPTY},
    ),
    Missing(
        "experts are computed by kernels of Quire's own", "use --expert-placement-strategy to place them",
        {
            "all2all_backend": _NONE, "enable_eplb": _OFF, "eplb_config": _EMPTY,
            "enable_dbo": _OFF, "dbo_decode_token_threshold": _NONE, "dbo_prefill_token_threshold": _NONE,
            "ubatch_size": (None, 0), "enable_ep_weight_filter": _OFF,
            "moe_backend": _AUTO, "enable_return_routed_experts": _OFF,
        },
    ),
    Missing(
        "recurrent layers are computed by kernels of Quire's own, whose states are float32",
        "leave it out; --num-state-checkpoints says how many states are kept",
        {
            "mamba_backend": _NONE, "mamba_block_size": _NONE, "mamba_cache_dtype": _AUTO, "mamba_cache_mode": _NONE,
            "mamba_cache_philox_rounds": _NONE, "mamba_ssm_cache_dtype": _AUTO, "mamba_ssu_algorithm": _NONE,
            "enable_mamba_cache_stochastic_rounding": _OFF, "enable_mamba_shared_prefix_checkpoint": _OFF,
            "gdn_prefill_backend": _NONE, "kda_decode_backend": _NONE, "kda_prefill_backend": _NONE,
            "replayssm_buffer_len": _NONE, "use_replayssm": _OFF,
        },
    ),
    Missing(
        "weights stay in the memory of one device",
        "lower --max-model-len, or quantize",
        {
            "cpu_offload_gb": (None, 0), "offload_group_size": (None, 0), "offload_num_in_group": (None, 1),
            "offload_prefetch_step": (None, 1), "offload_params": _NONE, "cpu_offload_params": _NONE,
            "offload_backend": _AUTO, "pt_load_map_location": _NONE,
        },
    ),
    Missing(
        "sleep mode ends the engine core's process, and has no other way", "use --enable-sleep-mode alone",
        {
            "sleep_mode_backend": (None, "cumem"), "sleep_mode_offload_cudagraph": _OFF,
            "sleep_preserve_parameter_names": _NONE, "enable_cumem_allocator": _OFF, "enable_nccl_comm_suspend": _OFF,
        },
    ),
    Missing(
        "the KV cache has one layout for all layers of a type", "use --kv-cache-dtype for all layers",
        {
            "prefix_match_unit": _NONE,
            "kv_cache_dtype_skip_layers": _NONE, "kv_sharing_fast_prefill": _OFF, "swa_bounded_replay": _OFF,
        },
    ),
    Missing(
        "sliding windows cannot be turned off", "use --max-model-len of at most the window size",
        {"disable_sliding_window": _OFF},
    ),
    Missing(
        "steps are limited by tokens, requests and time", "use --max-num-batched-tokens, --max-num-seqs or "
        "--max-inter-token-latency-ms",
        {
            "max_num_scheduled_tokens": _NONE, "max_num_active_seqs": _NONE,
            "long_prefill_token_threshold_adaptive": _OFF,
            "prefill_schedule_interval": (None, 1),
        },
    ),
    Missing(
        "only a server limits its queue", "pass them to quire serve",
        {"max_num_queued_reqs": _NONE, "max_num_queued_tokens": _NONE, "shutdown_timeout": (None, 0)},
    ),
    Missing(
        "every token is streamed as soon as it is available; for slow readers chunks are merged",
        "merge chunks in the client",
        {"stream_interval": (None, 1)},
    ),
    Missing(
        "there is one attention backend per device", "choose it by --attention-backend",
        {"attention_config": _EMPTY, "sparse_indexer_topk_backend": _NONE},
    ),
    Missing(
        "the kernels are chosen together", "use --kernel-tier",
        {
            "kernel_config": _EMPTY, "linear_backend": _AUTO, "ir_op_priority": _NONE, "monokernel": _OFF,
            "use_fp64_gumbel": _OFF,
        },
    ),
    Missing(
        "a prefill engine is asked over /v1 like any other", "send max_tokens=1 and kv_transfer_params",
        {"tokens_only": _OFF},
    ),
    Missing(
        "the API is HTTP", "use /v1 over HTTP",
        {"grpc": _OFF, "grpc_port": _NONE},
    ),
    Missing(
        "responses have no such field", "leave it out",
        {
            "return_sampling_mask": _OFF, "fingerprint_mode": _NONE, "fingerprint_value": _NONE,
            "watermark_config": _EMPTY,
        },
    ),
    Missing(
        "the API documentation is /docs and /openapi.json", "open /openapi.json in an OpenAPI viewer",
        {"enable_offline_docs": _OFF},
    ),
    Missing(
        "prompts and outputs are never written to the log", "use --enable-log-requests (parameters), or "
        "--flight-recorder",
        {"enable_log_outputs": _OFF, "enable_log_deltas": _OFF},
    ),
    Missing(
        "the log goes to stderr", "redirect stderr; --log-level and --log-format set its content",
        {
            "log_config_file": _NONE, "logging_config": _EMPTY, "log_error_stack": _OFF,
        },
    ),
    Missing(
        "steps are recorded by the flight recorder", "use --flight-recorder DIR and quire replay",
        {
            "enable_layerwise_nvtx_tracing": _OFF, "enable_logging_iteration_details": _OFF,
            "enable_trace_replay": _OFF, "jit_monitor_mode": _NONE, "jit_monitor_verbose": _OFF,
        },
    ),
    Missing(
        "an engine core that hangs is restarted by the supervisor", "use --hang-timeout-s and --max-restarts",
        {"watchdog_config": _EMPTY},
    ),
    Missing(
        "this is a server setting", "pass it to quire serve",
        {"enable_log_requests": _OFF, "otlp_traces_endpoint": _NONE},
    ),
    Missing(
        "/metrics has one set of metrics and buckets", "see docs/reference/server.md for what it shows",
        {
            "aggregate_engine_logging": _OFF, "kv_cache_metrics": _OFF, "kv_cache_metrics_sample": (None, 0.01),
            "cudagraph_metrics": _OFF, "custom_histogram_buckets": _NONE,
        },
    ),
    Missing(
        "a trace has one span per request and one per phase of it", "use --profile for the time within steps",
        {"collect_detailed_traces": _NONE},
    ),
    Missing(
        "process placement is left to the operating system", "use numactl or taskset",
        {"numa_bind": _OFF, "numa_bind_cpus": _NONE, "numa_bind_nodes": _NONE},
    ),
    Missing(
        "vLLM environment variables without effect are listed in the log", "see the log",
        {"fail_on_environ_validation": _OFF},
    ),
    Missing(
        "request headers are limited in bytes", "use --max-header-bytes",
        {"h11_max_header_count": _NONE},
    ),
)  # fmt: skip

# Settings whose flag takes several values.
SEVERAL = frozenset({
    "allowed_media_domains", "collect_detailed_traces", "cpu_offload_params", "cudagraph_capture_sizes", "device_ids",
    "ignore_patterns", "kv_cache_dtype_skip_layers", "lora_modules", "lora_target_modules", "middleware",
    "numa_bind_cpus", "numa_bind_nodes", "offload_params", "ir_op_priority",
})  # fmt: skip

NO_EFFECT: dict[str, str] = {
    "enable_prompt_tokens_details": "usage always includes cached tokens",
    "enable_request_id_headers": "every response has an X-Request-Id",
    "enable_server_load_tracking": "/load always reports running requests",
    "disable_log_requests": "requests are logged only with enable_log_requests",
    "max_log_len": "prompts and outputs are never written to the log",
    "disable_cascade_attn": "cascade attention is not implemented",
    "show_hidden_metrics_for_version": "no metric is hidden",
    "disable_custom_all_reduce": "ranks exchange tensors in one way, through Quire's own communicator",
    "disable_nccl_for_dp_synchronization": "replicas are not synchronized by NCCL",
    "distributed_timeout_seconds": "a rank that does not respond is ended by --hang-timeout-s",
    "cpu_distributed_timeout_seconds": "a rank that does not respond is ended by --hang-timeout-s",
    "enable_batch_sharded_sampling": "rank 0 samples for all ranks",
    "async_scheduling": "asynchronous scheduling is not used; outputs are the same",
    "optimization_level": "nothing is compiled at startup; small steps are captured unless enforce_eager is set",
    "performance_mode": "use scheduling limits: max_num_seqs, max_decode_slowdown",
    "compilation_config": "nothing is compiled at startup; small steps are captured unless enforce_eager is set",
    "cudagraph_capture_sizes": "steps of up to 256 tokens are captured, each number of tokens once",
    "max_cudagraph_capture_size": "steps of up to 256 tokens are captured, each number of tokens once",
    "enable_flashinfer_autotune": "kernels are not autotuned at startup",
    "max_parallel_loading_workers": "weights are memory-mapped",
    "safetensors_load_strategy": "weights are memory-mapped",
    "safetensors_prefetch_block_size": "weights are memory-mapped",
    "safetensors_prefetch_num_threads": "weights are memory-mapped",
    "use_tqdm_on_load": "progress is shown on terminals",
    "trust_remote_code": "code from model directories is never run",
    "code_revision": "code from model directories is never run",
    "skip_mm_profiling": "Quire supports text input only",
    "allow_deprecated_quantization": "no format of quantized checkpoints is deprecated",
}
"""Settings that any value may be given for: what they ask for is so anyway, or changes no answer; the log says why."""
