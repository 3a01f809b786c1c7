"""Beam search: what users ask for and what they get. The search itself is `scheduler.beam_search`.

Names and defaults are those that users of vLLM know; scores and `early_stopping` are those of transformers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from quire.errors import UnsupportedError, ValidationError
from quire.utils.checks import check_bool, check_float, check_int

MAX_BEAM_WIDTH = 256
NOT_YET = ("structured_outputs", "watermarking", "allowed_token_ids")


class BeamSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How a search scores and when it stops: part of a request's `SamplingParams`.

    A sequence's score is its sum of log-probabilities over its length ** `length_penalty`; the length counts new
    tokens, the end-of-sequence token included.

    Attributes:
        num_beams: sequences that grow together, and that are returned.
        length_penalty: above 0 favours longer sequences.
        early_stopping: True ends with as many finished sequences as there are beams; False when the best running one,
            as it is, cannot beat the worst finished; "never" when it could not even at full length.
    """

    num_beams: int
    length_penalty: float = 1.0
    early_stopping: bool | str = False


class BeamSearchParams(msgspec.Struct, kw_only=True):
    """Parameters of one beam search.

    Attributes:
        beam_width: beams, and sequences returned; 1 to 256.
        max_tokens: most new tokens.
        ignore_eos: go on past the end-of-sequence token.
        temperature: no effect, as the model's own log-probabilities are compared; in [0, 2].
        length_penalty, early_stopping: as in `BeamSpec`.
        include_stop_str_in_output: keep the end-of-sequence token in tokens and text.
        skip_special_tokens: leave special tokens out of the text.
        structured_outputs, watermarking, allowed_token_ids: refused; not supported yet.

    Raises:
        ValidationError: a value has the wrong type or is out of range.
        UnsupportedError: a field that is not honoured yet was given.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    structured_outputs: Any = None
    watermarking: Any = None
    allowed_token_ids: Any = None

    def __post_init__(self) -> None:
        for name in NOT_YET:
            if getattr(self, name) not in (None, False):
                raise UnsupportedError(
                    f"{name} is not supported with beam search yet", hint=f"leave out {name}", field=name
                )
        self.max_tokens = check_int("max_tokens", self.max_tokens, 1)
        check_float("temperature", self.temperature, 0.0, 2.0)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            check_bool(name, getattr(self, name))
        self.spec()

    def spec(self) -> BeamSpec:
        """What of it decides scores and the end."""
        return checked_spec(self.beam_width, self.length_penalty, self.early_stopping)


def checked_spec(beam_width: Any, length_penalty: Any, early_stopping: Any) -> BeamSpec:
    """A spec of values from outside; raises `ValidationError`."""
    if not (isinstance(early_stopping, bool) or early_stopping == "never"):
        raise ValidationError(
            f"early_stopping={early_stopping!r} is not one of True, False, 'never'", field="early_stopping"
        )
    return BeamSpec(
        num_beams=check_int("beam_width", beam_width, 1, MAX_BEAM_WIDTH),
        length_penalty=check_float("length_penalty", length_penalty, -10.0, 10.0),
        early_stopping=early_stopping,
    )


def sequence_score(cum_logprob: float, num_tokens: int, length_penalty: float) -> float:
    """What sequences of `num_tokens` new tokens are ordered by."""
    return float(cum_logprob / num_tokens**length_penalty)


def num_top_tokens(num_beams: int, num_end_tokens: int) -> int:
    """Continuations to look at, of each beam and of all, so that enough are left when end tokens are among them."""
    return max(2, 1 + num_end_tokens) * num_beams


@dataclass(slots=True)
class BeamSearchSequence:
    """One sequence that was found.

    Attributes:
        tokens: the prompt's and the new ones; without the end-of-sequence token unless it was asked for.
        cum_logprob: sum of the new tokens' log-probabilities, the end-of-sequence token's included.
        score: what sequences are ordered by, see `BeamSpec`.
        text: of `tokens`; None without a tokenizer.
        finish_reason: "stop" or "length".
        stop_reason: the stop id that ended it; None for end of sequence and length.
    """

    tokens: list[int]
    cum_logprob: float
    score: float
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """The sequences found for one prompt, the best first."""

    sequences: list[BeamSearchSequence]
