"""Request fields that every API has under the same name: declared here once, inherited by the structs of all of them.

A new sampling parameter for clients is one line in `SamplingFields` and its field in `SamplingParams`: each API takes
it, and `shared` carries it from struct to struct. The two are a chain because a struct has one base. No state.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec


class EngineFields(msgspec.Struct, kw_only=True):
    """How the request is scheduled, cached and returned; None is "not given"."""

    stream: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    priority: int | None = None
    queue_timeout: float | None = None
    cache_salt: str | None = None
    return_cache_info: bool | None = None
    request_id: str | None = None
    structured_outputs: dict[str, Any] | None = None
    vllm_xargs: dict[str, Any] | None = None


class SamplingFields(EngineFields, kw_only=True):
    """Sampling parameters, each the field of `SamplingParams` of the same name, after those for the engine."""

    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    no_store: bool | None = None
    skip_reading_prefix_cache: bool | None = None


def shared(request: msgspec.Struct, target: type[msgspec.Struct]) -> dict[str, Any]:
    """Field name -> value in `request`, for each field that `target` has under the same name."""
    return {name: getattr(request, name) for name in _shared_names(type(request), target)}


@cache
def _shared_names(source: type[msgspec.Struct], target: type[msgspec.Struct]) -> tuple[str, ...]:
    return tuple(name for name in source.__struct_fields__ if name in target.__struct_fields__)
