"""A request that is sent to another core has what is left of its queue_timeout, and no more."""

from __future__ import annotations

from typing import Any

from quire.core.engine_messages import EngineCoreRequest
from quire.engine.supervisor import Supervisor
from tests.unit.scheduler.harness import make_request


class Core:
    """A core whose client only keeps what it is sent."""

    def __init__(self) -> None:
        self.sent: list[EngineCoreRequest] = []

    def add_request(self, message: EngineCoreRequest) -> None:
        self.sent.append(message)

    def restart(self, handle: int) -> list[int] | None:
        return []


def test_the_wait_on_a_lost_core_counts():
    core: Any = Core()
    supervisor = Supervisor(core, lambda: core, core)
    supervisor._client = core
    supervisor.add_request(make_request(0, queue_timeout_s=50.0))
    supervisor.add_request(make_request(1))
    for passed_s, low, high in ((0.0, 40.0, 50.0), (30.0, 10.0, 20.0), (90.0, 0.0, 1e-5)):
        live = supervisor._live[0]
        live.is_sent = False
        live.deadline_s -= passed_s
        supervisor._resend(live)
        assert low < core.sent[-1].queue_timeout_s <= high
    supervisor._live[1].is_sent = False
    supervisor._resend(supervisor._live[1])
    assert core.sent[-1].queue_timeout_s == 0.0
