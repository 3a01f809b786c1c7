"""What the pretended model thinks of every token, and what a beam search finds with it."""

from __future__ import annotations

import zlib

import numpy as np

from quire.core.engine_messages import EngineCoreRequest, FinishedRequest, FinishReason
from tests.row_proposer import RowProposer

VOCAB_SIZE = 50


def top_logprobs(token_ids: np.ndarray) -> list[tuple[float, int]]:
    """(log-probability, token) of the whole vocabulary after these tokens, falling."""
    crc = zlib.crc32(np.ascontiguousarray(token_ids, dtype=np.int32).tobytes())
    scores = np.random.default_rng(crc).random(VOCAB_SIZE, dtype=np.float32)
    return sorted(((-4.0 * float(score), token) for token, score in enumerate(scores)), reverse=True)


def expected_beams(request: EngineCoreRequest, max_model_len: int) -> list[tuple[list[int], float]]:
    """(new tokens, sum of log-probabilities) of each sequence that a search finds, the best first."""
    params, prompt = request.sampling_params, request.prompt_token_ids.tolist()
    spec = params.beam_search
    assert spec is not None and params.max_tokens is not None
    max_tokens = min(params.max_tokens, max_model_len - len(prompt))
    ends = {*(params.stop_token_ids or ()), *(() if params.ignore_eos else (request.eos_token_id,))}
    width, beams, done = spec.num_beams, [(0.0, prompt)], []
    keep = max(2, 1 + len(ends)) * width
    for length in range(1, max_tokens + 1):
        grown = sorted(
            ((total + score, [*tokens, token]) for total, tokens in beams
             for score, token in top_logprobs(np.array(tokens, np.int32))),
            key=lambda one: -one[0],
        )[:keep]  # fmt: skip
        over = [length == max_tokens or tokens[-1] in ends for _, tokens in grown]
        new = [(total / length**spec.length_penalty, total, tokens) for total, tokens in grown[:width]]
        done = sorted([*done, *(one for one, is_over in zip(new, over, strict=False) if is_over)], key=lambda x: -x[0])
        done = done[:width]
        beams = [one for one, is_over in zip(grown, over, strict=True) if not is_over][:width]
        if not beams or (len(done) == width and spec.early_stopping is True):
            break
        hoped = max_tokens if spec.early_stopping == "never" and spec.length_penalty > 0 else length
        if len(done) == width and beams[0][0] / hoped**spec.length_penalty <= done[-1][0]:
            break
    return [(tokens[len(prompt) :], total) for _, total, tokens in done]


def next_token(token_ids: np.ndarray) -> int:
    """What the pretended model samples after these tokens."""
    return zlib.crc32(np.ascontiguousarray(token_ids, dtype=np.int32).tobytes()) % VOCAB_SIZE


def expected_answer(request: EngineCoreRequest, max_model_len: int) -> tuple[list[int], FinishedRequest]:
    """What a request gets when it runs to its end, computed one token at a time."""
    params = request.sampling_params
    limit = max_model_len - len(request.prompt_token_ids)
    max_tokens = limit if params.max_tokens is None else min(params.max_tokens, limit)
    tokens = request.prompt_token_ids.tolist()
    answer: list[int] = []
    while True:
        token = next_token(np.array(tokens))
        tokens.append(token)
        answer.append(token)
        if len(answer) >= params.min_tokens:
            if token == request.eos_token_id and not params.ignore_eos:
                return answer, FinishedRequest(request.handle, FinishReason.STOP)
            if token in (params.stop_token_ids or ()):
                return answer, FinishedRequest(request.handle, FinishReason.STOP, token)
        if len(answer) >= max_tokens:
            return answer, FinishedRequest(request.handle, FinishReason.LENGTH)


class Guesses(RowProposer):
    """Proposes `num_drafts` tokens of which the first `num_right` are those that the pretended model samples.

    None = both numbers follow no law, but are the same for the same tokens.
    """

    def __init__(self, num_drafts: int | None = None, num_right: int | None = None) -> None:
        super().__init__(self._guess)
        self._numbers = num_drafts, num_right

    def _guess(self, token_ids: np.ndarray, max_tokens: int) -> np.ndarray:
        crc = zlib.crc32(token_ids.tobytes())
        num_drafts, num_right = (crc // k % 5 if n is None else n for n, k in zip(self._numbers, (1, 5), strict=True))
        drafts: list[int] = []
        for i in range(min(num_drafts, max_tokens)):
            token = next_token(np.append(token_ids, drafts).astype(np.int32))
            drafts.append(token if i < num_right else token + 1)
        return np.array(drafts, dtype=np.int32)
