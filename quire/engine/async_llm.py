"""AsyncLLM: requests in, streams of outputs out, on an event loop; the engine core runs in another process.

Used by servers, through `engine.protocol.EngineClient`. Owns the front-end, the streams, and the supervisor that keeps
the core running. Everything but `from_config` and `shutdown` is called on one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from quire.config import QuireConfig
from quire.config.build import build_config
from quire.config.resolve import UsageContext
from quire.core.beam_search import BeamSearchOutput, BeamSearchParams
from quire.core.engine_messages import EngineCoreOutputs, EngineCoreRequest, FinishReason
from quire.core.live_state import EngineState
from quire.core.outputs import RequestOutput
from quire.core.process_stats import CoreProcesses
from quire.core.request_options import DEFAULT_OPTIONS, RequestOptions
from quire.core.request_snapshot import RequestSnapshot
from quire.core.sampling_params import RequestOutputKind, SamplingParams
from quire.core.stats import SchedulerStats
from quire.core.tenancy import NO_TENANT, TenantShare
from quire.core.worker_call import make_call
from quire.engine.beam_search import request_params, search_output
from quire.engine.core_launcher import CoreProcess
from quire.engine.data_parallel.rank_check import check_rank
from quire.engine.data_parallel.replicas import Replicas, supervise
from quire.engine.data_parallel.totals import TotalStats
from quire.engine.front_end import FrontEnd, StepResult, Submission
from quire.engine.front_ends.remote import RemoteEngine
from quire.engine.mp_factory import EngineStart, begin_start
from quire.engine.output_stream import OutputStream
from quire.engine.parts import FrontEndParts
from quire.engine.protocol import EngineClient, StepListener
from quire.engine.sleep_levels import SleepState
from quire.engine.snapshots import continued, take_snapshot
from quire.engine.step_logs import StepLogs
from quire.engine.supervisor import Supervisor
from quire.engine.weight_controls import WeightControls
from quire.errors import EngineDeadError, QuireError
from quire.logger import get_logger
from quire.structured_output.form_checker import FormChecker
from quire.utils.fair_queue import FairThread
from quire.utils.phases import PhaseTimer

logger = get_logger(__name__)

# Texts longer than this are tokenized beside the event loop.
LONG_TEXT_CHARS = 20_000


class AsyncLLM(WeightControls, EngineClient):
    """An engine for many concurrent requests.

    Args:
        parts: the front-end.
        core: the process of an engine core that is ready; or the cores that another process owns (`FrontEndEngine`).
        launch: starts another such process; None = the owner does.
        others: processes of the cores of other replicas, ready.
        launch_replica: starts a process for a replica with a number; None = there is one core.

    Attributes:
        config: resolved.
        tokenizer: None with skip_tokenizer_init.
        chat_template: None when the model has none.
        defaults: the model's own settings for generation.
        step_listeners: called with every step.
        last_stats: the control plane after the newest step.
        core_start: phases of the first core's start.
    """

    def __init__(
        self,
        parts: FrontEndParts,
        core: CoreProcess | RemoteEngine,
        launch: Callable[[], CoreProcess] | None = None,
        others: Sequence[CoreProcess] = (),
        launch_replica: Callable[[int], CoreProcess] | None = None,
    ) -> None:
        self.config = parts.config
        self.tokenizer = parts.tokenizer
        self.chat_template = parts.chat_template
        self.defaults = parts.defaults
        self.step_listeners: list[StepListener] = []
        self.last_stats = SchedulerStats()
        is_remote, has_replicas = isinstance(core, RemoteEngine), parts.config.parallel.data_parallel_size > 1
        self._front = FrontEnd(parts, core.first_handle if isinstance(core, RemoteEngine) else 0)
        self._streams: dict[str, OutputStream] = {}
        self._totals = TotalStats() if has_replicas else None
        self.core_start = core.start_phases
        self._dead: EngineDeadError | None = None
        # One at a time: each takes the interpreter from the loop, which shall keep its half.
        self._preparing = FairThread("prepare")
        self._forms = FormChecker(parts.config.structured_outputs)
        parts.input_processor.check_forms_with(self._forms.resolve)
        self._logs = None if is_remote else StepLogs(parts.config, names_replicas=has_replicas)
        self._sleep, self._changing = SleepState(), asyncio.Lock()
        self._handles = lambda: self._front.handles_of(self._front.request_ids)
        self._launch = launch if launch_replica is None else launch_replica
        self._supervisor: Supervisor | Replicas | RemoteEngine
        if isinstance(core, RemoteEngine):
            core.listen(self)
            self._supervisor = core
        else:
            self._supervisor = supervise(self, parts.config, core, launch, others, launch_replica)

    @classmethod
    def from_config(cls, config: QuireConfig, *, logits_processors: Sequence[str | type] = ()) -> AsyncLLM:
        """The engine that `config` describes, its core ready; waits for that.

        Raises:
            QuireError: the settings, the model directory or the machine does not allow it.
        """
        return cls.from_start(cls.begin(config, logits_processors=logits_processors))

    @staticmethod
    def begin(config: QuireConfig, *, logits_processors: Sequence[str | type] = ()) -> EngineStart:
        """The first half of `from_config`: the core's process starts, and nothing waits for it.

        Raises:
            QuireError: as `from_config`.
        """
        return begin_start(config, logits_processors=logits_processors, usage=UsageContext.API_SERVER)

    @classmethod
    def from_start(cls, start: EngineStart, timer: PhaseTimer | None = None) -> AsyncLLM:
        """The second half of `from_config`; `timer` gets its phases. Raises as that does."""
        parts = start.finish(timer)
        launch = start.launcher()
        return cls(parts, start.core, launch, start.others, launch if start.others else None)

    @classmethod
    def from_engine_args(cls, engine_args: QuireConfig | Mapping[str, Any], **options: Any) -> AsyncLLM:
        """As `from_config`, from a configuration or from settings by name."""
        config = engine_args if isinstance(engine_args, QuireConfig) else build_config(**engine_args)
        return cls.from_config(config, **options)

    @property
    def errored(self) -> bool:
        """True once the engine is of no further use."""
        return self._dead is not None

    @property
    def is_paused(self) -> bool:
        """True between `pause_generation` and `resume_generation`."""
        return self._supervisor.is_paused

    @property
    def num_restarts(self) -> int:
        """How often the engine core was replaced."""
        return self._supervisor.num_restarts

    @property
    def num_resumed(self) -> int:
        """Answers that were continued on another engine core than they began on."""
        return self._supervisor.num_resumed

    @property
    def core_pid(self) -> int | None:
        """Process id of the engine core."""
        return self._supervisor.core_pid

    async def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        add_special_tokens: bool = True,
        tenant: TenantShare = NO_TENANT,
        queue_timeout: float | None = None,
        data_parallel_rank: int | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Outputs of one request as they come, by `sampling_params.output_kind`; the last has `finished`.

            async for output in engine.generate("Once", SamplingParams(max_tokens=8), "request-1"):
                print(output.outputs[0].text)  # all text so far; only what is new with output_kind=DELTA

        Leaving the iterator early ends the request. While a reader is slow, its deltas are merged.

        Raises:
            ValidationError: the request cannot run; no other is affected.
            EngineGenerateError: this request failed; `QueueTimeoutError` when it waited longer than it may.
            EngineDeadError: the engine has stopped for good.
        """
        options = RequestOptions(
            priority=priority, tenant=tenant, queue_timeout=queue_timeout, cache_salt=cache_salt,
            add_special_tokens=add_special_tokens, data_parallel_rank=data_parallel_rank,
        )  # fmt: skip
        async for output in self._outputs(await self.open_stream(prompt, sampling_params, request_id, options)):
            yield output

    def snapshot(self, request_id: str) -> RequestSnapshot:
        """As `Migratable`."""
        handles = self._front.handles_of([request_id])
        handle = handles[0] if len(handles) == 1 else -1
        state = self._front.state_of(handle)
        return take_snapshot(self.config, request_id, self._supervisor.message_of(handle), state)

    async def resume(self, snapshot: RequestSnapshot, request_id: str) -> AsyncIterator[RequestOutput]:
        """As `Migratable`."""
        prompt, options = continued(self.config, snapshot)
        stream = await self.open_stream(prompt, snapshot.sampling_params, request_id, options)
        async for output in self._outputs(stream):
            yield output

    async def _outputs(self, stream: OutputStream) -> AsyncIterator[RequestOutput]:
        try:
            finished = False
            while not finished:
                output = await stream.get()
                finished = output.finished
                yield output
        finally:  # the reader left, was cancelled, or the request failed
            stream.close()

    async def beam_search(
        self,
        prompt: Any,
        params: BeamSearchParams,
        request_id: str,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        add_special_tokens: bool = True,
    ) -> BeamSearchOutput:
        """The likeliest sequences after a prompt; arguments and errors as `generate`."""
        outputs = self.generate(
            prompt, request_params(params), request_id,
            priority=priority, cache_salt=cache_salt, add_special_tokens=add_special_tokens,
        )  # fmt: skip
        last = [output async for output in outputs if output.finished]
        return search_output(last[0], params, self.tokenizer)

    async def open_stream(
        self,
        prompt: Any,
        sampling_params: SamplingParams,
        request_id: str,
        options: RequestOptions = DEFAULT_OPTIONS,
    ) -> OutputStream:
        """As `EngineClient.open_stream`."""
        self._require_alive()
        self._supervisor.attach()
        if self._sleep.tags:
            self.note_request_while_asleep()

        def prepare() -> Submission:
            return self._front.prepare(request_id, prompt, sampling_params, options)

        rank = options.data_parallel_rank
        if rank is not None:
            check_rank(rank, self._indexes)
        form = sampling_params.structured_outputs
        is_long = isinstance(prompt, str) and len(prompt) > LONG_TEXT_CHARS
        if is_long or (form is not None and form.is_large):
            submission = await asyncio.wrap_future(self._preparing.submit(options.tenant.name, prepare))
            self._require_alive()
            self._front.check_name(request_id, options)
        else:
            submission = prepare()
        stream = OutputStream(
            is_delta=submission.group.output_kind is RequestOutputKind.DELTA,
            on_close=lambda: self._leave(request_id, stream),
        )
        self._front.register(submission)
        self._streams[request_id] = stream
        try:
            for message in submission.messages:
                self._send(message, rank)
        except BaseException:
            stream.close()
            raise
        stream.placed = self._supervisor.live_of(submission.messages[0].handle)
        return stream

    async def abort(self, request_ids: str | Iterable[str]) -> None:
        """End requests; each gets its final output. Unknown and finished ids are ignored."""
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        handles = self._front.handles_of(ids)
        if handles:
            self._supervisor.abort_requests(handles)

    @property
    def data_parallel_size(self) -> int:
        """Replicas that serve, or will again."""
        return len(self._indexes)

    @property
    def num_ready_replicas(self) -> int:
        """Those whose cores run now."""
        if isinstance(self._supervisor, Supervisor):
            return int(not self._supervisor.is_restarting)
        return self._supervisor.num_ready

    async def check_health(self) -> None:
        """Return if the engine can serve; raises `EngineDeadError` otherwise."""
        await self._attached().check_health()

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget all cached blocks, those of running requests if asked; False while any block is in use."""
        supervisor = self._attached()
        if self._sleep.level:
            return True  # there is none
        return bool(await supervisor.call("reset_prefix_cache", reset_running_requests))

    async def profile(self, starts: bool) -> bool:
        """As `Profilable`."""
        supervisor = self._attached()
        if isinstance(supervisor, Replicas):
            return await supervisor.profile(starts)
        return (await supervisor.call("profile", starts)) is not False

    async def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[Any]:
        """As `LLM.collective_rpc` with ranks in other processes; not repeated where a core is restarted meanwhile.

        Raises:
            UnsupportedError: this is one of several front-end processes.
            TimeoutError: the ranks have not answered in time.
        """
        call, supervisor = make_call(method, args, kwargs), self._attached()
        of_all = (
            supervisor.collective_rpc
            if isinstance(supervisor, Replicas)
            else partial(supervisor.call, "collective_rpc")
        )
        try:
            answer = await asyncio.wait_for(of_all(call), timeout)
        except asyncio.TimeoutError:  # which is another class before Python 3.11
            raise TimeoutError(f"the ranks have not answered in {timeout:g} s; the call continues there") from None
        assert isinstance(answer, list), "it is what a core answers"
        return answer

    async def live_states(self) -> list[EngineState]:
        """As `EngineClient.live_states`."""
        supervisor = self._attached()
        if self._sleep.level:
            return []
        if not isinstance(supervisor, Supervisor):
            return await supervisor.live_states()
        state = await supervisor.call("live_state")
        return [state] if isinstance(state, EngineState) else []

    def core_processes(self) -> list[CoreProcesses]:
        """As `Observable`."""
        supervisor = self._supervisor
        return [supervisor.processes()] if isinstance(supervisor, Supervisor) else supervisor.processes()

    def shutdown(self) -> None:
        """End the engine core; harmless when repeated."""
        self._end()
        self._supervisor.close()

    async def stop(self) -> None:
        """As `shutdown`, on the engine's event loop, which goes on while the core ends."""
        self._end()
        await self._supervisor.stop()

    # --- what the supervisor tells ---

    def on_step(self, step: EngineCoreOutputs) -> None:
        """A step's outputs came."""
        self.last_stats = step.stats if self._totals is None else self._totals.note(step)
        if self._logs is not None:
            self._logs.record(step)
        for listener in self.step_listeners:
            listener(step)
        self._apply(self._front.process(step))

    def on_failed(self, handle: int, error: QuireError) -> None:
        """The core refused a request, or it was given up."""
        request_id = self._front.request_of(handle)
        if request_id is not None:
            self._fail(request_id, error)

    def on_aborted(self, handle: int) -> None:
        """A request that was to end was lost with its core."""
        if self._front.state_of(handle) is not None:
            output = self._front.end(handle, FinishReason.ABORT)
            self._deliver([output] if output is not None else [])

    def on_dead(self, error: EngineDeadError) -> None:
        """The engine is of no further use: every request ends with `error`."""
        self._dead = self._dead or error
        self._front.discard(self._front.request_ids)
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.fail(error)

    def restart(self, handle: int) -> list[int] | None:
        """A request is about to be sent again: the tokens it has put out; None when it was abandoned."""
        state = self._front.state_of(handle)
        if state is None:
            return None
        state.restart()
        return state.token_ids

    # --- within ---

    def _attached(self) -> Supervisor | Replicas | RemoteEngine:
        """What to call for the cores, of an engine that is alive."""
        self._require_alive()
        self._supervisor.attach()
        return self._supervisor

    @property
    def _indexes(self) -> Sequence[int]:
        """Numbers of the replicas that serve, or will again."""
        return (0,) if isinstance(self._supervisor, Supervisor) else self._supervisor.indexes

    def _send(self, message: EngineCoreRequest, rank: int | None) -> None:
        if rank is not None and not isinstance(self._supervisor, Supervisor):
            self._supervisor.add_request(message, rank)
        else:
            self._supervisor.add_request(message)

    def _end(self) -> None:
        """End everything but the core."""
        if self._dead is None:
            self.on_dead(EngineDeadError("the engine was shut down", hint="make a new one"))
        self._preparing.close()
        self._forms.close()
        if self._logs is not None:
            self._logs.close()

    def _apply(self, effects: StepResult) -> None:
        if effects.handles_to_abort:
            self._supervisor.abort_requests(effects.handles_to_abort)
        for request_id, failure in effects.failures.items():
            self._fail(request_id, failure)
        self._deliver(effects.outputs)

    def _deliver(self, outputs: Iterable[RequestOutput]) -> None:
        streams = self._streams
        for output in outputs:
            stream = streams.pop(output.request_id, None) if output.finished else streams.get(output.request_id)
            if stream is not None:
                self._put(stream, output)

    def _put(self, stream: OutputStream, output: RequestOutput) -> None:
        try:
            stream.put(output)
        except Exception:  # a reader's mistake must not take the step's other outputs with it
            logger.exception("the reader of request %s is too slow or gone: dropping its output", output.request_id)
            stream.close()
            self._discard(output.request_id)

    def _fail(self, request_id: str, error: QuireError) -> None:
        stream = self._streams.get(request_id)
        if stream is not None:
            self._discard(request_id)
            stream.fail(error)

    def _leave(self, request_id: str, stream: OutputStream) -> None:
        """The reader of a stream is gone; its request ends, unless it has."""
        if self._streams.get(request_id) is stream:
            self._discard(request_id)

    def _discard(self, request_id: str) -> None:
        """Forget a request; the core aborts it."""
        self._streams.pop(request_id, None)
        handles = self._front.discard([request_id])
        if handles and self._dead is None:
            self._supervisor.abort_requests(handles)

    def _require_alive(self) -> None:
        if self._dead is not None:
            raise self._dead
