"""FrontEnd: requests in, messages for an engine core out; the core's steps in, outputs for users out.

Shared by `LLMEngine` and `AsyncLLM`, which differ in how messages travel. Owns the processors, the names (handles) it
gives to requests, and what is kept of each unfinished one.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from quire.core.engine_messages import (
    MAX_PRIORITY,
    MAX_QUEUE_TIMEOUT_S,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
)
from quire.core.outputs import RequestOutput
from quire.core.request_options import DEFAULT_OPTIONS, RequestOptions, Resumed
from quire.core.sampling_params import SamplingParams
from quire.core.tenancy import check_share
from quire.engine.input_processor import PreparedRequest
from quire.engine.output_processor import OutputProcessor
from quire.engine.parallel_sampling import make_children
from quire.engine.parts import FrontEndParts
from quire.engine.request_state import RequestGroup, RequestState
from quire.errors import QuireError, ValidationError
from quire.utils.checks import check_float, check_int


@dataclass(frozen=True, slots=True)
class Submission:
    """A request that was checked.

    Attributes:
        group: what is to be kept of it.
        messages: to be sent, one for each answer.
    """

    group: RequestGroup
    messages: list[EngineCoreRequest]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What is to be done after a step.

    Attributes:
        outputs: due to the users.
        handles_to_abort: requests that the engine core has to abort.
        failures: request id -> what went wrong, for requests of `outputs` that failed.
    """

    outputs: list[RequestOutput] = field(default_factory=list)
    handles_to_abort: list[int] = field(default_factory=list)
    failures: dict[str, QuireError] = field(default_factory=dict)


