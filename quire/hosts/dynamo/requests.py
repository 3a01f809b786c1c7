"""From a request of Dynamo's preprocessor to what this engine takes; everything is honoured or refused by name.

Called by the worker for each request. Pure functions; no import of `dynamo`. In a request null means unset: the model's
own defaults hold. Stop strings are searched by Dynamo's front end, which ends the request.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from quire.core.request_options import RequestOptions
from quire.core.sampling_params import KV_TRANSFER_PARAMS, RequestOutputKind, SamplingParams
from quire.errors import UnsupportedError, ValidationError
from quire.hosts.parameters import FROM_OUTSIDE, NEUTRAL
from quire.utils.checks import shown

REMOTE_DECODE: Mapping[str, Any] = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
    "remote_host": None, "remote_port": None,
}  # fmt: skip
"""Of a prompt that another engine decodes, in vLLM's form."""
# Fields of `sampling_options` that this engine knows by another name, or need not know, with values that do nothing.
OTHERS: Mapping[str, tuple[Any, ...]] = {
    "use_beam_search": NEUTRAL, "length_penalty": (*NEUTRAL, 1.0), "include_stop_str_in_output": (*NEUTRAL, True),
}  # fmt: skip


class StopConditions(msgspec.Struct):
    """When an answer ends; `stop_token_ids_hidden` are the model's own ends."""

    max_tokens: int | None = None
    min_tokens: int | None = None
    stop_token_ids: list[int] | None = None
    stop_token_ids_visible: list[int] | None = None
    stop_token_ids_hidden: list[int] | None = None
    ignore_eos: bool | None = None
    max_thinking_tokens: int | None = None


class OutputOptions(msgspec.Struct):
    """What is wanted beside the tokens."""

    logprobs: int | None = None
    prompt_logprobs: int | None = None


class GuidedDecoding(msgspec.Struct):
    """A constraint on the output; `backend` is the front end's wish, and this engine chooses by itself."""

    json: Any = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: Any = None
    whitespace_pattern: str | None = None
    backend: Any = None


class WorkerRequest(msgspec.Struct):
    """A `PreprocessedRequest`, as far as it is read."""

    token_ids: list[int]
    sampling_options: dict[str, Any] | None = None
    stop_conditions: StopConditions | None = None
    output_options: OutputOptions | None = None
    prefill_result: dict[str, Any] | None = None
    extra_args: dict[str, Any] | None = None
    nvext: dict[str, Any] | None = None
    routing: dict[str, Any] | None = None
    multi_modal_data: Any = None
    encoder_result: Any = None


def read_request(request: Mapping[str, Any]) -> WorkerRequest:
    """A request with its types checked.

    Raises:
        ValidationError: it is malformed; the place is named.
        UnsupportedError: it asks for what is not there.
    """
    try:
        read = msgspec.convert(dict(request), WorkerRequest)
    except (msgspec.ValidationError, RecursionError, TypeError) as error:
        raise ValidationError(f"malformed request: {error}", field="request") from None
    for name in ("multi_modal_data", "encoder_result"):
        if getattr(read, name) not in NEUTRAL:
            raise UnsupportedError(f"{name} is not supported: this engine takes text", field=name)
    return read


def request_options(request: WorkerRequest, *, has_priorities: bool) -> RequestOptions:
    """How the engine is to treat it. Dynamo's priorities are higher for more important requests, ours lower."""
    salt, priority = None, 0
    for source in (request.nvext, (request.extra_args or {}).get("nvext")):
        if isinstance(source, dict) and isinstance(source.get("cache_salt"), str):
            salt = source["cache_salt"]
    if has_priorities and isinstance((request.routing or {}).get("priority"), int):
        priority = -int((request.routing or {})["priority"])
    return RequestOptions(priority=priority, cache_salt=salt, add_special_tokens=False)


def sampling_params(request: WorkerRequest, defaults: Mapping[str, Any]) -> SamplingParams:
    """Parameters of a request that this worker does from its first token to its last, or from its prefill on.

    Args:
        defaults: the model's own, by name.

    Raises:
        ValidationError, UnsupportedError: a value is wrong or not honoured; the field is named.
    """
    extra = request.extra_args or {}
    passed = extra.get("sampling_options")
    options = {**(request.sampling_options or {}), **(passed if isinstance(passed, dict) else {})}
    values: dict[str, Any] = dict(defaults)
    for name, value in options.items():
        _take_option(values, name, value)
    values.update(_endings(request.stop_conditions or StopConditions()))
    wanted = request.output_options or OutputOptions()
    values.update(logprobs=wanted.logprobs, prompt_logprobs=wanted.prompt_logprobs)
    transfer = _transfer_params(request)
    if transfer is not None:
        values["extra_args"] = {KV_TRANSFER_PARAMS: transfer}
    return SamplingParams.from_optional(**values, detokenize=False, output_kind=RequestOutputKind.DELTA)


def prefill_params() -> SamplingParams:
    """Parameters of a prompt that is computed for another engine, which chooses every token by itself."""
    return SamplingParams(
        temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA,
        extra_args={KV_TRANSFER_PARAMS: dict(REMOTE_DECODE)},
    )  # fmt: skip


def _take_option(values: dict[str, Any], name: str, value: Any) -> None:
    if value is None:
        return
    if name == "n" and value != 1:
        raise UnsupportedError(
            f"n={shown(value)}: a worker answers a request with one sequence, as Dynamo ends it with the first",
            hint="send several requests, each with a seed", field="n",
        )  # fmt: skip
    if name == "guided_decoding":
        values["structured_outputs"] = _constraint(value)
    elif name == "best_of":
        if value != 1:
            raise UnsupportedError("best_of is not supported", hint="use n", field="best_of")
    elif name == "logit_bias" and isinstance(value, dict):
        values[name] = value
    elif name in OTHERS or name not in FROM_OUTSIDE:
        if value not in OTHERS.get(name, NEUTRAL):
            raise UnsupportedError(
                f"{name}={shown(value)}: this engine does not have the sampling option {name}",
                hint=f"leave out {name}",
                field=name,
            )
    else:
        values[name] = value


def _constraint(value: Any) -> dict[str, Any] | None:
    try:
        guided = msgspec.convert(value, GuidedDecoding)
    except msgspec.ValidationError as error:
        raise ValidationError(f"guided_decoding: {error}", field="guided_decoding") from None
    fields = {name: getattr(guided, name) for name in guided.__struct_fields__ if name != "backend"}
    return {name: one for name, one in fields.items() if one is not None} or None


def _endings(stop: StopConditions) -> dict[str, Any]:
    ids = [*(stop.stop_token_ids or []), *(stop.stop_token_ids_visible or [])]
    if not stop.ignore_eos:
        ids += stop.stop_token_ids_hidden or []
    return {
        "max_tokens": stop.max_tokens, "min_tokens": stop.min_tokens, "ignore_eos": stop.ignore_eos,
        "stop_token_ids": list(dict.fromkeys(ids)) or None, "thinking_token_budget": stop.max_thinking_tokens,
    }  # fmt: skip


def _transfer_params(request: WorkerRequest) -> dict[str, Any] | None:
    """What the prefill worker's connector has said of the prompt's blocks, or the caller of any connector."""
    result = (request.prefill_result or {}).get("disaggregated_params")
    given = (result if isinstance(result, dict) else request.extra_args or {}).get(KV_TRANSFER_PARAMS)
    if given is not None and not isinstance(given, dict):
        raise ValidationError("kv_transfer_params must be an object", field=KV_TRANSFER_PARAMS)
    return given
