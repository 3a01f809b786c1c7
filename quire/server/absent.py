"""Paths that clients of OpenAI and vLLM ask and that this server does not have, and why. No state."""

from __future__ import annotations

from quire.server.http.errors import ApiError, ErrorKind

NOT_SERVED = ErrorKind(404, "NotFoundError", "not_found", "not_supported")
NO_PATH = ErrorKind(404, "NotFoundError", "not_found")

POOLING = "embedding, ranking and classification models are not supported; this model generates text"
LORA = "adapters (LoRA) are not supported yet"
TRANSFERS = "weights come from a directory, by /update_weights; see /pause and /sleep too"
STEPS = "it needs an operator API key (--api-key-file), or --enable-sleep-mode"
SLEEPS = "sleep mode is off; start the server with --enable-sleep-mode"
PROFILES = "profiling is off; start the server with --profile DIR and API keys (--api-key-file)"
SPLIT = "prefill and decode run in the same server; send the request itself"
REASONS = {
    POOLING: (
        "embeddings", "embed", "pooling", "classify", "score", "rerank", "generative_scoring", "decisions", "systemone",
    ),
    "audio models are not supported; this model reads and writes text": ("audio", "realtime"),
    "image and video models are not supported; this model writes text": ("images", "videos"),
    "moderation is not supported": ("moderations",),
    "file storage is not supported; run a file of requests with quire run-batch": ("files", "uploads", "batches"),
    "it is part of OpenAI's own platform": (
        "assistants", "threads", "vector_stores", "fine_tuning", "conversations", "containers", "evals", "organization",
    ),
    LORA: ("load_lora_adapter", "unload_lora_adapter"),
    TRANSFERS: (
        "init_weight_transfer_engine", "shutdown_weight_transfer_engine", "start_weight_update",
        "start_draft_weight_update", "finish_weight_update", "update_weight_version", "weight_checker",
        "get_world_size",
    ),
    "workers are not called over HTTP; use LLM.collective_rpc in Python": ("collective_rpc",),
    "close the connection of a request to end it": ("abort_requests",),
    "the KV cache is given back together with the weights; use /sleep": ("release_kv_cache_memory",),
    "replicas change their number while they serve, without a state between; see /scale_elastic_ep": (
        "is_scaling_elastic_ep",
    ),
    "engine cores that die are restarted anyway; see /health and /debug/state": ("fault_tolerance",),
    "KV-cache events come from the address in --kv-events-config": ("kv_event_sources",),
    STEPS: ("pause", "resume", "is_paused"),
    SLEEPS: ("sleep", "wake_up", "is_sleeping"),
    PROFILES: ("start_profile", "stop_profile"),
    SPLIT: ("render", "derender", "inference"),
    "there is no media cache": ("reset_mm_cache", "reset_encoder_cache"),
    "it needs an operator API key; configure API keys (--api-key-file)": (
        "reset_prefix_cache", "server_info", "scale_elastic_ep", "restart_replicas",
        "update_weights", "weight_info",
    ),
    "that page would load external scripts; see /docs": ("redoc",),
}  # fmt: skip
BY_NAME = {name: reason for reason, names in REASONS.items() for name in names}


def no_such_path(path: str) -> ApiError:
    """The refusal of a path that no route has."""
    names = [name for name in path.strip("/").split("/") if name not in ("v1", "v2", "cohere")]
    for name in (*names[:1], *names[-1:]):
        if name in BY_NAME:
            return ApiError(NOT_SERVED, f"{path[:80]} is not supported by this server: {BY_NAME[name]}")
    return ApiError(NO_PATH, f"not found: {path[:80]}; see /docs for the known paths")
