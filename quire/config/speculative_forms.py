"""From vLLM's forms of `speculative_config` to a `SpeculativeConfig`: every key of vLLM 0.33 is used or named.

The JSON text (or the word `off`), and the shorthands `spec_method`, `spec_model` and `spec_tokens`. Called by
`config.engine` and `config.build`. Pure; names and neutral values are facts of vLLM.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from typing import Any

from quire.config.base import check_settings, setting, settings_of
from quire.config.speculative import ALIASES, FIELD, MAX_TOKENS, MODEL_METHODS, OFF, SpeculativeConfig, config_error
from quire.errors import ConfigError, UnsupportedError, nearest
from quire.utils.checks import shown

_NONE: tuple[Any, ...] = (None,)
_OFF: tuple[Any, ...] = (None, False)
_SHARED = "it is computed like the target", "leave it out"
_DRAFTER = "it is of a drafter that Quire does not compute", "leave it out"
_TESTING = "acceptance is never made up", "leave it out"
# Key -> the values that ask for nothing, why there is no more, what to do instead.
REFUSED: dict[str, tuple[tuple[Any, ...], str, str]] = {
    "draft_tensor_parallel_size": ((None, 1), "the model that drafts is divided as the target is", "leave it out"),
    "tensor_parallel_size": ((None, 1), "the model that drafts is divided as the target is", "leave it out"),
    "use_heterogeneous_vocab": (_OFF, "drafts are token ids of the target", "use a draft model of its vocabulary"),
    "parallel_drafting": (_OFF, *_DRAFTER),
    "dspark_draft_topk": (_NONE, *_DRAFTER),
    "xpress_topc": (_NONE, *_DRAFTER),
    "index_share_for_mtp_iteration": (_OFF, *_DRAFTER),
    "synthetic_acceptance_rates": (_NONE, *_TESTING),
    "synthetic_acceptance_length": (_NONE, *_TESTING),
    "moe_backend": ((None, "auto"), *_SHARED),
    "attention_backend": ((None, "auto"), *_SHARED),
    "kv_cache_dtype": ((None, "auto"), *_SHARED),
    "draft_load_config": ((None, {}), "it is loaded like the target", "leave it out"),
    "disable_by_batch_size": (
        _NONE, "the number of drafts follows from measured costs", "leave it out, or use enable_adaptive_verification",
    ),
}  # fmt: skip
NO_EFFECT: dict[str, str] = {
    "enforce_eager": "the setting enforce_eager is that of drafts, too",
    "code_revision": "code from model directories is never run",
    "disable_padded_drafter_batch": "batches of drafts are never padded",
    "disable_eagle_block_drop": "the prefix cache loses no block to drafts",
    "disable_lookahead_block_hashes": "only accepted tokens are hashed",
    "use_local_argmax_reduction": "logits are reduced in one way on any number of ranks",
    "num_speculative_tokens_per_batch_size": "the number of drafts of a step follows from measured costs",
}
KEYS = tuple(field.name for field in settings_of(SpeculativeConfig))
_MODEL_AS_METHOD = {"ngram": "ngram", "[ngram]": "ngram", "suffix": "suffix"}
_HINT = 'for example {"method": "suffix"}, or off'


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationSettings:
    """Speculative decoding: several tokens of a request in one step, where they can be guessed."""

    speculative_config: str | None = setting(
        None, "JSON object: how tokens are guessed ahead (-sc; keys below, as in vLLM); off = not at all.", is_json=True
    )
    spec_method: str | None = setting(
        None, "The key method of speculative_config: ngram, suffix, draft_model, eagle, eagle3, medusa, mtp, two of "
        "them divided by a comma, or off.",
    )  # fmt: skip
    spec_model: str | None = setting(None, "The key model of speculative_config.")
    spec_tokens: int | None = setting(
        None, "The key num_speculative_tokens of speculative_config.", minimum=1, maximum=MAX_TOKENS
    )

    def __post_init__(self) -> None:
        check_settings(self)
        parse_speculation(self)


@functools.lru_cache(maxsize=8)
def parse_speculation(settings: SpeculationSettings) -> tuple[SpeculativeConfig | None, tuple[str, ...]]:
    """(what is to be guessed, None = nothing was said of it; what the user should know of keys without effect).

    Raises:
        ConfigError, UnsupportedError: not an object or `off`, an unknown key, or a value that cannot be.
    """
    values = _with_shorthands(_object(settings.speculative_config), settings)
    if not values:
        return None, ()
    notes = [f"{FIELD}.{name} has no effect: {NO_EFFECT[name]}" for name in values if name in NO_EFFECT]
    notes += [
        f"{FIELD}: method {name} is a deprecated name of {ALIASES[name]}"
        for name in _texts(values.get("method")) if name in ALIASES
    ]  # fmt: skip
    return SpeculativeConfig(**_known(values)), tuple(notes)


def _object(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    if text.strip() == OFF:
        return {"method": OFF}
    try:
        values = json.loads(text)
    except (ValueError, RecursionError):
        values = text
    if values == OFF or values is False:
        return {"method": OFF}
    if not isinstance(values, dict):
        raise ConfigError(f"{FIELD}={shown(text)} is not a JSON object", hint=_HINT, field=FIELD)
    return values


def _with_shorthands(values: dict[str, Any], settings: SpeculationSettings) -> dict[str, Any]:
    """`values` with what the shorthands give, and with a method where only a model is given."""
    merged = {name: value for name, value in values.items() if value is not None}
    shorthands = {
        "method": settings.spec_method, "model": settings.spec_model, "num_speculative_tokens": settings.spec_tokens
    }  # fmt: skip
    for name, value in shorthands.items():
        if value is None:
            continue
        if name in merged and merged[name] != value:
            raise ConfigError(
                f"{FIELD} and its shorthand both give {name}: {shown(merged[name])} and {shown(value)}",
                hint="give it once", field=FIELD,
            )  # fmt: skip
        merged[name] = value
    return _with_method(merged) if merged else merged


def _with_method(values: dict[str, Any]) -> dict[str, Any]:
    model = values.get("model")
    named = _MODEL_AS_METHOD.get(model) if isinstance(model, str) else None
    if named is not None and values.get("method", named) == named:
        return {**{name: value for name, value in values.items() if name != "model"}, "method": named}
    if values.get("method") == "":
        raise config_error("method is an empty string", _HINT)
    if "method" in values:
        return values
    if model is None:
        raise config_error("neither method nor model is given", _HINT)
    return {**values, "method": MODEL_METHODS[0]}


def _known(values: dict[str, Any]) -> dict[str, Any]:
    """`values` without keys that ask for nothing; refuses the others that are not a key."""
    kept = {}
    for name, value in values.items():
        if name in KEYS:
            kept[name] = value
        elif name in REFUSED:
            neutral, why, instead = REFUSED[name]
            if not any(type(value) is type(one) and value == one for one in neutral):
                raise UnsupportedError(
                    f"{FIELD}: {name}={shown(value)} is not supported: {why}", hint=instead, field=FIELD
                )
        elif name.startswith("fly_"):
            raise UnsupportedError(f"{FIELD}: {name} is not supported: {_DRAFTER[0]}", hint=_DRAFTER[1], field=FIELD)
        elif name not in NO_EFFECT:
            close = nearest(name[:100], (*KEYS, *REFUSED, *NO_EFFECT))
            hint = f"did you mean {close!r}?" if close else f"keys are {', '.join(KEYS)}"
            raise ConfigError(f"{FIELD} has no key {shown(name)}", hint=hint, field=FIELD)
    return kept


def _texts(method: Any) -> list[str]:
    """The names in `method`, in whichever form it has."""
    if isinstance(method, str):
        return [name.strip() for name in method.split(",")]
    return [name for name in method if isinstance(name, str)] if isinstance(method, list | tuple) else []
