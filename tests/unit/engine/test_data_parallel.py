"""Where requests go, what tenants are served across replicas, and which part of the machine a replica has."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from quire.config.build import build_config
from quire.core.engine_messages import EngineCoreRequest
from quire.engine.data_parallel.places import cpu_shares, replica_places
from quire.engine.mp_factory import replica_config
from quire.errors import ConfigError
from quire.platforms.interface import GpuInfo, Platform
from quire.scheduler.placed_prefixes import CHUNK_TOKENS, PlacedPrefixes, chunk_keys
from quire.scheduler.placement import Placement
from quire.utils.cpus import Core, UsableCpus
from quire.utils.memory import MemoryInfo
from tests.robustness import data_parallel
from tests.unit.scheduler.harness import make_request


def prompt(*parts: tuple[int, int]) -> list[int]:
    """(token, count) one behind the other."""
    return [token for token, count in parts for _ in range(count)]


def placed(placement: Placement, *requests: EngineCoreRequest, among: tuple[int, ...] = (0, 1)) -> list[int]:
    return [placement.place(request, among) for request in requests]


def two(**settings: Any) -> Placement:
    placement = Placement(100_000, **settings)
    placement.add_replica(0)
    placement.add_replica(1)
    return placement


def test_equal_requests_are_spread_and_those_with_a_known_beginning_go_where_it_is():
    placement = two()
    a, b = prompt((5, 300)), prompt((6, 300))
    first, second = placed(placement, make_request(0, a), make_request(1, b))
    assert {first, second} == {0, 1}
    again = [placement.place(make_request(2 + i, [*(a if i % 2 else b), i]), (0, 1)) for i in range(8)]
    assert again == [second, first] * 4


def test_a_replica_with_a_prefix_is_left_when_it_has_far_more_to_do():
    placement = two()
    shared = prompt((5, 256))
    chosen = [placement.place(make_request(i, [*shared, i]), (0, 1)) for i in range(40)]
    counts = [chosen.count(0), chosen.count(1)]
    assert min(counts) >= 12, "256 cached tokens are worth some requests, not all"
    for handle in range(40):
        placement.remove(handle)
    assert placement.num_requests(0) == placement.num_requests(1) == 0


def test_a_flood_of_one_tenant_does_not_drive_another_from_its_prefix():
    placement = two(is_fair=True)
    own = prompt((9, 512))
    home = placement.place(make_request(0, own, tenant="steady"), (0, 1))
    for handle in range(1, 200):  # all of the flood is where the other tenant's prefix is
        placement.place(make_request(handle, tenant="flood"), [home])
    placement.note_first_token(0)
    assert placement.place(make_request(200, [*own, 1], tenant="steady"), (0, 1)) == home


def test_salts_divide_prefixes_but_for_what_is_shared():
    tokens = prompt((5, 4 * CHUNK_TOKENS))
    plain, salted, other = (
        chunk_keys(dataclasses.replace(make_request(0, tokens, cache_salt=salt), num_shared_tokens=2 * CHUNK_TOKENS))
        for salt in (None, "a", "b")
    )
    assert plain[:2] == salted[:2] == other[:2]
    assert len({plain[2], salted[2], other[2]}) == 3


def test_what_was_given_longest_ago_is_forgotten_and_a_prompt_loses_its_end_first():
    prefixes = PlacedPrefixes(4 * CHUNK_TOKENS)
    prefixes.add([1, 2, 3])
    prefixes.add([11, 12])
    assert prefixes.num_tokens([1, 2, 3]) == 2 * CHUNK_TOKENS
    assert prefixes.num_tokens([11, 12]) == 2 * CHUNK_TOKENS


def test_fair_shares_hold_across_replicas_and_prefixes_are_found_as_by_one():
    one = data_parallel.run(1, 80)
    apart = data_parallel.run(2, 160, pinned="steady", shares=False)
    pinned = data_parallel.run(2, 300, pinned="steady")
    assert apart.unfairness > 0.3, "the load must be one that needs what is tried"
    assert pinned.unfairness < 0.1
    assert pinned.hit_rate >= 0.9 * one.hit_rate


def machine(num_nodes: int, per_node: int, siblings: int = 1, quota: float | None = None) -> UsableCpus:
    count = num_nodes * per_node
    cores = tuple(Core(tuple(range(i, siblings * count, count)), i // per_node) for i in range(count))
    return UsableCpus(ids=tuple(range(siblings * count)), cores=cores, quota=quota)


@pytest.mark.parametrize(
    ("cpus", "count", "threads", "expected"),
    [
        (machine(2, 4), 2, 4, [(0, 1, 2, 3), (4, 5, 6, 7)]),
        (machine(2, 4), 4, 2, [(0, 1), (4, 5), (2, 3), (6, 7)]),
        (machine(1, 2, siblings=2), 2, 1, [(0, 2), (1, 3)]),
        (machine(2, 2), 1, 4, [(0, 1, 2, 3)]),
        (machine(1, 4), 2, 2, [(), ()]),  # one node, no siblings: the system places threads
        (machine(2, 4, quota=3.0), 2, 2, [(), ()]),
        (machine(2, 4), 2, 8, [(), ()]),  # more threads than cores were asked for
        (None, 2, 1, [(), ()]),
    ],
)
def test_replicas_have_cores_of_their_own_on_one_node_each(cpus, count, threads, expected):
    assert cpu_shares(cpus, count, threads) == expected


def test_replicas_share_memory_and_each_needs_a_device_of_its_own():
    config = build_config(model="leaf", data_parallel_size=2, num_threads=1)
    memory = MemoryInfo(total_bytes=100, available_bytes=80, limited_by="test")
    host = Platform(device="cpu", cpu_name="cpu", cpu_flags=frozenset(), num_cpus=2, memory=memory)
    assert [(one.engine_index, one.memory_bytes) for one in replica_places(config, host)] == [(0, 40), (1, 40)]
    gpu = GpuInfo(name="g", total_bytes=1, capability=(9, 0))
    cuda = dataclasses.replace(host, device="cuda", gpus=(gpu, gpu))
    assert [one.gpu for one in replica_places(config, cuda)] == [0, 1]
    with pytest.raises(ConfigError, match="needs a CUDA device for each replica, and there are 1"):
        replica_places(config, dataclasses.replace(cuda, gpus=(gpu,)))


def test_what_a_replica_writes_or_is_found_by_is_its_own():
    connector = '{"kv_connector": "ExampleConnector", "engine_id": "a", "kv_port": 900}'
    config = build_config(model="leaf", data_parallel_size=2, kv_transfer_config=connector)
    assert replica_config(config, 0) is config
    own = replica_config(config, 1).kv_transfer
    assert own is not None and (own.engine_id, own.kv_port, own.kv_connector) == ("a_dp1", 901, "ExampleConnector")
    recording = build_config(model="leaf", data_parallel_size=2, flight_recorder="/r")
    assert [replica_config(recording, i).observability.flight_recorder for i in (0, 1)] == ["/r", "/r/engine-1"]


def test_counters_that_are_shared_are_lifted_by_the_sender_alone():
    from quire.scheduler.virtual_counters import VirtualCounters

    counters = VirtualCounters()
    counters.take_over({"a": 50.0})
    a, b = counters.slot_of("a", 1.0), counters.slot_of("b", 1.0)
    counters.lift(b, [a])
    assert counters.counters[[a, b]].tolist() == [50.0, 0.0]
    assert counters.least([a, b]) == b
    counters.charge_outputs(np.array([a, a]))
    counters.take_over({"b": 60.0})
    assert counters.counters[[a, b]].tolist() == [54.0, 60.0]
