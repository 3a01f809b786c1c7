"""From a request as vLLM's front end sends it to what this engine takes; everything is honoured or refused by name.

Called by `WireCore` for each request. Pure functions; the engine's own checks follow in `FrontEnd.prepare`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from quire.core.request_options import RequestOptions
from quire.core.sampling_checks import MAX_TOKEN_ID
from quire.core.sampling_params import SamplingParams
from quire.errors import UnsupportedError, ValidationError
from quire.hosts.engine_core.messages import CoreRequest
from quire.hosts.parameters import FROM_OUTSIDE, NEUTRAL
from quire.utils.checks import check_int, shown

# The front end's own business: text, and how it hands out what it gets.
OF_THE_FRONT_END = frozenset({
    "stop", "include_stop_str_in_output", "detokenize", "skip_special_tokens", "spaces_between_special_tokens",
    "output_kind", "output_text_buffer_length", "skip_clone", "stream_interval", "flat_logprobs", "n",
    "_real_n", "_all_stop_token_ids", "_eos_token_id", "_bad_words_token_ids", "bad_words", "ignore_eos",
})  # fmt: skip
# The engine's settings decide whether texts are marked; with True, which is the default, a request allows it.
ALLOWANCES = frozenset({"watermarking"})
# Parts of a request that this engine does not have, and what to do about it.
NOT_SERVED: Mapping[str, str] = {
    "mm_features": "send text only",
    "pooling_params": "ask for a completion",
    "lora_request": "merge the adapter into the weights",
    "prompt_embeds": "send token ids",
    "prompt_is_token_ids": "send token ids",
    "resumable": "send the whole prompt at once",
}
MAX_BAD_WORDS = 1024


def check_served(request: CoreRequest, rank: int) -> None:
    """Refuse a request that asks for what is not there.

    Args:
        rank: of this engine among data parallel ones.

    Raises:
        UnsupportedError: it does; the field is named.
        ValidationError: it has no prompt or no sampling parameters, or is another rank's.
    """
    for name, instead in NOT_SERVED.items():
        if getattr(request, name) not in NEUTRAL:
            raise UnsupportedError(f"{name} is not supported by this engine", hint=instead, field=name)
    if request.prompt_token_ids is None or request.sampling_params is None:
        missing = "prompt_token_ids" if request.prompt_token_ids is None else "sampling_params"
        raise ValidationError(f"{missing} is missing", hint="give both", field=missing)
    if request.data_parallel_rank not in (None, rank):
        raise ValidationError(
            f"data_parallel_rank={request.data_parallel_rank}, but this engine has rank {rank}",
            hint="leave it out",
            field="data_parallel_rank",
        )


def request_options(request: CoreRequest) -> RequestOptions:
    """How the engine is to treat it."""
    return RequestOptions(priority=request.priority, cache_salt=request.cache_salt, add_special_tokens=False)


def sampling_params(given: Mapping[str, Any], eos_token_id: int) -> SamplingParams:
    """Parameters of one sequence without text: stop strings are searched by the front end.

    Args:
        eos_token_id: this engine's own end of a sequence; one that the front end names beside it ends sequences, too.

    Raises:
        ValidationError, UnsupportedError: a value is wrong or not honoured; the field is named.
    """
    values = {name: value for name, value in given.items() if name not in OF_THE_FRONT_END | ALLOWANCES}
    for name in [name for name in values if name not in FROM_OUTSIDE]:
        value = values.pop(name)
        if value not in NEUTRAL:
            raise UnsupportedError(
                f"{name}={shown(value)}: this engine does not have the sampling parameter {name}",
                hint=f"leave out {name}",
                field=name,
            )
    if values.get("structured_outputs") is not None:
        values["structured_outputs"] = _constraint(values["structured_outputs"])
    if not values.get("extra_args"):
        values.pop("extra_args", None)
    named = given.get("_eos_token_id")
    values["ignore_eos"] = named is None  # which is how the front end says it
    params = SamplingParams.from_dict({**values, "detokenize": False})
    if named not in (None, eos_token_id):
        params.stop_token_ids = [*(params.stop_token_ids or []), check_int("_eos_token_id", named, 0, MAX_TOKEN_ID)]
    params.bad_words_token_ids = _bad_words(given) or None
    return params


def _constraint(value: Any) -> Any:
    """Without what vLLM notes there for itself."""
    if not isinstance(value, dict):
        return value
    return {
        name: one
        for name, one in value.items()
        if not (isinstance(name, str) and name.startswith("_")) and one is not None
    }


def _bad_words(given: Mapping[str, Any]) -> list[list[int]]:
    """Token forms of the words that must not be completed, which the front end has made."""
    try:
        words = msgspec.convert(given.get("_bad_words_token_ids") or [], list[list[int]])
    except msgspec.ValidationError as error:
        raise ValidationError(f"bad_words: {error}", hint="give lists of token ids", field="bad_words") from None
    if given.get("bad_words") and not words:
        raise ValidationError(
            "bad_words came without their token ids", hint="send _bad_words_token_ids", field="bad_words"
        )
    if len(words) > MAX_BAD_WORDS or not all(words):
        raise ValidationError(
            f"bad_words has more than {MAX_BAD_WORDS} forms, or an empty one", hint="give fewer", field="bad_words"
        )
    return words
