"""Several replicas behind a router: who gets which request, and what comes of it.

Round-robin depends on nothing that happens, so its replicas may run in processes of their own.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quire.core.engine_messages import EngineCoreRequest
from quire.core.sampling_params import SamplingParams
from quire.errors import unknown_name
from quire.scheduler.placement import Placement
from quire.scheduler.setup import SchedulerSetup
from quire.simulator.costs import CostModel
from quire.simulator.drafts import Speculation
from quire.simulator.replica import FrontEnd, Replica
from quire.simulator.results import Results
from quire.simulator.workload import SimRequest
from quire.utils.children import forked_pool

PREFIX_UNIT = 64
"""Tokens by which a prefix-aware router distinguishes prompts."""
# A prefix-aware router leaves the replica that knows a prefix when it has so many more requests than the least loaded.
MAX_IMBALANCE = 8

GREEDY = SamplingParams(temperature=0.0)

Router = Callable[[SimRequest, Sequence[Replica]], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSetup:
    """Equal replicas and how requests are shared among them.

    Attributes:
        costs: makes a cost model for each replica; a plain function, as it may cross to another process.
        routing: a name of `ROUTERS`.
        num_processes: most to use.
        speculation: what is assumed of drafts; None = there are none.
    """

    scheduler: SchedulerSetup
    costs: Callable[[], CostModel]
    num_replicas: int = 1
    routing: str = "round-robin"
    num_processes: int = 1
    speculation: Speculation | None = None


def simulate(setup: FleetSetup, requests: Sequence[SimRequest]) -> Results:
    """Serve requests, which are sorted by arrival, to the end.

    Raises:
        ConfigError: there is no such router.
    """
    if setup.routing not in ROUTERS:
        raise unknown_name("routing", setup.routing, ROUTERS)
    if setup.routing == "round-robin" and min(setup.num_processes, setup.num_replicas) > 1:
        return _in_processes(setup, requests)
    router = ROUTERS[setup.routing]()
    costs = [setup.costs() for _ in range(setup.num_replicas)]
    front_ends = [FrontEnd(one) for one in costs]
    if setup.routing == "data-parallel":
        front_ends = front_ends[:1] * setup.num_replicas
    replicas = [
        Replica(setup.scheduler, one, front_end, len(requests), setup.speculation)
        for one, front_end in zip(costs, front_ends, strict=True)
    ]
    for number, request in enumerate(requests):
        if len(replicas) == 1:
            replicas[0].submit(number, request)
            continue
        for replica in replicas:
            replica.run_until(request.arrival_s)
        replicas[router(request, replicas)].submit(number, request)
    for replica in replicas:
        replica.finish()
    results = replicas[0].results
    for replica in replicas[1:]:
        results.merge(replica.results)
    return results


def _in_processes(setup: FleetSetup, requests: Sequence[SimRequest]) -> Results:
    results = Results(len(requests))
    parts = [list(enumerate(requests))[first :: setup.num_replicas] for first in range(setup.num_replicas)]
    with forked_pool(min(setup.num_processes, setup.num_replicas)) as pool:
        for part, found in zip(parts, pool.map(_run_part, itertools.repeat(setup), parts), strict=True):
            results.merge(found, [number for number, _ in part])
    return results


def _run_part(setup: FleetSetup, part: Sequence[tuple[int, SimRequest]]) -> Results:
    costs = setup.costs()
    replica = Replica(setup.scheduler, costs, FrontEnd(costs), len(part), setup.speculation)
    for number, (_, request) in enumerate(part):
        replica.submit(number, request)
    replica.finish()
    return replica.results


def round_robin() -> Router:
    """One after the other."""
    turns = itertools.count()
    return lambda request, replicas: next(turns) % len(replicas)


def least_loaded() -> Router:
    """The one with the fewest requests that have not ended."""
    return lambda request, replicas: _least(replicas)


def prefix_aware() -> Router:
    """The one that was given the longest beginning of the prompt before, unless it has far more to do than another."""
    homes: dict[tuple[int, int], int] = {}

    def choose(request: SimRequest, replicas: Sequence[Replica]) -> int:
        data, keys, crc = request.prompt().tobytes(), [], 0
        for end in range(PREFIX_UNIT, request.prompt_len + 1, PREFIX_UNIT):
            crc = zlib.crc32(data[4 * (end - PREFIX_UNIT) : 4 * end], crc)
            keys.append((end, crc))
        chosen = least = _least(replicas)
        for key in reversed(keys):
            if key in homes:
                chosen = homes[key]
                break
        if replicas[chosen].num_unfinished > replicas[least].num_unfinished + MAX_IMBALANCE:
            chosen = least
        homes.update(dict.fromkeys(keys, chosen))
        return chosen

    return choose


def own_placement() -> Router:
    """As a server with --data-parallel-size places them: by the work of each replica, prompts that it has cached left
    out.
    """
    placement: Placement | None = None
    unfinished: dict[int, int] = {}
    numbers = itertools.count()

    def choose(request: SimRequest, replicas: Sequence[Replica]) -> int:
        nonlocal placement
        if placement is None:
            placement = Placement(replicas[0].capacity_tokens)
            for index in range(len(replicas)):
                placement.add_replica(index)
        for number, index in list(unfinished.items()):
            results = replicas[index].results
            if not math.isnan(results.first_s[number]):
                placement.note_first_token(number)
            if not math.isnan(results.ended_s[number]):
                placement.remove(number)
                del unfinished[number]
        number = next(numbers)
        message = EngineCoreRequest(
            handle=number, request_id="", prompt_token_ids=request.prompt(), sampling_params=GREEDY, seed=0
        )
        unfinished[number] = placement.place(message, range(len(replicas)))
        return unfinished[number]

    return choose


def _least(replicas: Sequence[Replica]) -> int:
    return min(range(len(replicas)), key=lambda number: (replicas[number].num_unfinished, number))


ROUTERS: dict[str, Callable[[], Router]] = {
    "round-robin": round_robin,
    "least-loaded": least_loaded,
    "prefix-aware": prefix_aware,
    "data-parallel": own_placement,
}
