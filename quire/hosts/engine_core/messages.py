"""Messages of vLLM's EngineCore protocol as types, and their encoding. Made and read by `WireCore`; nothing is kept.

Fields, order and defaults are those of `vllm/v1/engine/__init__.py` (vLLM 0.33); structs are arrays, records are maps.
What comes from the socket is checked against these types; a field that is not served is kept as it came, and refused
by `requests` where it asks for something.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import msgspec
import numpy as np

from quire.core.logprobs import LogprobsArrays
from quire.errors import MessageError

MAX_PAYLOAD_BYTES = 256 << 20
RAW_VIEW = 3
"""Number of the msgpack extension whose content is an array's bytes."""
CORE_DEAD = b"ENGINE_CORE_DEAD"
"""Last message of a core that has stopped for good."""
FAULT_TOLERANCE_METHOD = "handle_ft_command"


class RequestType(Enum):
    """First frame of a message to the core."""

    ADD = b"\x00"
    ABORT = b"\x01"
    START_DP_WAVE = b"\x02"
    UTILITY = b"\x03"


class CoreRequest(msgspec.Struct, array_like=True, omit_defaults=True):
    """A request, as the front end sends it.

    Attributes:
        sampling_params: by name, with fields at their defaults left out; checked by `requests.sampling_params`.
        client_index: which of several front ends sent it, and gets its outputs.
        abort_immediately: add it, and end it at once, so that a KV connector lets go of what it holds for it.
    """

    request_id: str
    prompt_token_ids: list[int] | None = None
    mm_features: Any = None
    sampling_params: dict[str, Any] | None = None
    pooling_params: Any = None
    arrival_time: float = 0.0
    lora_request: Any = None
    cache_salt: str | None = None
    data_parallel_rank: int | None = None
    prompt_embeds: Any = None
    prompt_is_token_ids: Any = None
    client_index: int = 0
    current_wave: int = 0
    priority: int = 0
    trace_headers: Any = None
    resumable: bool = False
    external_req_id: str | None = None
    reasoning_ended: bool | None = None
    reasoning_parser_kwargs: Any = None
    abort_immediately: bool = False
    session_id: Any = None
    kv_hints: Any = None


class UtilityRequest(msgspec.Struct, array_like=True):
    """A call that is not about a request."""

    client_index: int
    call_id: int
    method: str
    args: list[Any] = []


class RequestError(msgspec.Struct, omit_defaults=True):
    """Why a request ended with reason error; `code` "validation_error" is the caller's mistake."""

    message: str
    code: str = "internal_error"
    retryable: bool = False


class CoreEvent(msgspec.Struct):
    """QUEUED 1, SCHEDULED 2, PREEMPTED 3; seconds on this process's monotonic clock."""

    type: int
    timestamp: float


class PrefillStats(msgspec.Struct):
    """Where the tokens of a prompt came from."""

    num_prompt_tokens: int
    num_computed_tokens: int
    num_cached_tokens: int
    num_local_cached_tokens: int
    num_external_cached_tokens: int = 0
    num_cache_creation_tokens: int = 0


class CacheStats(msgspec.Struct):
    """What was looked up in the prefix cache since the last record: requests, tokens, tokens found."""

    requests: int = 0
    queries: int = 0
    hits: int = 0
    reset: bool = False
    preempted_requests: int = 0
    preempted_queries: int = 0
    preempted_hits: int = 0


class DraftingStats(msgspec.Struct):
    """What became of drafts in a step."""

    num_spec_tokens: int
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = []


class CoreStats(msgspec.Struct):
    """The scheduler after a step; `num_running_reqs` and `num_waiting_reqs` of all front ends."""

    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    num_skipped_waiting_reqs: int = 0
    step_counter: int = 0
    current_wave: int = 0
    kv_cache_usage: float = 0.0
    prefix_cache_stats: CacheStats = msgspec.field(default_factory=CacheStats)
    connector_prefix_cache_stats: CacheStats | None = None
    kv_cache_eviction_events: list[Any] = []
    spec_decoding_stats: DraftingStats | None = None
    kv_connector_stats: dict[str, Any] | None = None
    waiting_lora_adapters: dict[str, int] = {}
    running_lora_adapters: dict[str, int] = {}
    cudagraph_stats: None = None
    perf_stats: None = None


