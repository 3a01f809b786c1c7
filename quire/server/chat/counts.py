"""AnswerCounts: what one response has cost, whatever API it is of: tokens, times, what the prefix cache did.

Owned by a response's writer; read by the request log and by traces.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from quire.core.draft_stats import DraftStats
from quire.core.outputs import RequestOutput
from quire.core.sampling_params import SamplingParams
from quire.core.stats import RequestStateStats, merged_stats
from quire.server.chat.running import GenerationJob
from quire.server.chat.state import ServerState
from quire.server.http.timing_breakdown import TimingBreakdown, make_receipt


@dataclass(slots=True)
class Usage:
    """Tokens of one response.

    Attributes:
        num_reasoning: of those of the answers, how many are thinking; None = not told.
        num_cached: of each prompt, how many came from the prefix cache.
    """

    num_prompt: int
    num_completion: int = 0
    num_reasoning: int | None = None
    num_cached: dict[int, int] = field(default_factory=dict)

    @property
    def total_cached(self) -> int:
        """Of all prompts."""
        return sum(self.num_cached.values())


class AnswerCounts:
    """Counts one response; an `AnswerRecord`.

    Args:
        state: of the server.
        work: what was asked of the engine.
        model: name to report.
        reports_cache: the response says what the prefix cache did.
    """

    def __init__(self, state: ServerState, work: GenerationJob, model: str, *, reports_cache: bool = False) -> None:
        self.work = work
        self.model = model
        self.usage = Usage(sum(len(prompt.prompt_token_ids) for prompt in work.prompts))
        self._shows_receipt = state.config.api.enable_per_request_metrics
        speculative = state.engine.config.speculative
        self._num_spec_tokens = 0 if speculative is None else speculative.num_tokens
        level = state.engine.config.observability.per_request_spec_decode_metrics
        self._shows_drafts = level != "none" and self._num_spec_tokens > 0
        self._cache_reports: dict[int, dict[str, Any]] | None = None
        if reports_cache or self._shows_receipt:
            self._cache_reports = {}
        self._cache_view = state.cache_view
        self._stats: dict[int, RequestStateStats] = {}
        self._made_s = time.monotonic()

    @property
    def answer_id(self) -> str:
        """As `AnswerRecord.answer_id`."""
        return self.work.public_id

    @property
    def weight_version(self) -> str:
        """As `AnswerRecord.weight_version`."""
        return ", ".join(sorted({one.weight_version for one in self.work.placed if one.weight_version}))

    @property
    def params(self) -> SamplingParams:
        """As `AnswerRecord.params`."""
        return self.work.params

    @property
    def num_prompts(self) -> int:
        """As `AnswerRecord.num_prompts`."""
        return len(self.work.prompts)

    @property
    def num_prompt_tokens(self) -> int:
        """As `AnswerRecord.num_prompt_tokens`."""
        return self.usage.num_prompt

    @property
    def num_new_tokens(self) -> int:
        """As `AnswerRecord.num_new_tokens`."""
        return self.usage.num_completion

    def note(self, prompt_index: int, output: RequestOutput) -> None:
        """Count an output."""
        usage = self.usage
        for answer in output.outputs:
            usage.num_completion += len(answer.token_ids)
        if output.num_cached_tokens is not None:
            usage.num_cached[prompt_index] = output.num_cached_tokens
        self._stats[prompt_index] = output.metrics
        if self._cache_reports is not None and output.prefix_cache is not None:
            self._cache_reports[prompt_index] = self._cache_view.report(output.prefix_cache)

    def prefix_cache(self) -> dict[str, Any]:
        """What the prefix cache did: an object, or a list where there were several prompts; {} unless asked for."""
        if self._cache_reports is None:
            return {}
        reports = [self._cache_reports.get(index) for index in range(len(self.work.prompts))]
        return {"prefix_cache": reports[0] if len(reports) == 1 else reports}

    def metrics(self) -> dict[str, Any]:
        """What a response says of its making: {"metrics": ...}; {} unless the server shows it."""
        if not self._shows_receipt and not self._shows_drafts:
            return {}
        receipt = self.receipt()
        drafts, content = receipt.stats.drafts or DraftStats(), receipt.content() if self._shows_receipt else {}
        if self._shows_receipt and self._num_spec_tokens:
            content["drafted_tokens"], content["accepted_tokens"] = drafts.num_drafted, drafts.num_accepted
            content["steps_saved"] = drafts.num_steps_saved
        if self._shows_receipt and self.weight_version:
            content["weight_version"] = self.weight_version
        if self._shows_drafts:  # of one sequence, as in vLLM
            is_single = len(self.work.prompts) == 1 and self.work.params.n == 1
            content["speculative_decoding"] = drafts.content(self._num_spec_tokens) if is_single else None
        return {"metrics": content}

    def receipt(self, now_s: float | None = None) -> TimingBreakdown:
        """Where the request's time went until `now_s`, by default now."""
        stats = merged_stats(list(self._stats.values()) or [RequestStateStats(queued_ts=self._made_s)])
        return make_receipt(
            self.work.received_s, stats, time.monotonic() if now_s is None else now_s,
            self.usage.total_cached, self.usage.num_completion,
        )  # fmt: skip
