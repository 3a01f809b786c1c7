"""What users get back: `RequestOutput`, `CompletionOutput`, `Logprob`. Made by the front-end's output processor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec

from quire.core.cache_info import PrefixCacheInfo
from quire.core.draft_stats import DraftStats
from quire.core.stats import RequestStateStats


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of one token: natural logarithm, 1-based rank in the vocabulary, its text."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


class CompletionOutput(msgspec.Struct, eq=False):
    """One of a request's `n` answers.

    Attributes:
        index: which of the `n`.
        text, token_ids: the answer so far (CUMULATIVE, FINAL_ONLY) or what is new (DELTA).
        cumulative_logprob: sum over the sampled tokens; None when logprobs were not asked for.
        logprobs: per token: token id -> Logprob, the sampled token first.
        finish_reason: "stop", "length", "abort", "error", "repetition", "queue_timeout"; None while it runs.
        stop_reason: the stop string or stop id that matched; None for EOS.
        error: what went wrong, where finish_reason is "error" or "queue_timeout".
        spec_decode_metrics: what its drafts came to so far; None = it had none.
        lora_request: None, as there are no adapters; programs for vLLM read it.
    """

    lora_request: ClassVar[None] = None

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    spec_decode_metrics: DraftStats | None = None

    def __eq__(self, other: object) -> bool:
        """The same answer; what was drafted for it depends on what else was computed."""
        if not isinstance(other, CompletionOutput):
            return NotImplemented
        return self._compared() == other._compared()

    def _compared(self) -> tuple[Any, ...]:
        return msgspec.structs.astuple(msgspec.structs.replace(self, spec_decode_metrics=None))

    def finished(self) -> bool:
        """True once the answer has ended."""
        return self.finish_reason is not None


class PromptProgress(msgspec.Struct):
    """How far a prompt is computed.

    Attributes:
        total, cached, processed: its tokens: all, found in the prefix cache, done (the found ones included).
        seconds: since its first part was scheduled.
    """

    total: int
    cached: int
    processed: int
    seconds: float


class RequestOutput(msgspec.Struct):
    """A request's answers.

    Attributes:
        prompt: its text; None when it came as token ids.
        prompt_logprobs: per prompt token; the first is None; None when not asked for.
        num_cached_tokens: prompt tokens that were found in the prefix cache.
        metrics: timings of the request.
        prefix_cache: what the prefix cache did for it, and why not more; None before its turn.
        kv_transfer_params: from the KV connector, for the engine that goes on with the request; None = nothing.
        prompt_progress: news of the prompt, where `return_progress` asked for it; such an output may have no new token.
        lora_request, encoder_prompt, encoder_prompt_token_ids: None, as there are no adapters and no encoders; programs
            for vLLM read them.
    """

    lora_request: ClassVar[None] = None
    encoder_prompt: ClassVar[None] = None
    encoder_prompt_token_ids: ClassVar[None] = None

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int | None = None
    metrics: RequestStateStats = msgspec.field(default_factory=RequestStateStats)
    prefix_cache: PrefixCacheInfo | None = None
    prompt_progress: PromptProgress | None = None
    kv_transfer_params: dict[str, Any] | None = None
