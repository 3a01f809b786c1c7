"""EngineClient: what a server needs of an engine. `AsyncLLM` is one; tests have another.

Called by the HTTP layer, which knows no more of the engine than this.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from typing import Any, Protocol, runtime_checkable

from quire.config import QuireConfig
from quire.core.engine_messages import EngineCoreOutputs
from quire.core.live_state import EngineState
from quire.core.outputs import RequestOutput
from quire.core.process_stats import CoreProcesses
from quire.core.request_options import DEFAULT_OPTIONS, RequestOptions
from quire.core.request_snapshot import RequestSnapshot
from quire.core.sampling_params import SamplingParams
from quire.engine.generation_defaults import GenerationDefaults
from quire.engine.output_stream import OutputStream
from quire.tokenization.chat_template import ChatTemplate
from quire.tokenization.tokenizer import Tokenizer

StepListener = Callable[[EngineCoreOutputs], None]


@runtime_checkable
class Scalable(Protocol):
    """An engine whose number of replicas can change while it serves."""

    @property
    def data_parallel_size(self) -> int:
        """Replicas that serve, or will again."""

    @property
    def num_ready_replicas(self) -> int:
        """Those whose cores run now."""

    async def scale(self, data_parallel_size: int, drain_timeout_s: float = 30.0) -> None:
        """Add or remove replicas; those that leave have so many seconds to finish what they run."""

    async def restart_replicas(self, drain_timeout_s: float = 30.0) -> None:
        """Restart all, one by one; each has so many seconds to finish what it runs."""


@runtime_checkable
class Migratable(Protocol):
    """An engine whose requests can go on elsewhere, and that goes on with those of others."""

    def snapshot(self, request_id: str) -> RequestSnapshot:
        """A running request and how far it is; raises `ValidationError` where there is none that can be continued."""

    def resume(self, snapshot: RequestSnapshot, request_id: str) -> AsyncIterator[RequestOutput]:
        """Outputs of the rest of a request that began elsewhere, as `AsyncLLM.generate`; errors as that.

        Outputs with all text so far have what came before, too. Raises `ValidationError` where it cannot be continued.
        """


@runtime_checkable
class Profilable(Protocol):
    """An engine whose steps can be profiled."""

    async def profile(self, starts: bool) -> bool:
        """Start recording the steps of every core, or stop and write; False where that was done before."""


@runtime_checkable
class Observable(Protocol):
    """An engine whose cores are processes of this machine."""

    def core_processes(self) -> list[CoreProcesses]:
        """The processes of each engine core, which are asked to show their memory for the next time."""


class EngineClient(Protocol):
    """Requests in, streams of outputs out, on one event loop.

    Attributes:
        config: resolved.
        tokenizer: None with skip_tokenizer_init.
        chat_template: None when the model has none.
        defaults: the model's own settings for generation.
        step_listeners: each is called on the event loop with every step of the engine core, before its outputs are
            handed out; for counting, so they are quick and raise nothing.
    """

    config: QuireConfig
    tokenizer: Tokenizer | None
    chat_template: ChatTemplate | None
    defaults: GenerationDefaults
    step_listeners: list[StepListener]

    @property
    def errored(self) -> bool:
        """True once the engine is of no further use."""

    @property
    def num_restarts(self) -> int:
        """How often the engine core was replaced."""

    @property
    def num_resumed(self) -> int:
        """Answers that were continued on another engine core than they began on."""

    @property
    def is_paused(self) -> bool:
        """True between `pause_generation` and `resume_generation`."""

    async def open_stream(
        self,
        prompt: Any,
        sampling_params: SamplingParams,
        request_id: str,
        options: RequestOptions = DEFAULT_OPTIONS,
    ) -> OutputStream:
        """Begin a request; the stream gets its outputs as they come, by `sampling_params.output_kind`.

        The last has `finished`, unless the stream fails: with `QueueTimeoutError` when the request waited too long,
        with `EngineGenerateError` when it failed, with `EngineDeadError` when the engine has stopped for good.

        Raises:
            ValidationError: the request cannot run; no other is affected.
            EngineDeadError: the engine has stopped for good.
        """

    async def abort(self, request_ids: str | Iterable[str]) -> None:
        """End requests; each gets its final output. Unknown and finished ids are ignored."""

    async def check_health(self) -> None:
        """Return if the engine can serve; raises `EngineDeadError` otherwise."""

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget all cached blocks, those of running requests if asked; False while any block is in use."""

    async def live_states(self) -> list[EngineState]:
        """What each engine core is doing, collected between two of its steps; waits for a core that restarts."""

    async def pause_generation(self) -> None:
        """Stop running steps; requests wait."""

    async def resume_generation(self) -> None:
        """Go on after a pause."""

    def shutdown(self) -> None:
        """End the engine core; harmless when repeated."""
