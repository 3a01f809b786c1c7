"""The fields that completions and chats share, and the `SamplingParams` they make. No state."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec

from quire.config.server import LimitsConfig
from quire.core.beam_search import checked_spec
from quire.core.engine_messages import MAX_QUEUE_TIMEOUT_S
from quire.core.kv_hints import KV_HINTS
from quire.core.sampling_params import KV_TRANSFER_PARAMS, RequestOutputKind, SamplingParams
from quire.errors import ValidationError
from quire.server.chat.protocol.fields import SamplingFields, shared
from quire.server.chat.protocol.response_format import FIELD, structured_outputs
from quire.server.chat.protocol.warnings import Warnings
from quire.utils.checks import check_float, check_int, out_of_range, shown

MAX_BAD_WORDS_CHARS = 16384
MAX_XARGS_BYTES = 65536
REQUEST_ID = re.compile(r"[\w.:+-]{1,128}", re.ASCII)
NOT_YET: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "ec_transfer_params": (),
    "repetition_detection": (),
    "stream_interval": (1,),
    "watermarking": (False,),
    "routed_experts_prompt_start": (0,),
    "prompt_embeds": (),
    "return_token_offsets": (False,),
    "return_weight_versions": (False,),
    "mm_payload": (),
    "session_id": (),
}
NO_EFFECT = frozenset(
    ("user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "service_tier", "store")
)

# Beside beams the model's own log-probabilities are compared, and nothing is drawn: values that ask for nothing else.
UNUSED_BY_BEAMS: dict[str, tuple[Any, ...]] = {
    "temperature": (None, 0),
    "top_p": (None, 1),
    "top_k": (None, 0, -1),
    "min_p": (None, 0),
    "seed": (None,),
}


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What a stream says besides its text."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class GenerationFields(SamplingFields, kw_only=True):
    """Fields of both; None is "not given". Names, defaults and meaning are those of `SamplingParams` and of OpenAI.

    Attributes:
        form_field: what the client's API calls `response_format`.
    """

    form_field: ClassVar[str] = FIELD

    model: str | None = None
    n: int | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: list[int] | None = None
    echo: bool | None = None
    stream_options: StreamOptions | None = None
    add_special_tokens: bool | None = None
    return_progress: bool | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    return_prompt_text: bool | None = None
    response_format: dict[str, Any] | None = None
    kv_transfer_params: dict[str, Any] | None = None
    kv_hints: dict[str, Any] | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    early_stopping: bool | str | None = None


def sampling_params(
    request: GenerationFields,
    defaults: Mapping[str, Any],
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    """How the tokens of `request` are chosen.

    Args:
        defaults: the model's own, for what the request leaves open.
        max_tokens: None = as many as fit the model.

    Raises:
        ValidationError: a value is out of range.
    """
    given = {name: value for name, value in shared(request, SamplingParams).items() if value is not None}
    if request.use_beam_search:
        _check_beside_beams(request, logprobs)
        defaults = {}  # what the model's makers say of sampling
        given["beam_search"] = checked_spec(
            1 if request.n is None else request.n,
            1.0 if request.length_penalty is None else request.length_penalty,
            request.early_stopping or False,
        )
        given["temperature"] = 0.0
    return SamplingParams.from_optional(
        **{
            **defaults,
            **given,
            "max_tokens": max_tokens,
            "logprobs": logprobs,
            "prompt_logprobs": prompt_logprobs,
            "extra_args": _extra_args(request),
            "structured_outputs": structured_outputs(
                request.response_format, request.structured_outputs, request.form_field
            ),
            "output_kind": RequestOutputKind.DELTA if request.stream else RequestOutputKind.FINAL_ONLY,
        }
    )


def _extra_args(request: GenerationFields) -> dict[str, Any] | None:
    given = {KV_TRANSFER_PARAMS: request.kv_transfer_params, KV_HINTS: request.kv_hints}
    given = {name: value for name, value in given.items() if value}
    return {**(request.vllm_xargs or {}), **given} if given else request.vllm_xargs


def _check_beside_beams(request: GenerationFields, logprobs: int | None) -> None:
    if request.stream:
        raise ValidationError("use_beam_search cannot be streamed", hint="use stream=false", field="stream")
    if logprobs is not None:
        raise ValidationError(
            "logprobs are not available with use_beam_search", hint="leave out logprobs", field="logprobs"
        )


def warn_beside_beams(request: GenerationFields, warnings: Warnings) -> None:
    """Name the fields of sampling that have no effect on a beam search."""
    for name, neutral in UNUSED_BY_BEAMS.items() if request.use_beam_search else ():
        if getattr(request, name) not in neutral:
            warnings.add(name, f"{name} has no effect: use_beam_search compares log-probabilities and draws nothing")


def check_common(request: GenerationFields, limits: LimitsConfig, num_prompts: int = 1) -> None:
    """Refuse what is too much or contradicts itself, before anything is computed.

    Raises:
        ValidationError, UnsupportedError: the field is named.
    """
    n = check_int("n", 1 if request.n is None else request.n, 1, limits.max_answers)
    if n * num_prompts > limits.max_answers:
        raise out_of_range("n", n, f"at most {limits.max_answers // num_prompts} with {num_prompts} prompts")
    stops = [request.stop] if isinstance(request.stop, str) else request.stop or []
    _check_count("stop", len(stops), limits.max_stop_strings)
    if any(len(stop) > limits.max_stop_chars for stop in stops):
        raise ValidationError(f"a stop string is longer than {limits.max_stop_chars} characters", field="stop")
    for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
        _check_count(name, len(getattr(request, name) or ()), limits.max_id_entries)
    if sum(map(len, request.bad_words or ())) > MAX_BAD_WORDS_CHARS:
        raise ValidationError(f"bad_words has more than {MAX_BAD_WORDS_CHARS} characters in total", field="bad_words")
    if request.vllm_xargs and len(msgspec.json.encode(request.vllm_xargs)) > MAX_XARGS_BYTES:
        raise ValidationError(f"vllm_xargs has more than {MAX_XARGS_BYTES} bytes", field="vllm_xargs")
    if request.kv_transfer_params and len(msgspec.json.encode(request.kv_transfer_params)) > MAX_XARGS_BYTES:
        raise ValidationError(f"kv_transfer_params has more than {MAX_XARGS_BYTES} bytes", field="kv_transfer_params")
    if request.kv_hints and len(msgspec.json.encode(request.kv_hints)) > MAX_XARGS_BYTES:
        raise ValidationError(f"kv_hints has more than {MAX_XARGS_BYTES} bytes", field="kv_hints")
    for name, neutral in (("length_penalty", 1.0), ("early_stopping", False)):
        if not request.use_beam_search and getattr(request, name) not in (None, neutral):
            raise ValidationError(f"{name} needs use_beam_search=true", hint=f"leave out {name}", field=name)
    if request.stream_options is not None and not request.stream:
        raise ValidationError("stream_options needs stream=true", hint="leave it out", field="stream_options")
    if request.return_progress and not request.stream:
        raise ValidationError("return_progress needs stream=true", hint="leave it out", field="return_progress")
    check_truncation(request)
    if request.request_id is not None and not REQUEST_ID.fullmatch(request.request_id):
        raise ValidationError(
            f"request_id={shown(request.request_id)}: 1 to 128 letters, digits, _ - . : + are allowed",
            field="request_id",
        )
    if request.priority is not None:
        check_int("priority", request.priority)
    if request.queue_timeout is not None:
        check_float("queue_timeout", request.queue_timeout, minimum=0.0, maximum=MAX_QUEUE_TIMEOUT_S)
    if request.prompt_logprobs is not None:
        check_int("prompt_logprobs", request.prompt_logprobs, -1)
        if request.stream and request.prompt_logprobs != 0:
            raise ValidationError(
                "prompt_logprobs cannot be streamed", hint="use stream=false", field="prompt_logprobs"
            )


def check_truncation(request: GenerationFields) -> None:
    """Refuse a truncation of the prompt that there is not.

    Raises:
        ValidationError: the field is named.
    """
    if request.truncate_prompt_tokens is not None:
        check_int("truncate_prompt_tokens", request.truncate_prompt_tokens, -1)
    if request.truncation_side not in (None, "left", "right"):
        raise ValidationError("truncation_side must be left or right", field="truncation_side")


def _check_count(name: str, count: int, limit: int) -> None:
    if count > limit:
        raise ValidationError(f"{name} has {count} entries, at most {limit} are allowed", field=name)
