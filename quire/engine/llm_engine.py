"""LLMEngine: requests in, outputs out, one step at a time. The synchronous front-end of an engine core.

Called by `LLM` and the command line. Owns the front-end and the way to the engine core; the core behind `client` owns
everything else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from quire import envs
from quire.config import QuireConfig
from quire.config.build import build_config
from quire.config.model import ModelConfig
from quire.core.engine_messages import EngineCoreOutputs, EngineCoreRequest
from quire.core.outputs import RequestOutput
from quire.core.request_options import DEFAULT_OPTIONS, RequestOptions
from quire.core.sampling_params import SamplingParams
from quire.core.stats import SchedulerStats
from quire.core.tenancy import NO_TENANT, TenantShare
from quire.core.worker_call import make_call
from quire.engine.config_lookup import resolve_config
from quire.engine.core_client.sleepable import SleepableClient
from quire.engine.front_end import FrontEnd
from quire.engine.mp_factory import build_multiprocess_engine
from quire.engine.named_plugins import note_plugins
from quire.engine.parts import EngineParts
from quire.engine.stat_logger import StatLogger
from quire.engine.stat_loggers import StatLoggers
from quire.errors import EngineDeadError, QuireClientError, UnsupportedError, ValidationError
from quire.platforms.detect import detect_platform
from quire.utils.garbage import collector_paused
from quire.utils.phases import PhaseTimer

if TYPE_CHECKING:
    from quire.engine.offline_metrics import OfflineMetrics
    from quire.metrics.records import Metric


class LLMEngine:
    """Add requests, then call `step` until nothing is unfinished."""

    def __init__(self, parts: EngineParts) -> None:
        self.config = parts.config
        self.tokenizer = parts.tokenizer
        self.chat_template = parts.chat_template
        self.defaults = parts.defaults
        self.last_stats = SchedulerStats()
        self._client = parts.client
        self._front = FrontEnd(parts)
        self._stat_logger: StatLogger | None = None
        self._metrics: OfflineMetrics | None = None
        if not parts.config.observability.disable_log_stats:
            from quire.engine.offline_metrics import OfflineMetrics  # late: loads Prometheus' library

            self._stat_logger, self._metrics = StatLogger(), OfflineMetrics(parts.config)
        self._plugin_loggers = StatLoggers(parts.config)
        self._dead: EngineDeadError | None = None

    @property
    def vllm_config(self) -> QuireConfig:
        """`config`, by vLLM's name."""
        return self.config

    @property
    def model_config(self) -> ModelConfig:
        """Settings of the model, `max_model_len` among them."""
        return self.config.model

    @classmethod
    def from_config(cls, config: QuireConfig, *, in_process: bool = True, **options: Any) -> LLMEngine:
        """The engine that `config` describes, its core in this process or in another; `options` as `build_parts`.

        Several replicas are always in other processes; with an external launcher each process has one.
        """
        if not in_process or (config.parallel.data_parallel_size > 1 and not config.parallel.is_launched):
            return cls(build_multiprocess_engine(config, **options))
        envs.prefer_sleeping_threads()
        timer = PhaseTimer()
        with timer.phase("configuration"):  # first: what is wrong with it is found before torch is loaded
            platform = detect_platform(config.device.device)
            config, model_dir = resolve_config(config, platform)
            note_plugins(config, options.get("logits_processors", ()))
        with collector_paused():
            with timer.phase("torch"):
                from quire.engine.factory import build_parts  # late: loads torch

            return cls(build_parts(config, model_dir, platform, timer, **options))

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
        tenant: TenantShare = NO_TENANT,
        queue_timeout: float | None = None,
    ) -> str:
        """Queue a request.

        Args:
            request_id: the caller's name for it, unused by any unfinished request.
            prompt: in any form of `core.inputs.parse_prompt`.
            params: how its tokens are chosen.
            arrival_time: seconds, wall clock; default: now.
            priority: lower runs first, where the scheduling policy looks at it.
            add_special_tokens: write what the tokenizer puts around a text.
            tenant: whose it is, where the scheduling policy is `fair`.
            queue_timeout: seconds that it may wait without ever running, before it ends with finish_reason
                "queue_timeout"; 0 = any, None = as the settings say.

        Returns:
            `request_id`.

        Raises:
            ValidationError: the request cannot run; no other request is affected.
            EngineDeadError: the engine has stopped.
        """
        options = RequestOptions(
            priority=priority, tenant=tenant, queue_timeout=queue_timeout, add_special_tokens=add_special_tokens
        )
        return self.submit(request_id, prompt, params, options, arrival_time)

    def submit(
        self,
        request_id: str,
        prompt: Any,
        params: SamplingParams,
        options: RequestOptions = DEFAULT_OPTIONS,
        arrival_time: float | None = None,
    ) -> str:
        """As `add_request`, with its options as one value."""
        self._require_alive()
        submission = self._front.prepare(request_id, prompt, params, options, arrival_time)
        handles = [state.handle for state in submission.group.states]
        for message in submission.messages:
            self._send(message, handles)
        self._front.register(submission)
        if self._metrics is not None:
            self._metrics.note_request(request_id, params)
        return request_id

    def step(self) -> list[RequestOutput]:
        """Run one step; returns the outputs that are due, none for requests that only moved on unseen.

        Raises:
            EngineDeadError: the step failed; every request is lost and the engine is of no further use.
        """
        self._require_alive()
        step = self._run_core_step()
        if step is None:
            return []
        self.last_stats = step.stats
        if self._stat_logger is not None:
            self._stat_logger.record(step)
        self._plugin_loggers.record(step)
        effects = self._front.process(step)
        if effects.handles_to_abort:
            self._client.abort_requests(effects.handles_to_abort)
        if self._metrics is not None:
            self._metrics.record(step, effects.outputs)
        return effects.outputs

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """End requests; each gets its final output (finish_reason "abort") from a later `step`.

        Unknown and finished ids are ignored.
        """
        ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        self._client.abort_requests(self._front.handles_of(ids))

    def discard_requests(self, request_ids: Iterable[str]) -> None:
        """End requests without any further output."""
        names = list(request_ids)
        if self._metrics is not None:
            self._metrics.forget(names)
        handles = self._front.discard(names)
        if self._dead is None:
            self._client.abort_requests(handles)

    def has_unfinished_requests(self) -> bool:
        """True while `step` has anything to give."""
        return len(self._front) > 0

    def get_num_unfinished_requests(self) -> int:
        """Requests whose final output is still to come."""
        return len(self._front)

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget all cached blocks, those of running requests if asked; False while any block is in use."""
        self._require_alive()
        return self._client.reset_prefix_cache(reset_running_requests)

    def sleep(self) -> None:
        """End the core and give back its memory; unfinished requests end without an output.

        Raises:
            UnsupportedError: the engine was made without sleep mode.
        """
        self._require_alive()
        client = self._sleepable()
        self.discard_requests(self._front.request_ids)
        client.sleep()

    def wake_up(self) -> None:
        """Build the core again; raises as building the engine does."""
        self._require_alive()
        self._sleepable().wake_up()

    @property
    def is_asleep(self) -> bool:
        """True between `sleep` and `wake_up`."""
        return isinstance(self._client, SleepableClient) and self._client.is_asleep

    def _sleepable(self) -> SleepableClient:
        if not isinstance(self._client, SleepableClient):
            raise UnsupportedError(
                "sleep mode is off", hint="create it with enable_sleep_mode=True", field="enable_sleep_mode"
            )
        return self._client

    def do_log_stats(self) -> None:
        """Log now what was counted since the last line of statistics; nothing where nothing is counted."""
        if self._stat_logger is not None:
            self._stat_logger.flush()

    def get_metrics(self) -> list[Metric]:
        """What was counted, under the names of a server's /metrics.

        Raises:
            ValidationError: nothing is counted: disable_log_stats is True.
        """
        if self._metrics is None:
            raise ValidationError(
                "no statistics: the engine runs with disable_log_stats",
                hint="create it with disable_log_stats=False",
                field="disable_log_stats",
            )
        return self._metrics.read()

    def call_worker(self, method: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a method of the worker by name, or a function with the worker in front of its arguments.

        Raises:
            ValidationError: the worker has no such method.
            UnsupportedError: the engine core runs in another process.
        """
        self._require_alive()
        return self._client.call_worker(method, *args, **kwargs)

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        of_model: bool = False,
    ) -> list[Any]:
        """As `LLM.collective_rpc`; with `of_model` a function gets the model of each rank, not its worker."""
        self._require_alive()
        parallel = self.config.parallel
        if not self._client.has_worker or (parallel.num_ranks > 1 and not parallel.is_launched):
            return self._client.collective_rpc(make_call(method, args, kwargs, of_model=of_model), timeout)
        if not of_model:
            return [self.call_worker(method, *args, **(kwargs or {}))]
        assert callable(method), "a function of the model"
        return [method(self.call_worker(attrgetter("model")), *args, **(kwargs or {}))]

    def profile(self, starts: bool) -> bool:
        """Start recording steps, or stop and write the trace; False where that was done before."""
        self._require_alive()
        return self._client.profile(starts)

    def shutdown(self) -> None:
        """End the engine core; harmless when repeated."""
        if self._dead is None:
            self._dead = EngineDeadError("the engine was shut down", hint="create a new one")
        self._plugin_loggers.close()
        self._client.shutdown()

    def _require_alive(self) -> None:
        if self._dead is not None:
            raise self._dead

    def _run_core_step(self) -> EngineCoreOutputs | None:
        try:
            return self._client.get_output()
        except BaseException as error:  # whatever broke the step, the state behind it cannot be trusted
            self._front.discard(self._front.request_ids)
            self._dead = EngineDeadError(
                f"the engine stopped: {type(error).__name__}: {error}",
                hint="all unfinished requests are lost; create a new engine",
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
