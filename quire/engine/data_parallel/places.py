"""Where replicas run: CPUs, memory and devices, each a part of the machine's. Called once when replicas are started."""

from __future__ import annotations

from quire.config import QuireConfig
from quire.core.wire import ReplicaPlace
from quire.errors import ConfigError
from quire.platforms.interface import Platform
from quire.utils.cpus import UsableCpus


def replica_places(config: QuireConfig, platform: Platform) -> list[ReplicaPlace]:
    """The place of each replica of a resolved configuration.

    Raises:
        ConfigError: there are fewer CUDA devices than replicas.
    """
    count = config.parallel.data_parallel_size
    if not platform.is_cpu:
        if count > len(platform.gpus):
            raise ConfigError(
                f"data_parallel_size={count} needs a CUDA device for each replica, and there are {len(platform.gpus)}",
                hint=f"use data_parallel_size={len(platform.gpus)}", field="data_parallel_size",
            )  # fmt: skip
        return [ReplicaPlace(engine_index=index, gpu=index) for index in range(count)]
    memory_bytes = platform.memory.available_bytes // count
    num_threads = (config.device.num_threads or 1) * config.parallel.num_ranks
    shares = cpu_shares(platform.cpus, count, num_threads)
    return [
        ReplicaPlace(engine_index=index, cpus=list(cpus), memory_bytes=memory_bytes)
        for index, cpus in enumerate(shares)
    ]


def cpu_shares(cpus: UsableCpus | None, count: int, num_threads: int) -> list[tuple[int, ...]]:
    """The CPUs of each replica: whole cores, of one memory node where they fit; () = any.

    Replicas are bound where threads would be: on machines with several nodes or with siblings. Without a bound each
    would bind its threads to the same cores.

    Args:
        num_threads: compute threads of one replica, of all its ranks.
    """
    unbound: list[tuple[int, ...]] = [()] * count
    if cpus is None or cpus.quota is not None or count * num_threads > cpus.num_cores:
        return unbound
    if cpus.num_nodes < 2 and not cpus.has_siblings:
        return unbound
    nodes: dict[int, list[tuple[int, ...]]] = {}
    for core in cpus.cores:
        nodes.setdefault(core.node, []).append(core.cpus)
    per_replica = cpus.num_cores // count
    if any(len(cores) < per_replica for cores in nodes.values()):  # a replica spans nodes
        order = [core for node in sorted(nodes) for core in nodes[node]]
        return [_flat(order[first * per_replica : (first + 1) * per_replica]) for first in range(count)]
    shares: list[tuple[int, ...]] = []
    for _ in range(count):
        node = max(sorted(nodes), key=lambda one: len(nodes[one]))
        size = min(per_replica, len(nodes[node]))
        if size < num_threads:
            return unbound
        shares.append(_flat(nodes[node][:size]))
        nodes[node] = nodes[node][size:]
    return shares


def _flat(cores: list[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(sorted(cpu for core in cores for cpu in core))
