"""A step that raises: the request at fault ends, and the others get the tokens they always get."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from quire.core.engine_messages import EngineCoreRequest, FinishReason
from quire.core.runner_output import ModelRunnerOutput
from quire.core.sampling_params import SamplingParams
from quire.core.scheduler_output import SchedulerOutput
from quire.engine.core import EngineCore
from quire.engine.kv_event_publisher import NoKVEvents
from quire.engine.step_recovery import MAX_CULPRITS_IN_A_ROW, StepRecovery
from tests.unit.scheduler.harness import make_scheduler

MAX_TOKENS = 12


class ScriptedExecutor:
    """A request's next token is a function of its tokens; those named in `fails_at` raise when they have so many."""

    lock_step = None

    def __init__(self, fails_at: dict[str, int]) -> None:
        self._fails_at = fails_at
        self._rows: dict[int, tuple[str, list[int]]] = {}
        self.num_failures = 0

    def execute_model(self, scheduled: SchedulerOutput) -> SchedulerOutput:
        for row in scheduled.freed_rows.tolist():
            self._rows.pop(row, None)
        for new in scheduled.new_reqs:
            assert new.row not in self._rows, "a row is free before it is given out again"
            self._rows[new.row] = new.request_id, new.token_ids.tolist()
        for row in scheduled.rows.tolist():
            name, tokens = self._rows[row]
            if self._fails_at.get(name, 10**9) <= len(tokens):
                self.num_failures += 1
                raise RuntimeError(f"{name} is at fault")
        return scheduled

    def sample_tokens(self, computed: SchedulerOutput, grammar: object = None) -> ModelRunnerOutput:
        rows = computed.rows[computed.is_sampling]
        for row in rows.tolist():
            tokens = self._rows[row][1]
            tokens.append(1 + (sum(tokens) * 31 + len(tokens)) % 40)
        sampled = np.array([self._rows[row][1][-1] for row in rows.tolist()], dtype=np.int32)
        return ModelRunnerOutput(rows=rows, sampled_token_ids=sampled)

    def shutdown(self) -> None:
        """Nothing to release."""


def run(count: int, fails_at: dict[str, int] | None = None, **settings: Any) -> tuple[dict[int, list[int]], dict, Any]:
    """(tokens, ends, executor) of requests "0", "1", ..., by handle."""
    recovery = StepRecovery()
    executor: Any = ScriptedExecutor(fails_at or {})
    core = EngineCore(executor, make_scheduler(gates=(recovery.gate,), **settings), recovery)
    for handle in range(count):
        prompt = np.arange(1, 4 + handle, dtype=np.int32)
        params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
        core.add_request(
            EngineCoreRequest(
                handle=handle, request_id=str(handle), prompt_token_ids=prompt, sampling_params=params, seed=1
            )
        )
    tokens: dict[int, list[int]] = {handle: [] for handle in range(count)}
    ends = {}
    for _ in range(2000):
        if not core.has_unfinished_requests():
            break
        outputs = core.step()
        if outputs is not None:
            for handle, token_id in zip(outputs.handles.tolist(), outputs.new_token_ids.tolist(), strict=True):
                tokens[handle].append(token_id)
            ends |= {one.handle: one for one in outputs.finished}
    assert not core.has_unfinished_requests()
    return tokens, ends, executor


@pytest.mark.parametrize("culprits", [{"3": 9}, {"0": 3}, {"7": 11, "2": 8}], ids=["decode", "prompt", "two"])
@pytest.mark.parametrize(
    "settings", [{}, {"num_blocks": 16}, {"budget": 8, "prefix_caching": False}], ids=["plain", "scarce", "chunked"]
)
def test_only_the_request_at_fault_ends(culprits: dict[str, int], settings: dict[str, Any]):
    expected, _, _ = run(8, **settings)
    tokens, ends, _ = run(8, culprits, **settings)
    for handle in range(8):
        if str(handle) in culprits:
            assert ends[handle].finish_reason is FinishReason.ERROR
            assert ends[handle].error == f"RuntimeError: {handle} is at fault"
            num_tokens = culprits[str(handle)] - (3 + handle)
            assert tokens[handle] == expected[handle][:num_tokens]
        else:
            assert tokens[handle] == expected[handle]
            assert ends[handle].finish_reason is FinishReason.LENGTH


def test_the_search_is_by_halves():
    _, _, executor = run(8, {"5": 10})
    assert executor.num_failures <= 5


def test_a_failure_that_does_not_come_again_ends_nobody():
    expected, _, _ = run(5)
    recovery = StepRecovery()
    executor: Any = ScriptedExecutor({"2": 7})
    core = EngineCore(executor, make_scheduler(gates=(recovery.gate,)), recovery)
    tokens: dict[int, list[int]] = {handle: [] for handle in range(5)}
    for handle in range(5):
        params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
        core.add_request(
            EngineCoreRequest(
                handle=handle, request_id=str(handle), prompt_token_ids=np.arange(1, 4 + handle, dtype=np.int32),
                sampling_params=params, seed=1,
            )
        )  # fmt: skip
    while core.has_unfinished_requests():
        outputs = core.step()
        if executor.num_failures:
            executor._fails_at.clear()
        if outputs is not None:
            for handle, token_id in zip(outputs.handles.tolist(), outputs.new_token_ids.tolist(), strict=True):
                tokens[handle].append(token_id)
    assert tokens == expected


def test_an_engine_in_which_everything_fails_stops():
    with pytest.raises(RuntimeError, match="at fault"):
        run(10, {str(handle): 0 for handle in range(10)})
    assert MAX_CULPRITS_IN_A_ROW < 10


def test_batches_of_kv_events_that_were_dropped_are_told_once_in_a_steps_stats():
    class DroppingEvents(NoKVEvents):
        dropped = iter([0, 2, 0])

        def take_num_dropped(self) -> int:
            return next(self.dropped)

    core = EngineCore(ScriptedExecutor({}), make_scheduler(), StepRecovery(), kv_events=DroppingEvents())  # type: ignore[arg-type]
    params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
    prompt = np.arange(1, 4, dtype=np.int32)
    core.add_request(
        EngineCoreRequest(handle=0, request_id="0", prompt_token_ids=prompt, sampling_params=params, seed=1)
    )
    told = [outputs.stats.kv_event_batches_dropped for outputs in (core.step(), core.step(), core.step()) if outputs]
    assert told == [0, 2, 0]
