"""OfflineMetrics: what an engine without a server counts, for `LLM.get_metrics`.

Made by `LLMEngine` when statistics are on. Owns the figures and the parameters of unfinished requests.
"""

from __future__ import annotations

from collections.abc import Iterable

from quire.config import QuireConfig
from quire.core.engine_messages import EngineCoreOutputs
from quire.core.outputs import RequestOutput
from quire.core.sampling_params import SamplingParams
from quire.metrics.engine_metrics import EngineMetrics
from quire.metrics.records import Metric, read


class OfflineMetrics:
    """The figures of `/metrics`, of one engine in the caller's process."""

    def __init__(self, config: QuireConfig) -> None:
        self._metrics = EngineMetrics(config, config.model.served_model_name or config.model.model)
        self._params: dict[str, SamplingParams] = {}

    def note_request(self, request_id: str, params: SamplingParams) -> None:
        """A request was queued."""
        self._params[request_id] = params

    def forget(self, request_ids: Iterable[str]) -> None:
        """Requests were dropped without an output."""
        for request_id in request_ids:
            self._params.pop(request_id, None)

    def record(self, step: EngineCoreOutputs, outputs: Iterable[RequestOutput]) -> None:
        """Take in one step and the outputs that were due after it."""
        self._metrics.record_step(step)
        for output in outputs:
            if output.finished:
                self._record_end(output)

    def read(self) -> list[Metric]:
        """The figures as of now."""
        return read(self._metrics.all_series().collect())

    def _record_end(self, output: RequestOutput) -> None:
        params = self._params.pop(output.request_id, None)
        if params is None:
            return
        stats = output.metrics
        longest = max((len(answer.token_ids) for answer in output.outputs), default=0)
        if params.n == 1:
            longest = stats.num_generation_tokens  # the last output of a stream holds only what is new
        num_cached = output.num_cached_tokens or 0
        self._metrics.record_request(stats, params, len(output.prompt_token_ids), num_cached, longest)
        for answer in output.outputs:
            self._metrics.record_finish(answer.finish_reason or "stop")
        if longest > 1:  # who reads whole answers can know no more of the time between tokens than the mean
            self._metrics.record_tokens((stats.last_token_ts - stats.first_token_ts) / (longest - 1), longest - 1)