class FrontEnd:
    """Everything between a user and the messages of an engine core. Does not send; says what to send.

    Args:
        parts: what it is made of.
        first_handle: of its requests; others of the same cores are given other ones.
    """

    def __init__(self, parts: FrontEndParts, first_handle: int = 0) -> None:
        self.config = parts.config
        self._tokenizer = parts.tokenizer
        self._inputs = parts.input_processor
        keeps_draft_steps = self.config.observability.per_request_spec_decode_metrics == "detailed"
        self._outputs = OutputProcessor(keeps_draft_steps=keeps_draft_steps)
        self._handles = itertools.count(first_handle)

    def __len__(self) -> int:
        """Requests whose final output is still to come."""
        return len(self._outputs)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._outputs

    @property
    def request_ids(self) -> list[str]:
        """Unfinished requests, oldest first."""
        return self._outputs.request_ids

    def prepare(
        self,
        request_id: str,
        prompt: Any,
        params: SamplingParams,
        options: RequestOptions = DEFAULT_OPTIONS,
        arrival_time: float | None = None,
    ) -> Submission:
        """Check a request and name its answers; nothing is kept of it before `follow`.

        Args:
            request_id: the caller's name for it, unused by any unfinished request.
            prompt: in any form of `core.inputs.parse_prompt`.
            arrival_time: seconds, wall clock; default: now.

        Raises:
            ValidationError: the request cannot run.
        """
        self.check_name(request_id, options)
        if options.queue_timeout is None:
            options = replace(options, queue_timeout=self.config.scheduler.queue_timeout)
        check_float("queue_timeout", options.queue_timeout, minimum=0.0, maximum=MAX_QUEUE_TIMEOUT_S)
        self._check_beams(params)
        prepared = self._inputs.prepare(prompt, params, options)
        arrival = time.time() if arrival_time is None else arrival_time
        handles = [next(self._handles) for _ in range(params.n)]
        seed = self.config.model.seed
        messages = make_children(prepared, request_id, handles, seed, options, arrival)
        if options.resumed is None:
            return Submission(self._make_group(request_id, prepared, messages, arrival), messages)
        self._check_resumed(prepared, options.resumed)
        output = np.array(options.resumed.output_token_ids, dtype=np.int32)
        messages = [replace(messages[0], seed=options.resumed.seed, output_token_ids=output if len(output) else None)]
        group = self._make_group(request_id, prepared, messages, arrival)
        group.states[0].resume(output.tolist())
        return Submission(group, messages)

    def _check_resumed(self, prepared: PreparedRequest, resumed: Resumed) -> None:
        """Refuse what cannot be continued; raises `ValidationError`."""
        params, output = prepared.params, resumed.output_token_ids
        problem, vocab_size = "", self.config.arch.vocab_size if self.config.arch is not None else 0
        if params.n != 1 or params.beam_search is not None:
            problem = "it has several answers"
        elif params.logprobs is not None or params.prompt_logprobs is not None:
            problem = "it has log-probabilities, of which those before it are lost"
        elif len(output) >= (params.max_tokens or 0):
            problem = f"its answer has {len(output)} tokens, and may have {params.max_tokens}"
        elif any(not 0 <= token < vocab_size for token in output):
            problem = f"a token is not in the vocabulary of {vocab_size}"
        elif not 0 <= resumed.seed < 1 << 64:
            problem = "its seed is not a number of 64 bits"
        if problem:
            raise ValidationError(
                f"snapshot cannot be continued: {problem}", hint="send what a replica gave", field="snapshot"
            )

    def check_name(self, request_id: str, options: RequestOptions) -> None:
        """Refuse a name that is in use, or a priority or tenant that means nothing; raises `ValidationError`."""
        priority, tenant = options.priority, options.tenant
        if request_id in self._outputs:
            raise ValidationError(
                f"request_id {request_id!r} is already used by an unfinished request",
                hint="use a unique id for each request",
                field="request_id",
            )
        policy = self.config.scheduler.scheduling_policy
        if policy == "fair":
            check_share(tenant)
        if priority != 0 and "priority" not in (policy, tenant.policy if policy == "fair" else ""):
            raise ValidationError(
                f"priority={priority} has no effect under scheduling_policy={policy!r}"
                + (f" for a tenant whose own policy is {tenant.policy!r}" if policy == "fair" else ""),
                hint="leave out priority, or start with scheduling_policy='priority'",
                field="priority",
            )
        check_int("priority", priority, -MAX_PRIORITY, MAX_PRIORITY)

    def _check_beams(self, params: SamplingParams) -> None:
        mode = self.config.model.logprobs_mode
        if getattr(params, "beam_search", None) is not None and not mode.endswith("_logprobs"):
            raise ValidationError(
                f"beam search needs log-probabilities, and this engine runs with logprobs_mode={mode!r}",
                hint="start it with logprobs_mode='raw_logprobs'",
                field="logprobs_mode",
            )

    def register(self, submission: Submission) -> None:
        """Keep a request whose messages were sent; its id must be unused still."""
        self._outputs.add(submission.group)

    def process(self, step: EngineCoreOutputs) -> StepResult:
        """Take in one step."""
        processed = self._outputs.process(step)
        return StepResult(processed.outputs, processed.handles_to_abort, processed.failures)

    def handles_of(self, request_ids: Iterable[str]) -> list[int]:
        """The unfinished answers of requests, as the engine core knows them; unknown ids have none."""
        return self._outputs.handles_of(request_ids)

    def discard(self, request_ids: Iterable[str]) -> list[int]:
        """Forget requests, without any output; returns the handles that the engine core knows."""
        return self._outputs.forget(request_ids)

    def state_of(self, handle: int) -> RequestState | None:
        """What is kept of an unfinished answer."""
        return self._outputs.state_of(handle)

    def end(self, handle: int, reason: FinishReason) -> RequestOutput | None:
        """End an unfinished answer without the engine core; the output that is due, if any."""
        return self._outputs.end(handle, reason)

    def request_of(self, handle: int) -> str | None:
        """The user's name of the unfinished request that an answer belongs to."""
        return self._outputs.request_of(handle)

    def _make_group(
        self, request_id: str, prepared: PreparedRequest, messages: list[EngineCoreRequest], arrival_time: float
    ) -> RequestGroup:
        prompt_token_ids = prepared.prompt_token_ids.tolist()
        arrival_ts = time.monotonic() - max(0.0, time.time() - arrival_time)
        states = [
            RequestState(message.handle, index, message.sampling_params, prompt_token_ids, self._tokenizer, arrival_ts)
            for index, message in enumerate(messages)
        ]
        return RequestGroup(
            request_id, prepared.prompt, prompt_token_ids, prepared.params.output_kind, states, arrival_time
        )
