"""What the engine core asks of a scheduler."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Protocol

from quire.core.engine_messages import EngineCoreOutputs, EngineCoreRequest, FinishReason
from quire.core.runner_output import ModelRunnerOutput
from quire.kv_cache.event_recorder import KVEventRecorder
from quire.scheduler.step import Step


class SchedulerInterface(Protocol):
    """Who runs in each step, and on which blocks."""

    def add_request(self, request: EngineCoreRequest) -> None:
        """Queue a request.

        Raises:
            ValidationError: it can never run (longer than max_model_len, or than the whole cache).
        """

    def finish_requests(
        self, handles: Iterable[int], reason: FinishReason, error: str | None = None, error_field: str | None = None
    ) -> None:
        """End requests from outside, in any state; unknown and finished handles are ignored."""

    def hold(self, handles: Collection[int]) -> None:
        """From now on these requests sit out the steps, and no others; they keep their rows and blocks."""

    def schedule(self) -> Step | None:
        """Decide the next step; None when no request can compute (nothing left, or only rows to free later)."""

    def update_from_output(
        self, step: Step, output: ModelRunnerOutput, seconds: float | None = None
    ) -> EngineCoreOutputs:
        """Take in the step's tokens: lengths advance, full blocks are published, ended requests leave.

        Args:
            seconds: how long the step took to compute and sample; None = not measured.
        """

    def abandon_step(self, step: Step) -> list[int]:
        """A step failed: it never was, and every running request waits again with its tokens.

        Returns:
            Handles of the requests that the step held.
        """

    def take_outputs(self) -> EngineCoreOutputs | None:
        """Ends and events that happened outside a step (aborts); None when there are none."""

    def has_unfinished_requests(self) -> bool:
        """True while any request waits or runs."""

    def get_request_counts(self) -> tuple[int, int]:
        """(running, waiting)."""

    def watch_blocks(self, recorder: KVEventRecorder) -> None:
        """Tell `recorder` which blocks can be found, from now on."""

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget all cached blocks; False, and nothing done, while any block is in use.

        Args:
            reset_running_requests: running requests give up their blocks and compute them again, so none is in use.
        """
