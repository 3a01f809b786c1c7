"""An executor: Quire's own, one step of which is counted."""

from __future__ import annotations

from quire.core.computed_step import ComputedStep
from quire.core.scheduler_output import SchedulerOutput
from quire.executor.uniproc import UniProcExecutor


class AcmeExecutor(UniProcExecutor):
    """Runs the worker here."""

    quire_contract = 1
    num_steps = 0

    def execute_model(self, scheduler_output: SchedulerOutput) -> ComputedStep:
        type(self).num_steps += 1
        return super().execute_model(scheduler_output)
