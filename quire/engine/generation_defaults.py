"""What generation_config.json says: where a turn ends, and how the model's makers would sample.

Read by the engine factory, before weights are loaded. Values only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.core.sampling_params import SamplingParams
from quire.errors import ModelError, QuireClientError

DEFAULTS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """A model's own settings for generation.

    Attributes:
        eos_token_id: the primary end of a turn; -1 = none.
        other_eos_token_ids: further ends of a turn, which act as stop ids.
        sampling: fields of `SamplingParams` that replace its defaults.
    """

    eos_token_id: int = -1
    other_eos_token_ids: tuple[int, ...] = ()
    sampling: dict[str, Any] = field(default_factory=dict)

    def sampling_params(self) -> SamplingParams:
        """Parameters for a request that gives none."""
        return SamplingParams(**self.sampling)


def read_generation_defaults(
    generation_config: Mapping[str, Any],
    tokenizer_eos: int | None,
    arch_eos: Sequence[int],
    vocab_size: int,
    turn_ends: Sequence[int] = (),
) -> GenerationDefaults:
    """The defaults of a model.

    Args:
        generation_config: generation_config.json, {} when there is none.
        tokenizer_eos: the tokenizer's end of text, which is the primary one.
        arch_eos: ends named by config.json, used when generation_config.json names none.
        vocab_size: ids are below this.
        turn_ends: ends that the tokenizer knows beside its end of text; used as `arch_eos`.

    Raises:
        ModelError: a value is malformed or out of range.
    """
    ids = _ids(generation_config.get("eos_token_id")) or [*turn_ends, *arch_eos]
    if tokenizer_eos is not None:
        ids.insert(0, tokenizer_eos)
    wrong = [token_id for token_id in ids if not 0 <= token_id < vocab_size]
    if wrong:
        raise ModelError(
            f"eos_token_id {wrong[0]} is not in the model's vocabulary of {vocab_size}",
            hint="correct generation_config.json or the tokenizer's eos_token",
            field="eos_token_id",
        )
    ids = list(dict.fromkeys(ids))
    return GenerationDefaults(ids[0] if ids else -1, tuple(ids[1:]), _sampling(generation_config))


def _ids(value: Any) -> list[int]:
    values = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(item) is int for item in values):
        raise ModelError(
            f"eos_token_id in generation_config.json is {value!r}; it must be an integer or a list of integers",
            hint="correct generation_config.json",
            field="eos_token_id",
        )
    return list(values)


def _sampling(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    found = {name: generation_config[name] for name in DEFAULTS if generation_config.get(name) is not None}
    if generation_config.get("max_new_tokens") is not None:
        found["max_tokens"] = generation_config["max_new_tokens"]
    try:
        SamplingParams(**found)
    except QuireClientError as error:
        raise ModelError(
            f"generation_config.json: {error.message}",
            hint="correct the file, or ignore it: generation_config='neutral'",
            field=error.field,
        ) from error
    return found
