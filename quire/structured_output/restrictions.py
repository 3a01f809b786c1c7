"""What a request forbids besides its grammar, and whether the two leave a token. Pure functions over arrays.

The sampler applies these rules itself. Here it is seen, before a token is chosen, that they leave none, so that the
request ends with an error that names the field.
"""

from __future__ import annotations

import numpy as np

from quire.core.grammar_bitmask import mask_of
from quire.core.sampling_params import SamplingParams
from quire.errors import ValidationError

LOWEST = float(np.finfo(np.float32).min)


class Restrictions:
    """The rules of one request.

    Args:
        params: normalised.
        eos_token_id: ends the answer.
        vocab_size: width of the logits.
    """

    def __init__(self, params: SamplingParams, eos_token_id: int, vocab_size: int) -> None:
        self._allowed = None if not params.allowed_token_ids else mask_of(params.allowed_token_ids, vocab_size)
        self._words = [(tuple(word[:-1]), word[-1]) for word in params.bad_words_token_ids or () if word]
        self._biased = mask_of(_impossible(params), vocab_size)
        self._min_tokens = params.min_tokens
        ends = {eos_token_id, *(params.stop_token_ids or ())} if params.min_tokens else set()
        self._ends = mask_of(ends, vocab_size)
        self._vocab_size = vocab_size

    @classmethod
    def of(cls, params: SamplingParams, eos_token_id: int, vocab_size: int) -> Restrictions | None:
        """Those of `params`; None when there are none."""
        has_any = params.allowed_token_ids or params.bad_words_token_ids or params.min_tokens or _impossible(params)
        return cls(params, eos_token_id, vocab_size) if has_any else None

    def conflict(self, line: np.ndarray, output: list[int]) -> str | None:
        """The field that leaves no token of those that a grammar allows; None when some are left.

        Args:
            line: [bitmask_size] int32, what the grammar allows; not changed.
            output: the tokens before.
        """
        if self._allowed is not None:
            line = line & self._allowed
            if not line.any():
                return "allowed_token_ids"
        if self._words:
            banned = {last for before, last in self._words if tuple(output[len(output) - len(before) :]) == before}
            line = line & ~mask_of(banned, self._vocab_size)
            if not line.any():
                return "bad_words"
        line = line & ~self._biased
        if not line.any():
            return "logit_bias"
        if len(output) < self._min_tokens and not (line & ~self._ends).any():
            return "min_tokens"
        return None


def _impossible(params: SamplingParams) -> list[int]:
    """Ids whose bias is minus infinity to a 32-bit float; any other only makes a token less likely."""
    biases = (params.logit_bias or {}).items()
    return [token_id for token_id, value in biases if value < LOWEST]


def check_ends(params: SamplingParams, eos_token_id: int) -> None:
    """Raise when a structured answer could never end by itself.

    Raises:
        ValidationError: no end of an answer is among `allowed_token_ids`, and nothing else of the request ends it.
    """
    if not params.allowed_token_ids or params.ignore_eos or params.stop:
        return
    if not {eos_token_id, *(params.stop_token_ids or ())} & set(params.allowed_token_ids):
        raise ValidationError(
            f"allowed_token_ids has no end-of-sequence token, such as {eos_token_id}: structured output "
            "could never end",
            hint=f"add {eos_token_id} to allowed_token_ids, or leave out one of the two",
            field="allowed_token_ids",
        )


def empty_mask_error(field: str, num_tokens: int) -> ValidationError:
    """The error of a request that `field` leaves no token."""
    return ValidationError(
        f"{field} excludes all tokens that the grammar allows after {num_tokens} tokens",
        hint=f"leave out {field}, or use another grammar",
        field=field,
    )
