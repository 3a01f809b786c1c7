"""What a refused client is told of the wait is what it would have waited, on simulated queues with their own clock."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import pytest

from quire.config.server import LimitsConfig
from quire.core.stats import SchedulerStats
from quire.server.http.admission import MAX_RETRY_AFTER_S, Admission, Ticket

NUM_PLACES, BUDGET = 8, 256


@dataclass(eq=False)
class Request:
    """One answer: what it is, when it came, and how long it was told to wait."""

    prompt: int
    output: int
    ticket: Ticket
    arrival_s: float
    predicted_s: float | None
    started_s: float = 0.0
    num_computed: int = 0
    num_cached: int = 0


@dataclass
class Simulation:
    """An engine of `NUM_PLACES` rows: first come, first served; a step costs a constant and each token its share.

    Attributes:
        hit_rate: share of each prompt that is in the prefix cache.
    """

    hit_rate: float = 0.0
    now_s: float = 1000.0
    waiting: deque[Request] = field(default_factory=deque)
    running: list[Request] = field(default_factory=list)
    started: list[Request] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.admission = Admission(LimitsConfig(), NUM_PLACES, clock=lambda: self.now_s)

    def arrive(self, prompt: int, output: int, max_tokens: int = 2000) -> None:
        """A request comes; it is told how long it would wait, and waits."""
        predicted = self.admission.estimated_wait_s() if len(self.running) == NUM_PLACES else None
        ticket = self.admission.enter(1, prompt, max_tokens=max_tokens)
        self.waiting.append(Request(prompt, output, ticket, self.now_s, predicted))

    def step(self) -> None:
        """One step: rows that decode get a token, prompts share the rest of the budget."""
        queries = hits = 0
        while self.waiting and len(self.running) < NUM_PLACES:
            request = self.waiting.popleft()
            request.started_s = self.now_s
            request.num_computed = request.num_cached = int(self.hit_rate * request.prompt)
            queries, hits = queries + request.prompt, hits + request.num_cached
            self.running.append(request)
            self.started.append(request)
        budget, num_tokens = BUDGET, 0
        for request in sorted(self.running, key=lambda one: one.num_computed < one.prompt):
            left = request.prompt - request.num_computed
            count = min(budget, left) if left > 0 else 1
            request.num_computed += count
            budget, num_tokens = budget - count, num_tokens + count
        self.now_s += 0.002 + 0.0001 * num_tokens
        for request in [one for one in self.running if one.num_computed >= one.prompt + one.output - 1]:
            self.running.remove(request)
            self.admission.note_answers(request.output, 1)
            self.admission.leave(request.ticket)
        stats = SchedulerStats(
            num_running=len(self.running), num_waiting=len(self.waiting), num_scheduled_tokens=num_tokens,
            prefix_cache_queries=queries, prefix_cache_hits=hits,
        )  # fmt: skip
        self.admission.note_step(stats)

    def errors(self) -> list[float]:
        """|told - waited| over waited, of those that were told anything and waited at least a second."""
        told = [one for one in self.started if one.predicted_s is not None]
        waits = [(one.predicted_s or 0.0, one.started_s - one.arrival_s) for one in told[len(told) // 5 :]]
        return [abs(predicted - waited) / waited for predicted, waited in waits if waited >= 1.0]


LOADS = {
    "all alike": lambda rng: (300, 150),
    "short prompts, lengths that vary": lambda rng: (rng.randint(10, 40), rng.randint(20, 200)),
    "long prompts": lambda rng: (rng.randint(200, 1500), rng.randint(10, 100)),
    "both, ten times apart": lambda rng: rng.choice([(50, 20), (500, 200)]),
}


@pytest.mark.parametrize("hit_rate", [0.0, 0.8], ids=["no hits", "most of a prompt hit"])
@pytest.mark.parametrize("load", LOADS.values(), ids=LOADS)
def test_the_predicted_wait_is_what_a_request_waits(load, hit_rate):
    rng = random.Random(7)
    simulation = Simulation(hit_rate)
    for _ in range(600):
        while len(simulation.waiting) < rng.randint(5, 120):
            simulation.arrive(*load(rng))
        for _ in range(rng.randint(1, 40)):
            simulation.step()
    errors = sorted(simulation.errors())
    assert len(errors) > 200
    assert errors[len(errors) // 2] < 0.1 and errors[int(0.95 * len(errors))] < 0.25 and errors[-1] < 0.4


def test_idle_time_does_not_lengthen_the_wait():
    simulation = Simulation()
    for pause in (0.0, 3600.0):
        simulation.now_s += pause
        for _ in range(40):
            simulation.arrive(100, 50)
        for _ in range(60):
            simulation.step()
        told = simulation.admission.estimated_wait_s()
        num_started = len(simulation.started)
        simulation.arrive(100, 50)
        last = simulation.waiting[-1]
        while last in simulation.waiting:
            simulation.step()
        assert told is not None and told == pytest.approx(last.started_s - last.arrival_s, rel=0.35)
        while simulation.running:
            simulation.step()
        assert len(simulation.started) > num_started


def test_a_burst_of_short_answers_is_not_taken_for_long_ones():
    simulation = Simulation()
    for _ in range(200):
        simulation.arrive(50, 200)
    for _ in range(3000):
        simulation.step()
    long_wait = simulation.admission.estimated_wait_s()
    while simulation.waiting:
        simulation.step()
    for _ in range(100):
        simulation.arrive(50, 5, max_tokens=5)
    simulation.step()
    told, last = simulation.admission.estimated_wait_s(), simulation.waiting[-1]
    asked_s = simulation.now_s
    while last in simulation.waiting:
        simulation.step()
    assert long_wait is not None and told is not None
    assert told == pytest.approx(last.started_s - asked_s, rel=0.5)


def test_what_is_told_is_whole_seconds_within_bounds():
    simulation = Simulation()
    assert simulation.admission.predicted_wait_s() == 1, "nothing is measured yet"
    for _ in range(5000):
        simulation.arrive(1000, 100)
    for _ in range(500):
        simulation.step()
    estimate = simulation.admission.estimated_wait_s()
    assert estimate is not None and estimate > MAX_RETRY_AFTER_S == simulation.admission.predicted_wait_s()
