"""Checks of the parts of `SamplingParams` that are lists, maps or free values. Called by it alone; no state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from quire.errors import ValidationError
from quire.utils.checks import INT64_MAX, INT64_MIN, check_float, check_int, out_of_range, wrong_type

MAX_TOKEN_ID = 2**31 - 1
MAX_ID_CHARS = 20
MAX_EXTRA_ARGS_DEPTH = 16
BIAS_LIMIT = 100.0


def is_one_of(value: object, allowed: tuple[Any, ...]) -> bool:
    """True when `value` equals an allowed value of the same type (so 0 is not False)."""
    return any(type(value) is type(one) and value == one for one in allowed)


def texts(field: str, value: Any) -> list[str] | None:
    """`value`, a text or a list of texts, as a list; None when there are none."""
    if value is None:
        return None
    if not isinstance(value, (str, list, tuple)):
        raise wrong_type(field, value, "a string or a list of strings")
    items = [value] if isinstance(value, str) else list(value)
    for index, item in enumerate(items):
        if not isinstance(item, str):
            raise wrong_type(f"{field}[{index}]", item, "a string")
        if not item:
            raise ValidationError(f"{field}[{index}] is an empty string", hint=f"remove it from {field}", field=field)
    return items or None


def count_of_logprobs(field: str, value: Any) -> int:
    """`value` as a count of log-probabilities: True is 1, -1 is the whole vocabulary."""
    if value is True:
        return 1
    if value is False:
        raise wrong_type(field, value, "an integer of at least -1", hint=f"leave out {field} to get none")
    return check_int(field, value, -1)


def bias(value: Any) -> dict[int, float]:
    """`value` as token id -> finite number."""
    if not isinstance(value, Mapping):
        raise wrong_type("logit_bias", value, "a dict of token id to number")
    return {
        check_int("logit_bias key", token_id, 0, MAX_TOKEN_ID): check_float(f"logit_bias[{token_id}]", number)
        for token_id, number in value.items()
    }


def _id_of(key: Any) -> Any:
    """A key of `logit_bias` as a token id, where it is the text of one; one of thousands of digits stays a text."""
    is_id = isinstance(key, str) and key.isdecimal() and len(key) <= MAX_ID_CHARS
    return int(key) if is_id else key


def clamped_bias(value: Mapping[Any, Any]) -> dict[int, float]:
    """`value` with text ids made ints and numbers clamped to [-100, 100]."""
    as_ids = {_id_of(key): item for key, item in value.items()}
    if len(as_ids) < len(value):
        raise ValidationError("logit_bias names a token id twice", hint="give each id once", field="logit_bias")
    return {key: min(BIAS_LIMIT, max(-BIAS_LIMIT, item)) for key, item in bias(as_ids).items()}


def check_plain(field: str, value: Any, depth: int = 0) -> None:
    """Raise unless `value` is made of None, bools, 64-bit ints, floats, texts, lists and dicts with text keys."""
    if depth > MAX_EXTRA_ARGS_DEPTH:
        raise ValidationError(
            f"{field} is nested too deeply", hint=f"use at most {MAX_EXTRA_ARGS_DEPTH} levels", field=field
        )
    if isinstance(value, int) and not INT64_MIN <= value <= INT64_MAX:
        raise out_of_range(field, value, "a 64-bit integer")
    if isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise wrong_type(f"a key of {field}", key, "a string")
            check_plain(f"{field}[{key!r}]", item, depth + 1)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            check_plain(f"{field}[{index}]", item, depth + 1)
    elif value is not None and not isinstance(value, (bool, int, float, str)):
        raise wrong_type(field, value, "plain data (numbers, strings, lists, dicts)")


def check_vocabulary(field: str, ids: Iterable[int] | None, vocab_size: int) -> None:
    """Raise when an id is not below `vocab_size`."""
    for token_id in ids or ():
        if token_id >= vocab_size:
            raise out_of_range(f"a token id of {field}", token_id, f"in [0, {vocab_size - 1}] for this model")


def check_num_logprobs(field: str, count: int | None, vocab_size: int, max_logprobs: int) -> None:
    """Raise when more log-probabilities are asked for than the engine or the vocabulary allows."""
    if count is None:
        return
    limit = vocab_size if max_logprobs == -1 else max_logprobs
    asked = vocab_size if count == -1 else count
    if asked > limit:
        raise ValidationError(
            f"{field}={count} asks for {asked} log-probabilities per token, but the engine allows at most {limit}",
            hint=f"use {field} <= {limit}, or start the engine with max_logprobs={asked}",
            field=field,
        )