class CoreOutput(msgspec.Struct, array_like=True, omit_defaults=True):
    """What a step gave one request.

    Attributes:
        new_logprobs: (token ids, log-probabilities, ranks of the sampled tokens), each an array of `array`.
        new_prompt_logprobs: the same of the prompt's tokens but the first, as tensors of `tensor`.
        finish_reason: 0 stop, 1 length, 2 abort, 3 error, 4 repetition; None = it goes on.
    """

    request_id: str
    new_token_ids: list[int]
    new_logprobs: Any = None
    new_prompt_logprobs: Any = None
    pooling_output: None = None
    finish_reason: int | None = None
    stop_reason: int | str | None = None
    events: list[CoreEvent] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    ec_transfer_params: None = None
    trace_headers: None = None
    prefill_stats: PrefillStats | None = None
    routed_experts: None = None
    num_nans_in_logits: int = 0
    mm_cache_miss_hashes: None = None
    new_sampling_mask: None = None
    spec_decode_metrics: None = None
    prompt_token_id_logprobs: None = None
    error: RequestError | None = None


class UtilityOutput(msgspec.Struct, array_like=True):
    """Answer to a `UtilityRequest`; `result` is (None, value): no type is to be imported to read it."""

    call_id: int
    failure_message: str | None = None
    result: tuple[None, Any] | None = None


class CoreOutputs(msgspec.Struct, array_like=True, omit_defaults=True):
    """One message from the core."""

    engine_index: int = 0
    outputs: list[CoreOutput] = []
    scheduler_stats: CoreStats | None = None
    timestamp: float = 0.0
    utility_output: UtilityOutput | None = None
    finished_requests: list[str] | None = None


class Addresses(msgspec.Struct):
    """Where front ends send requests from and take outputs, one of each for every front end."""

    inputs: list[str]
    outputs: list[str]
    coordinator_input: str | None = None
    coordinator_output: str | None = None
    frontend_stats_publish_address: str | None = None


class HandshakeMetadata(msgspec.Struct):
    """The front end's answer to HELLO."""

    addresses: Addresses
    parallel_config: dict[str, Any] = {}


class CoreReady(msgspec.Struct):
    """What a core that can serve sends first on each input socket."""

    max_model_len: int
    num_gpu_blocks: int
    block_size: int
    dtype: str
    vllm_version: str
    max_num_seqs: int
    max_num_batched_tokens: int
    instance_id: str
    kv_cache_size_tokens: int
    kv_cache_max_concurrency: float
    effective_attention_block_size: int
    kv_events_config: dict[str, Any] | None
    dp_stats_address: str | None = None
    world_size: int = 1
    data_parallel_size: int = 1
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    data_parallel_rank: int = 0
    supports_lora: bool = False
    max_loras: int = 0
    mamba_block_size: int | None = None
    weight_transfer_backend: str | None = None
    enable_sleep_mode: bool = False
    supports_draft_weight_updates: bool = False
    coord_store_port: int = 0
    coordinator_input_address: str | None = None
    coordinator_output_address: str | None = None


_encoder = msgspec.msgpack.Encoder()
_decoders: dict[Any, msgspec.msgpack.Decoder[Any]] = {}


def encode(message: Any) -> bytes:
    """The bytes of a message, in one frame."""
    return _encoder.encode(message)


def decode(payload: bytes, kind: Any) -> Any:
    """A message of type `kind`.

    Raises:
        MessageError: the bytes are not one; what is wrong is named by its path.
    """
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise MessageError(f"a message of {len(payload)} bytes exceeds the limit of {MAX_PAYLOAD_BYTES}")
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.msgpack.Decoder(kind)
    try:
        return decoder.decode(payload)
    except (msgspec.DecodeError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise MessageError(f"malformed message: {error}") from None


def request_name(payload: bytes) -> tuple[str, int] | None:
    """(request id, client index) of an ADD that cannot be read, as far as it says; None = it does not say whose."""
    try:
        fields = msgspec.msgpack.decode(payload)
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None
    if not isinstance(fields, list) or not fields or not isinstance(fields[0], str):
        return None
    client = fields[11] if len(fields) > 11 and type(fields[11]) is int else 0
    return fields[0], client


def array(values: np.ndarray) -> tuple[str, tuple[int, ...], msgspec.msgpack.Ext]:
    """A numpy array: (type as numpy writes it, shape, bytes)."""
    return values.dtype.str, values.shape, msgspec.msgpack.Ext(RAW_VIEW, np.ascontiguousarray(values).tobytes())


def tensor(values: np.ndarray) -> tuple[str, tuple[int, ...], msgspec.msgpack.Ext]:
    """As `array`, with the type's name in torch."""
    return values.dtype.name, values.shape, msgspec.msgpack.Ext(RAW_VIEW, np.ascontiguousarray(values).tobytes())


def logprobs_of(lines: LogprobsArrays, num_top: int, as_array: Any) -> tuple[Any, Any, Any, None]:
    """Lines of log-probabilities with `num_top` tokens besides the sampled one, each part encoded by `as_array`."""
    width = min(num_top + 1, lines.token_ids.shape[1])
    return (
        as_array(lines.token_ids[:, :width]), as_array(lines.logprobs[:, :width]), as_array(lines.ranks[:, 0]), None,
    )  # fmt: skip
