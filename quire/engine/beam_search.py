"""Beam search from the user's side: its parameters as those of a request, a request's answers as its result.

Called by `LLM` and `AsyncLLM`. Stateless: the search runs in the scheduler (`scheduler.beam_groups`).
"""

from __future__ import annotations

from typing import Any

from quire.core.beam_search import BeamSearchOutput, BeamSearchParams, BeamSearchSequence, sequence_score
from quire.core.outputs import RequestOutput
from quire.core.sampling_params import RequestOutputKind, SamplingParams
from quire.errors import ValidationError
from quire.tokenization.tokenizer import Tokenizer


def request_params(params: Any) -> SamplingParams:
    """The parameters of the request that runs a search; raises `ValidationError`."""
    if not isinstance(params, BeamSearchParams):
        raise ValidationError(f"params must be BeamSearchParams, not {type(params).__name__}", field="params")
    spec = params.spec()
    return SamplingParams(
        n=spec.num_beams,
        temperature=0.0,
        max_tokens=params.max_tokens,
        ignore_eos=params.ignore_eos,
        include_stop_str_in_output=params.include_stop_str_in_output,
        skip_special_tokens=params.skip_special_tokens,
        output_kind=RequestOutputKind.FINAL_ONLY,
        beam_search=spec,
    )


def search_output(output: RequestOutput, params: BeamSearchParams, tokenizer: Tokenizer | None) -> BeamSearchOutput:
    """What a search found, from the answers of its request."""
    sequences = []
    for answer in output.outputs:
        token_ids, cum_logprob = answer.token_ids, answer.cumulative_logprob or 0.0
        is_cut = answer.finish_reason == "stop" and not params.include_stop_str_in_output
        tokens = [*output.prompt_token_ids, *(token_ids[:-1] if is_cut else token_ids)]
        sequences.append(
            BeamSearchSequence(
                tokens=tokens,
                cum_logprob=cum_logprob,
                score=sequence_score(cum_logprob, max(1, len(token_ids)), params.length_penalty),
                text=None if tokenizer is None else tokenizer.decode(tokens, params.skip_special_tokens),
                finish_reason=answer.finish_reason,
                stop_reason=answer.stop_reason,
            )
        )
    return BeamSearchOutput(sequences)
