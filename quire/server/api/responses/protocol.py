"""POST /v1/responses: its fields, and the checks of those that a chat does not have. No state."""

from __future__ import annotations

from typing import Any

import msgspec

from quire.errors import ValidationError
from quire.server.chat.protocol.effort import check_effort
from quire.server.chat.protocol.fields import SamplingFields
from quire.server.chat.protocol.generation import NOT_YET
from quire.server.chat.protocol.reading import RequestFields
from quire.server.chat.protocol.warnings import Warnings
from quire.utils.checks import check_int, shown

LOGPROBS = "message.output_text.logprobs"
NOTHING_TO_INCLUDE = frozenset(
    (
        "reasoning.encrypted_content", "file_search_call.results", "web_search_call.results",
        "web_search_call.action.sources", "computer_call_output.output.image_url", "code_interpreter_call.outputs",
        "message.input_image.image_url",
    )
)  # fmt: skip
TRUNCATIONS = ("disabled", "auto")
SUMMARIES = ("auto", "concise", "detailed")
VERBOSITIES = ("low", "medium", "high")
MAX_METADATA, MAX_METADATA_KEY, MAX_METADATA_VALUE = 16, 64, 512

RESPONSES_NOT_YET: dict[str, tuple[Any, ...]] = {
    **NOT_YET,
    "logprob_token_ids": (),
    "conversation": (),
    "prompt": (),
    "context_management": ([],),
    "moderation": (),
    "background_options": (),
    "access_programs": (),
    "prompt_cache_options": ({},),
    "previous_input_messages": ([],),
    "enable_response_messages": (False,),
    "n": (1,),
}
RESPONSES_NO_EFFECT = frozenset(
    (
        "user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "service_tier", "image",
        "max_tool_calls",
    )
)  # fmt: skip


class TextConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The form of the text: `format` is that of `response_format`, with the schema one level higher."""

    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ReasoningConfig(msgspec.Struct, kw_only=True):
    """How the model is to think."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class ResponseStreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What a stream says besides its events."""

    include_obfuscation: bool | None = None


class ResponsesRequest(SamplingFields, kw_only=True):
    """A turn of a conversation; None is "not given". Fields after `stream_options` mean what they mean in a chat."""

    model: str | None = None
    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | None = None
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    include: list[str] | None = None
    top_logprobs: int | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    background: bool | None = None
    truncation: str | None = None
    stream_options: ResponseStreamOptions | None = None
    stop: str | list[str] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    thinking_token_budget: int | None = None


RESPONSES_FIELDS = RequestFields(ResponsesRequest, RESPONSES_NOT_YET, RESPONSES_NO_EFFECT)


def check_request(request: ResponsesRequest, warnings: Warnings) -> None:
    """Check the values that a chat does not have, and warn of those that have no effect.

    Raises:
        ValidationError: a value is unknown or out of range.
    """
    _check_metadata(request.metadata)
    if request.max_output_tokens is not None:
        check_int("max_output_tokens", request.max_output_tokens, 1)
    if request.stream_options is not None and not request.stream:
        raise ValidationError("stream_options needs stream=true", hint="leave it out", field="stream_options")
    if request.truncation is not None:
        _check_choice("truncation", request.truncation, TRUNCATIONS, "truncation")
    for one in request.include or ():
        if one in NOTHING_TO_INCLUDE:
            warnings.add("include", f"include: {one} has no effect")
        elif one != LOGPROBS:
            raise ValidationError(f"include: {shown(one)} is unknown", hint=f"use {LOGPROBS}", field="include")
    if request.top_logprobs and LOGPROBS not in (request.include or ()):
        raise ValidationError(
            "top_logprobs needs logprobs to be included", hint=f'add include=["{LOGPROBS}"]', field="top_logprobs"
        )
    if request.stream_options is not None and request.stream_options.include_obfuscation:
        _no_effect(warnings, "stream_options.include_obfuscation")
    if request.text is not None and request.text.verbosity is not None:
        _check_choice("text.verbosity", request.text.verbosity, VERBOSITIES, "text")
        if request.text.verbosity != "medium":
            _no_effect(warnings, "text.verbosity")
    reasoning = request.reasoning
    if reasoning is not None:
        if reasoning.effort is not None:
            check_effort("reasoning.effort", reasoning.effort, "reasoning")
        for name in ("summary", "generate_summary"):
            asked = getattr(reasoning, name)
            if asked is not None:
                _check_choice(f"reasoning.{name}", asked, SUMMARIES, "reasoning")
                _no_effect(warnings, f"reasoning.{name}", ": reasoning is returned in full")


def _no_effect(warnings: Warnings, field: str, why: str = "") -> None:
    warnings.add(field, f"{field} has no effect{why}")


def wants_logprobs(request: ResponsesRequest) -> bool:
    """True when tokens are to be returned with their log-probabilities."""
    return LOGPROBS in (request.include or ())


def _check_metadata(metadata: dict[str, str] | None) -> None:
    if metadata is None:
        return
    if len(metadata) > MAX_METADATA:
        raise ValidationError(
            f"metadata has {len(metadata)} entries, at most {MAX_METADATA} are allowed", field="metadata"
        )
    for key, value in metadata.items():
        if len(key) > MAX_METADATA_KEY or len(value) > MAX_METADATA_VALUE:
            raise ValidationError(
                f"metadata: names may have {MAX_METADATA_KEY} characters, values {MAX_METADATA_VALUE}",
                field="metadata",
            )


def _check_choice(where: str, value: str, allowed: tuple[str, ...], field: str) -> None:
    if value not in allowed:
        raise ValidationError(
            f"{where}={shown(value)} is unknown", hint=f"use one of {', '.join(allowed)}", field=field
        )
