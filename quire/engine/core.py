"""EngineCore: schedule -> execute -> sample -> update; a step that raises goes to `step_recovery`.

Called by an engine core client. Owns the executor and the scheduler.

One step, as `EngineCore.step` runs it:

    step = scheduler.schedule()                          # which rows compute which tokens, as a frozen message
    computed = executor.execute_model(step.output)       # the model's hidden states, on the device
    masks = grammars.begin_masks(handles, drafts)        # meanwhile, on a thread: which tokens are allowed
    sampled = executor.sample_tokens(computed, masks)    # one token id for each row that samples
    scheduler.update_from_output(step, sampled)          # lengths, stops, full blocks into the prefix cache
    outputs = take_outputs()                             # new tokens and finished requests, for the front end
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from quire.core.engine_messages import EngineCoreOutputs, EngineCoreRequest, FinishReason
from quire.core.expert_group import LockStep
from quire.core.live_state import EngineState
from quire.core.memory_parts import MemoryPart
from quire.core.runner_output import ModelRunnerOutput
from quire.core.worker_call import WorkerCall
from quire.engine.in_flight import ComputingStep, InFlight
from quire.engine.kv_event_publisher import NO_KV_EVENTS, KVEventFlusher
from quire.engine.speculation_reports import SpeculationReports
from quire.engine.step_meter import StepMeter
from quire.engine.step_recovery import StepRecovery
from quire.engine.step_watch import StepWatch
from quire.errors import EngineDeadError, QuireClientError
from quire.executor.base import Executor
from quire.scheduler.interface import SchedulerInterface
from quire.scheduler.step import Step
from quire.scheduler.virtual_counters import VirtualCounters
from quire.scheduler.waiting import Blocked
from quire.structured_output.manager import GrammarManager, no_pool

MIN_IDLE_S, MAX_IDLE_S = 0.0001, 0.005
PATIENCE_S, MAX_TRANSFERS_S = 1.0, 10.0
"""For which a reset of the prefix cache waits for blocks under way: to end, and to be given up."""
END_TRANSFERS_S = 10.0
"""For which a planned end waits for blocks that are under way to a tier; then they are given up."""


def nothing() -> None:
    """What an engine core without further parts calls when it ends."""


def never() -> bool:
    """Whether blocks are under way, where there is no tier."""
    return False


class EngineCore:
    """One engine: a scheduler and the executor that runs what it decides.

    Args:
        recovery: what to do when a step raises; its gate is the scheduler's.
        num_blocks: blocks of the KV cache, for information.
        on_step: called with the number of tokens of each step, before it runs.
        clock: seconds, for the duration of steps.
        grammars: of structured requests; None = requests have none.
        on_shutdown: called when the core ends.
        kv_events: flushed after each step, and closed when the core ends.
        has_transfers: whether blocks are under way between the cache and a tier behind it.
        give_up_transfers: ends those that can be, with the next steps.
        speculation: adds to outputs what was decided about drafts; None = nothing is drafted.
        observe: the control plane at this moment, given the last refusal of admission; None = it cannot be looked at.
        service: what the scheduler has served to tenants; None = it shares nothing among them.
        tier_bytes: host memory that blocks behind the cache take now.
        meter: adds to outputs what steps computed; None = it is off.
        max_steps_in_flight: steps that are computed before the first of them is sampled; 1 = one after the other.
    """

    def __init__(
        self,
        executor: Executor,
        scheduler: SchedulerInterface,
        recovery: StepRecovery,
        num_blocks: int = 0,
        on_step: Callable[[int], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        grammars: GrammarManager | None = None,
        on_shutdown: Callable[[], None] = nothing,
        kv_events: KVEventFlusher = NO_KV_EVENTS,
        has_transfers: Callable[[], bool] = never,
        give_up_transfers: Callable[[], None] = nothing,
        speculation: SpeculationReports | None = None,
        observe: Callable[[Blocked | None], EngineState] | None = None,
        service: VirtualCounters | None = None,
        tier_bytes: Callable[[], int] = int,
        meter: StepMeter | None = None,
        max_steps_in_flight: int = 1,
    ) -> None:
        self._executor = executor
        self._scheduler = scheduler
        self._recovery = recovery
        self._clock = clock
        self._on_step = on_step
        self._grammars = grammars or GrammarManager(no_pool)
        self._on_shutdown = on_shutdown
        self._kv_events = kv_events
        self._has_transfers, self._give_up_transfers = has_transfers, give_up_transfers
        self._speculation = speculation
        self._observe = observe
        self._watch: StepWatch | None = None
        self._blocked: Blocked | None = None  # the last refusal of admission
        self._service = service
        self._in_flight = InFlight(max_steps_in_flight) if max_steps_in_flight > 1 else None
        self._tier_bytes = tier_bytes
        self._meter = meter
        self._held: frozenset[int] = frozenset()
        self._idle_s = 0.0
        self.num_blocks = num_blocks

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queue a request; raises `ValidationError` when it can never run."""
        self._scheduler.add_request(request)
        self._grammars.add(request)

    def abort_requests(self, handles: Iterable[int]) -> None:
        """End requests; their blocks are free before the next step."""
        self._scheduler.finish_requests(handles, FinishReason.ABORT)

    def take_over_service(self, counters: Mapping[str, float]) -> None:
        """Tenants, by name, were served so much by this and other engine cores together."""
        if self._service is not None:
            self._service.take_over(counters)

    def step(self) -> EngineCoreOutputs | None:
        """Run one step; None when there was nothing to run or to report.

        A step that raises ends the request that makes it raise; raises only when that is no single request.
        """
        outputs = self._step()
        self._kv_events.flush()
        if outputs is not None and (num_dropped := self._kv_events.take_num_dropped()):
            stats = dataclasses.replace(outputs.stats, kv_event_batches_dropped=num_dropped)
            outputs = dataclasses.replace(outputs, stats=stats)
        if self._speculation is not None and outputs is not None:
            outputs = self._speculation.add(outputs, is_last=not self._scheduler.has_unfinished_requests())
        return outputs

    def _step(self) -> EngineCoreOutputs | None:
        if self._in_flight is not None:
            return self._step_of_several(self._in_flight)
        self._hold_grammars()
        self._end_failed_grammars()
        step = self._scheduler.schedule()
        if step is None:
            self._grammars.wait()
            return self.take_outputs()
        if self._on_step is not None:
            self._on_step(step.output.total_num_scheduled_tokens)
        start = self._clock()
        try:
            masks = self._grammars.begin_masks(step.sampling_handles, step.sampling_drafts())
            computed = self._executor.execute_model(step.output)
            sampled = self._executor.sample_tokens(computed, None if masks is None else masks.result())
        except EngineDeadError:
            raise
        except Exception as error:
            self._recovery.recover(self._scheduler, step, error)
            return self.take_outputs()
        if masks is not None:
            self._end_failed_grammars()
        return self._update(step, sampled, start)

    def _update(self, step: Step, sampled: ModelRunnerOutput, start: float) -> EngineCoreOutputs:
        """Take in a step that began at `start`."""
        seconds = None if sampled.is_capture else self._clock() - start  # which says nothing of steps to come
        outputs = self._scheduler.update_from_output(step, sampled, seconds)
        self._blocked = step.plan.blocked
        if self._watch is not None and not self._watch.note(step, self._clock() - start):
            self._watch = None
        if not step.output.total_num_scheduled_tokens:
            self._pause_idle()
        elif self._idle_s:
            self._idle_s = 0.0
        self._recovery.note(outputs)
        self._grammars.note(outputs)
        return outputs if self._meter is None else self._meter.add(outputs, step.output, self._clock() - start)

    def _step_of_several(self, in_flight: InFlight) -> EngineCoreOutputs | None:
        """As `_step`: schedule and compute as many steps as may be in flight, then take in the oldest."""
        while not in_flight.outputs and in_flight.has_room:
            self._hold_grammars()
            self._end_failed_grammars()
            step = self._scheduler.schedule()
            if step is None:
                break
            if in_flight.must_end_before(step.output):
                self._take_in_all(in_flight)
            self._begin(in_flight, step)
        if not in_flight.outputs and in_flight.steps:
            self._take_in_oldest(in_flight)
        if in_flight.outputs:
            return in_flight.outputs.popleft()
        self._grammars.wait()
        return self.take_outputs()

    def _begin(self, in_flight: InFlight, step: Step) -> None:
        if self._on_step is not None:
            self._on_step(step.output.total_num_scheduled_tokens)
        start = self._clock()
        try:
            computed = self._executor.execute_model(step.output)
        except EngineDeadError:
            raise
        except Exception as error:
            self._take_in_all(in_flight)
            self._recovery.recover(self._scheduler, step, error)
            return
        in_flight.steps.append(ComputingStep(step, computed, start))

    def _take_in_oldest(self, in_flight: InFlight) -> None:
        """Sample a step; what it gives is kept for the caller."""
        step, computed, start = in_flight.steps.popleft()
        try:
            masks = self._grammars.begin_masks(step.sampling_handles, step.sampling_drafts())
            sampled = self._executor.sample_tokens(computed, None if masks is None else masks.result())
        except EngineDeadError:
            raise
        except Exception as error:
            self._recovery.recover(self._scheduler, step, error)
            return
        if masks is not None:
            self._end_failed_grammars()
        in_flight.outputs.append(self._update(step, sampled, max(start, in_flight.last_end)))
        in_flight.last_end = self._clock()

    def _take_in_all(self, in_flight: InFlight) -> None:
        while in_flight.steps:
            self._take_in_oldest(in_flight)

    def _pause_idle(self) -> None:
        """Nothing computes and blocks are in flight: ask for them less and less often."""
        time.sleep(self._idle_s)
        self._idle_s = min(MAX_IDLE_S, 2 * self._idle_s + MIN_IDLE_S)

    def take_outputs(self) -> EngineCoreOutputs | None:
        """Ends and events that happened outside a step; None when there are none."""
        outputs = self._scheduler.take_outputs()
        if outputs is not None:
            self._recovery.note(outputs)
            self._grammars.note(outputs)
        return outputs

    def live_state(self) -> EngineState | None:
        """What this core is doing, for people; called between steps. None = its scheduler cannot be looked at."""
        if self._observe is None:
            return None
        if self._watch is None:
            self._watch = StepWatch()
        steps, chunks = self._watch.look()
        return msgspec.structs.replace(self._observe(self._blocked), steps=steps, chunks=chunks)

    def memory_parts(self) -> dict[MemoryPart, int]:
        """What this process has asked memory for, in bytes; called between steps."""
        parts: dict[MemoryPart, int] = self._executor.call_worker("memory_parts")
        return {**parts, MemoryPart.HOST_TIER: self._tier_bytes(), MemoryPart.GRAMMARS: self._grammars.cached_bytes}

    def profile(self, starts: bool) -> bool | str:
        """Start recording steps, or stop: then the file, "" = there was no step. False where that was done before.
        Called between steps.
        """
        if starts:
            return bool(self._executor.call_worker("start_profile"))
        file: str | None = self._executor.call_worker("stop_profile")
        return False if file is None else file

    @property
    def lock_step(self) -> LockStep | None:
        """With cores that share experts with this one; None = there are none."""
        return self._executor.lock_step

    @property
    def rank_pids(self) -> list[int]:
        """Other processes of this machine that compute the model, in the order of their ranks."""
        return [pid for pid in self._executor.rank_pids if pid is not None]

    def has_unfinished_requests(self) -> bool:
        """True while any request waits or runs."""
        return self._scheduler.has_unfinished_requests() or bool(self._in_flight)

    def has_work(self) -> bool:
        """True while a step has something to do: for a request, or for blocks on their way to a tier."""
        return self.has_unfinished_requests() or self._has_transfers()

    def send_transfers(self) -> None:
        """Where no step is run without requests: begin what ended requests leave to be stored."""
        if self._has_transfers() and not self._scheduler.has_unfinished_requests():
            self.step()

    def _end_transfers(self, patience_s: float = PATIENCE_S, most_s: float = MAX_TRANSFERS_S) -> None:
        """Blocks under way are in use: run steps until there are none, or as long as is bearable."""
        start = time.monotonic()
        while self._has_transfers() and not self._scheduler.has_unfinished_requests():
            waited_s = time.monotonic() - start
            if waited_s > most_s:
                return
            if waited_s > patience_s:
                self._give_up_transfers()
            self.step()

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget all cached blocks, those of running requests if asked; False while any block is in use."""
        self._end_transfers()
        if self._in_flight is not None:
            self._take_in_all(self._in_flight)
        is_done = self._scheduler.reset_prefix_cache(reset_running_requests)
        self._kv_events.flush()
        return is_done

    def call_worker(self, method: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a method of the worker, or a function of it; between steps, by the owner of this core."""
        return self._executor.call_worker(method, *args, **kwargs)

    def collective_rpc(self, call: WorkerCall) -> list[Any]:
        """As `Executor.collective_rpc`; between steps."""
        return self._executor.collective_rpc(call)

    def end(self) -> None:
        """A planned end: let a tier store what ended requests leave, for a bounded time. Others were aborted before."""
        self._end_transfers(END_TRANSFERS_S, END_TRANSFERS_S + PATIENCE_S)
        self.shutdown()

    def watch_failure(self, on_failure: Callable[[str], None]) -> None:
        """Call `on_failure` with the reason when a process that computes the model ends; also while nothing runs."""
        self._executor.watch_failure(on_failure)

    def watch_silence(self, show: Callable[[float], None]) -> None:
        """Call `show` again and again with the seconds since something came from ranks of other machines, if any."""
        self._executor.watch_silence(show)

    def shutdown(self) -> None:
        """Release the executor; harmless when repeated."""
        self._grammars.shutdown()
        self._on_shutdown()
        self._kv_events.close()
        self._executor.shutdown()

    def _hold_grammars(self) -> None:
        """Requests whose grammars are not through their tokens sit out the step; the others do not wait for them."""
        held = self._grammars.settle()
        if held != self._held:
            self._held = frozenset(held)
            self._scheduler.hold(self._held)

    def _end_failed_grammars(self) -> None:
        """End requests whose grammar cannot be made or followed; of the step under way they take nothing."""
        for handle, failure in self._grammars.take_failures().items():
            error = f"{failure.message} ({failure.hint})" if failure.hint else failure.message
            field = failure.field if isinstance(failure, QuireClientError) else None
            self._scheduler.finish_requests([handle], FinishReason.ERROR, error, field)
