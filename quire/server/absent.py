"""Paths that clients of OpenAI and vLLM ask and that this server does not have, and why. No state."""

from __future__ import annotations

from quire.server.http.errors import ApiError, ErrorKind

NOT_SERVED = ErrorKind(404, "NotFoundError", "not_found", "not_supported")
NO_PATH = ErrorKind(404, "NotFoundError", "not_found")

POOLING = "it needs a model that embeds, ranks or classifies; this one generates text"
LORA = "adapters (LoRA) are not supported yet"
PAUSES = "the engine cannot sleep, be paused or be given other weights while it runs; restart the server"
PROFILES = "profiles are not taken over HTTP; see quire replay and the receipts of --enable-per-request-metrics"
SPLIT = "prompts and answers are made by the same server here; send the request itself"
REASONS = {
    POOLING: (
        "embeddings", "embed", "pooling", "classify", "score", "rerank", "generative_scoring", "decisions", "systemone",
    ),
    "it needs a model that hears or speaks; this one reads and writes text": ("audio", "realtime"),
    "it needs a model that makes images or videos; this one writes text": ("images", "videos"),
    "there is no moderation model": ("moderations",),
    "files are not kept; quire run-batch takes one of requests from the command line": ("files", "uploads", "batches"),
    "it is of OpenAI's own platform": (
        "assistants", "threads", "vector_stores", "fine_tuning", "conversations", "containers", "evals", "organization",
    ),
    LORA: ("load_lora_adapter", "unload_lora_adapter"),
    PAUSES: (
        "sleep", "wake_up", "is_sleeping", "pause", "resume", "is_paused", "collective_rpc",
        "init_weight_transfer_engine",
        "start_weight_update", "update_weights", "finish_weight_update", "scale_elastic_ep", "is_scaling_elastic_ep",
        "fault_tolerance", "release_kv_cache_memory", "abort_requests", "get_world_size",
    ),
    PROFILES: ("start_profile", "stop_profile"),
    SPLIT: ("render", "derender", "inference"),
    "there is no cache of media": ("reset_mm_cache", "reset_encoder_cache"),
    "without API keys anybody could ask it; give the server an operator's key": ("reset_prefix_cache", "server_info"),
    "the page loads scripts from elsewhere; see /docs": ("redoc",),
}  # fmt: skip
BY_NAME = {name: reason for reason, names in REASONS.items() for name in names}


def no_such_path(path: str) -> ApiError:
    """The refusal of a path that no route has."""
    names = [name for name in path.strip("/").split("/") if name not in ("v1", "v2", "cohere")]
    for name in (*names[:1], *names[-1:]):
        if name in BY_NAME:
            return ApiError(NOT_SERVED, f"this server does not serve {path[:80]}: {BY_NAME[name]}")
    return ApiError(NO_PATH, f"there is no path {path[:80]}; /docs lists those that there are")
