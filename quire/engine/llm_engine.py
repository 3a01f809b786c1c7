"""LLMEngine: requests in, outputs out, one step at a time. The synchronous front-end of an engine core.

Called by `LLM` and the command line. Owns the processors and the names (handles) it gives to requests; the
engine core behind `client` owns everything else.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Mapping
from typing import Any

from quire import envs
from quire.config import QuireConfig
from quire.config.build import build_config
from quire.core.engine_messages import EngineCoreOutputs, EngineCoreRequest, FinishReason
from quire.core.outputs import RequestOutput
from quire.core.sampling_params import SamplingParams
from quire.core.stats import SchedulerStats
from quire.engine.input_processor import PreparedRequest
from quire.engine.output_processor import OutputProcessor
from quire.engine.parallel_sampling import WaitingChildren, make_children
from quire.engine.parts import EngineParts
from quire.engine.request_state import RequestGroup, RequestState
from quire.engine.stat_logger import StatLogger
from quire.errors import EngineDeadError, QuireClientError, ValidationError
from quire.utils.garbage import collector_paused


class LLMEngine:
    """Add requests, then call `step` until nothing is unfinished."""

    def __init__(self, parts: EngineParts) -> None:
        self.config = parts.config
        self.tokenizer = parts.tokenizer
        self.chat_template = parts.chat_template
        self.defaults = parts.defaults
        self.last_stats = SchedulerStats()
        self._client = parts.client
        self._inputs = parts.input_processor
        self._outputs = OutputProcessor()
        self._waiting_children = WaitingChildren()
        self._stat_logger = None if parts.config.observability.disable_log_stats else StatLogger()
        self._due: list[RequestOutput] = []
        self._handles = itertools.count()
        self._dead: EngineDeadError | None = None

    @classmethod
    def from_config(cls, config: QuireConfig, **options: Any) -> LLMEngine:
        """The engine that `config` describes; `options` as `engine.factory.build_parts`."""
        envs.prefer_sleeping_threads()
        with collector_paused():
            from quire.engine.factory import build_parts  # late: loads torch

            return cls(build_parts(config, **options))

    @classmethod
    def from_engine_args(cls, engine_args: QuireConfig | Mapping[str, Any]) -> LLMEngine:
        """As `from_config`, from a configuration or from settings by name."""
        config = engine_args if isinstance(engine_args, QuireConfig) else build_config(**engine_args)
        return cls.from_config(config)

    def add_request(
        self,
        request_id: str,
        prompt: Any,
        params: SamplingParams,
        arrival_time: float | None = None,
        priority: int = 0,
        *,
        add_special_tokens: bool = True,
    ) -> str:
        """Queue a request.

        Args:
            request_id: the caller's name for it, unused by any unfinished request.
            prompt: in any form of `core.inputs.parse_prompt`.
            params: how its tokens are chosen.
            arrival_time: seconds, wall clock; default: now.
            priority: lower runs first, where the scheduling policy looks at it.
            add_special_tokens: write what the tokenizer puts around a text.

        Returns:
            `request_id`.

        Raises:
            ValidationError: the request cannot run; no other request is affected.
            EngineDeadError: the engine has stopped.
        """
        self._require_alive()
        self._check_name(request_id, priority)
        prepared = self._inputs.prepare(prompt, params, add_special_tokens=add_special_tokens)
        arrival = time.time() if arrival_time is None else arrival_time
        handles = [next(self._handles) for _ in range(params.n)]
        seed = self.config.model.seed
        messages = make_children(prepared, request_id, handles, seed, arrival_time=arrival, priority=priority)
        shares_prompt = self._shares_prompt(prepared)
        for message in messages[:1] if shares_prompt else messages:
            self._send(message, handles)
        self._outputs.add(self._make_group(request_id, prepared, messages, arrival))
        if shares_prompt:
            self._waiting_children.add(handles[0], messages[1:])
        return request_id

    def step(self) -> list[RequestOutput]:
        """Run one step; returns the outputs that are due, none for requests that only moved on unseen.

        Raises:
            EngineDeadError: the step failed; every request is lost and the engine is of no further use.
        """
        self._require_alive()
        due, self._due = self._due, []
        step = self._run_core_step()
        if step is None:
            return due
        self.last_stats = step.stats
        if self._stat_logger is not None:
            self._stat_logger.record(step)
        processed = self._outputs.process(step)
        if processed.handles_to_abort:
            self._client.abort_requests(processed.handles_to_abort)
        for message in self._waiting_children.release(processed.started):
            self._client.add_request(message)
        return due + processed.outputs

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """End requests; each gets its final output (finish_reason "abort") from a later `step`.

        Unknown and finished ids are ignored.
        """
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        handles = self._outputs.handles_of(ids)
        unsent = self._waiting_children.drop(handles)
        for handle in sorted(unsent):
            output = self._outputs.end(handle, FinishReason.ABORT)
            self._due += [output] if output is not None else []
        self._client.abort_requests([handle for handle in handles if handle not in unsent])

    def discard_requests(self, request_ids: Iterable[str]) -> None:
        """End requests without any further output."""
        handles = self._outputs.forget(list(request_ids))
        unsent = self._waiting_children.drop(handles)
        if self._dead is None:
            self._client.abort_requests([handle for handle in handles if handle not in unsent])

    def has_unfinished_requests(self) -> bool:
        """True while `step` has anything to give."""
        return len(self._outputs) > 0 or bool(self._due)

    def get_num_unfinished_requests(self) -> int:
        """Requests whose final output is still to come."""
        return len(self._outputs)

    def reset_prefix_cache(self) -> bool:
        """Forget all cached pages; False while any page is in use."""
        self._require_alive()
        return self._client.reset_prefix_cache()

    def shutdown(self) -> None:
        """End the engine core; harmless when repeated."""
        if self._dead is None:
            self._dead = EngineDeadError("the engine was shut down", hint="make a new one")
        self._client.shutdown()

    def _require_alive(self) -> None:
        if self._dead is not None:
            raise self._dead

    def _check_name(self, request_id: str, priority: int) -> None:
        if request_id in self._outputs:
            raise ValidationError(
                f"request_id {request_id!r} is in use by an unfinished request",
                hint="give each request an id of its own",
                field="request_id",
            )
        policy = self.config.scheduler.scheduling_policy
        if priority != 0 and policy == "fcfs":
            raise ValidationError(
                f"priority={priority} has no effect under scheduling_policy='fcfs'",
                hint="leave out priority",
                field="priority",
            )

    def _run_core_step(self) -> EngineCoreOutputs | None:
        try:
            return self._client.get_output()
        except BaseException as error:  # whatever broke the step, the state behind it cannot be trusted
            self._outputs.forget(self._outputs.request_ids)
            self._dead = EngineDeadError(
                f"the engine stopped: {type(error).__name__}: {error}",
                hint="all unfinished requests are lost; make a new engine",
            )
            if not isinstance(error, Exception):
                raise
            raise self._dead from error

    def _send(self, message: EngineCoreRequest, handles: list[int]) -> None:
        """Send one answer's message; when the engine core refuses it, none of `handles` stays behind."""
        try:
            self._client.add_request(message)
        except QuireClientError:
            self._client.abort_requests(handles)
            raise

    def _shares_prompt(self, prepared: PreparedRequest) -> bool:
        """True when answers after the first would find the prompt's pages in the prefix cache."""
        cache = self.config.cache
        has_full_page = len(prepared.prompt_token_ids) > (cache.block_size or 1)
        reads_cache = not prepared.params.skip_reading_prefix_cache or prepared.params.prompt_logprobs is not None
        return prepared.params.n > 1 and cache.enable_prefix_caching and has_full_page and reads_cache

    def _make_group(
        self, request_id: str, prepared: PreparedRequest, messages: list[EngineCoreRequest], arrival_time: float
    ) -> RequestGroup:
        prompt_token_ids = prepared.prompt_token_ids.tolist()
        arrival_ts = time.monotonic() - max(0.0, time.time() - arrival_time)
        states = [
            RequestState(message.handle, index, message.sampling_params, prompt_token_ids, self.tokenizer, arrival_ts)
            for index, message in enumerate(messages)
        ]
        return RequestGroup(
            request_id, prepared.prompt, prompt_token_ids, prepared.params.output_kind, states, arrival_time
        )
