"""OutputProcessor: one step's arrays in, the outputs that users get out.

Called by `LLMEngine` after each step of the engine core. Owns every unfinished request's `RequestGroup`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from quire.core.draft_stats import DraftOutcomes
from quire.core.engine_messages import EngineCoreOutputs, FinishedRequest, FinishReason
from quire.core.outputs import RequestOutput
from quire.core.stats import EventKind
from quire.engine.logprobs import lines_by_entry
from quire.engine.request_state import RequestGroup, RequestState
from quire.errors import EngineGenerateError, QueueTimeoutError, QuireError, ValidationError
from quire.logger import get_logger

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ProcessedStep:
    """What one step means for the front-end.

    Attributes:
        outputs: what is due to the users, in the order in which requests first appear in the step.
        handles_to_abort: answers that a stop text ended; the engine core does not know it yet.
        failures: request id -> what went wrong, for requests of which an answer failed.
    """

    outputs: list[RequestOutput] = field(default_factory=list)
    handles_to_abort: list[int] = field(default_factory=list)
    failures: dict[str, QuireError] = field(default_factory=dict)


class OutputProcessor:
    """Keeps what is unfinished, and turns steps into outputs.

    Args:
        keeps_draft_steps: keep what the drafts of each single step came to.
    """

    def __init__(self, *, keeps_draft_steps: bool = False) -> None:
        self._keeps_draft_steps = keeps_draft_steps
        self._groups: dict[str, RequestGroup] = {}
        self._by_handle: dict[int, tuple[RequestGroup, RequestState]] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._groups

    @property
    def request_ids(self) -> list[str]:
        """Unfinished requests, oldest first."""
        return list(self._groups)

    def add(self, group: RequestGroup) -> None:
        """Begin to follow a request, whose id no unfinished one has."""
        assert group.request_id not in self._groups, "the engine checks ids before it sends anything"
        self._groups[group.request_id] = group
        self._by_handle.update({state.handle: (group, state) for state in group.states})

    def forget(self, request_ids: Iterable[str]) -> list[int]:
        """Stop following requests, without any output; returns the handles of their unfinished answers."""
        handles = self.handles_of(request_ids)
        for request_id in {self._by_handle[handle][0].request_id for handle in handles}:
            self._remove(self._groups[request_id])
        return handles

    def handles_of(self, request_ids: Iterable[str]) -> list[int]:
        """Handles of the unfinished answers of requests; unknown ids have none."""
        groups = [self._groups[request_id] for request_id in request_ids if request_id in self._groups]
        return [state.handle for group in groups for state in group.states if not state.is_finished]

    def state_of(self, handle: int) -> RequestState | None:
        """An unfinished answer; None when it is not followed (any longer)."""
        found = self._by_handle.get(handle)
        return None if found is None or found[1].is_finished else found[1]

    def request_of(self, handle: int) -> str | None:
        """The id of the request an answer belongs to; None when it is not followed (any longer)."""
        found = self._by_handle.get(handle)
        return None if found is None else found[0].request_id

    def end(self, handle: int, reason: FinishReason) -> RequestOutput | None:
        """An answer ended without the engine core; the output that is due, if any."""
        group, state = self._by_handle.pop(handle)
        state.end(reason)
        return self._take_output(group, [state])

    def process(self, step: EngineCoreOutputs) -> ProcessedStep:
        """Take in one step; handles that are not followed (any longer) are ignored."""
        processed = ProcessedStep()
        self._note_events(step)
        self._add_prompt_logprobs(step)
        if step.drafts is not None:
            self._note_drafts(step.drafts)
        finished = {one.handle: one for one in step.finished}
        lines = _lines_by_handle(step)
        changed: dict[str, tuple[RequestGroup, list[RequestState]]] = {}
        prefilled = [event.handle for event in step.events if event.kind is EventKind.PREFILLED]
        for handle, token_ids in _tokens_by_handle(step, also=[*finished, *prefilled]).items():
            found = self._by_handle.get(handle)
            if found is None:
                continue
            group, state = found
            end = finished.get(handle)
            if end is not None and end.error is not None:
                processed.failures[group.request_id] = _failure(group.request_id, end)
            if state.add_tokens(token_ids, step.logprobs, lines.get(handle, ()), end, step.timestamp):
                processed.handles_to_abort.append(handle)
            if state.finish_reason is not None:
                del self._by_handle[handle]
            if group.request_id in changed:
                changed[group.request_id][1].append(state)
            else:
                changed[group.request_id] = group, [state]
        for group, states in changed.values():
            output = self._take_output(group, states)
            if output is not None:
                processed.outputs.append(output)
        return processed

    def _take_output(self, group: RequestGroup, changed: list[RequestState]) -> RequestOutput | None:
        is_finished = group.is_finished
        if is_finished:
            self._remove(group)
        return group.take_output(changed, finished=is_finished)

    def _remove(self, group: RequestGroup) -> None:
        del self._groups[group.request_id]
        for state in group.states:
            self._by_handle.pop(state.handle, None)

    def _note_events(self, step: EngineCoreOutputs) -> None:
        for event in step.events:
            found = self._by_handle.get(event.handle)
            if found is not None:
                found[1].note_event(event)
                found[1].stats.engine_index = step.engine_index

    def _note_drafts(self, drafts: DraftOutcomes) -> None:
        for handle, num_drafted, num_accepted in drafts.items():
            if handle in self._by_handle:
                state = self._by_handle[handle][1]
                state.note_drafts(num_drafted, num_accepted, keeps_steps=self._keeps_draft_steps)

    def _add_prompt_logprobs(self, step: EngineCoreOutputs) -> None:
        for handle, arrays in step.prompt_logprobs:
            if handle in self._by_handle:
                self._by_handle[handle][1].logprobs.add_prompt(arrays)


def _failure(request_id: str, end: FinishedRequest) -> QuireError:
    """The error of a request that failed: that it was wrong, where a field of it was."""
    if end.finish_reason is FinishReason.QUEUE_TIMEOUT:
        return QueueTimeoutError(end.error or "", hint="try again later, or allow a longer queue_timeout")
    logger.error("request %s failed: %s", request_id, end.error)
    if end.error_field is not None:
        return ValidationError(end.error or "", field=end.error_field)
    return EngineGenerateError(end.error or "", hint="other requests are not affected")


def _tokens_by_handle(step: EngineCoreOutputs, also: Iterable[int]) -> dict[int, list[int]]:
    """Handle -> its new tokens; `also` names handles that need an entry."""
    tokens: dict[int, list[int]] = {}
    for handle, token_id in zip(step.handles.tolist(), step.new_token_ids.tolist(), strict=True):
        if handle in tokens:
            tokens[handle].append(token_id)
        else:
            tokens[handle] = [token_id]
    for handle in also:
        if handle not in tokens:
            tokens[handle] = []
    return tokens


def _lines_by_handle(step: EngineCoreOutputs) -> dict[int, list[int | None]]:
    """Handle -> the line in the step's logprobs of each of its new tokens; empty when the step has none."""
    lines: dict[int, list[int | None]] = {}
    if step.logprobs is not None:
        by_entry = lines_by_entry(step.logprobs)
        for entry, handle in enumerate(step.handles.tolist()):
            lines.setdefault(handle, []).append(by_entry.get(entry))
    return lines
