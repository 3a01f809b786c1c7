"""StepRecovery: a step that raises ends the request that makes it raise, and no other.

Used by `EngineCore`. Owns who is suspected. A failed step leaves no trace: its requests go back to the queue with their
tokens, and halves of them run alone until the one that fails alone is found. The others go on with the same tokens.
"""

from __future__ import annotations

from quire.core.engine_messages import EngineCoreOutputs, FinishReason
from quire.engine.fault_bisector import FaultBisector
from quire.errors import QuireError
from quire.logger import get_logger
from quire.scheduler.admission import Candidate, GateDecision
from quire.scheduler.interface import SchedulerInterface
from quire.scheduler.step import Step
from quire.scheduler.step_plan import StepPlan

# So many requests that failed alone, one after the other without a good step: it is not the requests.
MAX_CULPRITS_IN_A_ROW = 3

logger = get_logger(__name__)


class StepRecovery:
    """Finds and ends the request that fails. `gate` is for the scheduler's admission."""

    def __init__(self) -> None:
        self._bisector = FaultBisector()
        self._num_culprits = 0

    def gate(self, candidate: Candidate, plan: StepPlan) -> GateDecision:
        """While there are suspects, only those whose turn it is are admitted."""
        return GateDecision.GO if self._bisector.may_run(candidate.request.handle) else GateDecision.SKIP

    def note(self, outputs: EngineCoreOutputs) -> None:
        """A good step, or ends outside of steps: who advanced or ended is no suspect."""
        if len(outputs.handles):
            self._num_culprits = 0
        if self._bisector:
            for handle in {*outputs.handles.tolist(), *(one.handle for one in outputs.finished)}:
                self._bisector.clear(handle)

    def recover(self, scheduler: SchedulerInterface, step: Step, error: Exception) -> None:
        """A step of `scheduler` raised `error`; raises it again when it cannot be the requests."""
        handles = scheduler.abandon_step(step)
        if not len(step.handles):
            raise error  # a step that moved blocks and computed nothing
        faulty = self._bisector.report_failure(handles)
        logger.error("a step of %d requests failed: %s: %s", len(handles), type(error).__name__, error)
        if faulty is None or handles != [faulty]:
            return
        self._num_culprits += 1
        if self._num_culprits > MAX_CULPRITS_IN_A_ROW:
            raise error
        logger.error("request with handle %d fails: its step also failed when run alone", faulty, exc_info=error)
        message = error.message if isinstance(error, QuireError) else f"{type(error).__name__}: {error}"
        self._bisector.clear(faulty)
        scheduler.finish_requests([faulty], FinishReason.ERROR, message)
