"""RayCluster: what Ray does for an executor: it places actors on its machines, and says when one has ended.

The one module that calls Ray, which is imported when it is asked for. Owns the placement group.
"""

from __future__ import annotations

import importlib
import os
import signal
import threading
from dataclasses import dataclass
from typing import Any

import msgspec

from quire.errors import ConfigError, EngineDeadError
from quire.executor.ray_rank import PlaceInfo, RayRank
from quire.logger import get_logger
from quire.version import __version__

FIELD = "distributed_executor_backend"
PLACEMENT_TIMEOUT_S = 30.0
"""For which a cluster may lack the CPUs that are asked for: a machine may be on its way back."""
TOGETHER_TIMEOUT_S = 5.0
"""For which the ranks of a stage may wait for a machine that has room for all of them."""
START_TIMEOUT_S = 60.0
"""Of an actor's process."""
PIN = 0.001  # of the resource that each of Ray's machines has one of, named by its address

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Placed:
    """An actor, and where it is."""

    actor: Any
    info: PlaceInfo

    @property
    def where(self) -> str:
        """For messages."""
        return f"on {self.info.host_name} ({self.info.address}), process {self.info.pid}"


class RayCluster:
    """The cluster that this machine is part of.

    Raises:
        ConfigError: Ray is not installed, or does not run here.
    """

    def __init__(self) -> None:
        self._ray = _import_ray()
        self._group: Any = None
        if not self._ray.is_initialized():
            self._connect()
        self.own_node: str = self._ray.get_runtime_context().get_node_id()
        self.own_address: str = self._ray.util.get_node_ip_address()

    def _connect(self) -> None:
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            self._ray.init(address=os.environ.get("RAY_ADDRESS") or "auto", configure_logging=False)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ConfigError(
                f"{FIELD}='ray' needs a Ray cluster that this machine is part of: {str(error)[:300]}",
                hint="start it with 'ray start --head' here, and 'ray start --address=HOST:6379' on the other machines",
                field=FIELD,
            ) from error
        if threading.current_thread() is threading.main_thread():  # Ray takes them; ours say who ends this process
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def place(self, size: int, ranks_per_stage: int, cpus: int) -> list[Placed]:
        """An actor for each rank but 0, which is this process; ranks of one stage on one machine where one is large
        enough for them.

        Args:
            cpus: of each rank.

        Raises:
            ConfigError: the cluster is too small, or has another version of Quire.
            EngineDeadError: an actor could not be started.
        """
        per_bundle = self._reserve(size, ranks_per_stage, cpus)
        strategy = importlib.import_module("ray.util.scheduling_strategies").PlacementGroupSchedulingStrategy
        remote, actors = self._ray.remote(RayRank), []
        for rank in range(1, size):
            scheduling = strategy(placement_group=self._group, placement_group_bundle_index=rank // per_bundle)
            actors.append(remote.options(num_cpus=cpus, max_restarts=0, scheduling_strategy=scheduling).remote())
        looks = [actor.look.remote("", "") for actor in actors]
        infos = [msgspec.msgpack.decode(self.result(look, "a rank's process"), type=PlaceInfo) for look in looks]
        for info in infos:
            if info.version != __version__:
                raise ConfigError(
                    f"Quire is {info.version} on {info.host_name} ({info.address}) and {__version__} here",
                    hint="install the same version on all machines of the cluster", field=FIELD,
                )  # fmt: skip
        return [Placed(actor, info) for actor, info in zip(actors, infos, strict=True)]

    def _reserve(self, size: int, ranks_per_stage: int, cpus: int) -> int:
        """Take the CPUs; how many ranks stay together."""
        largest = max((node["Resources"].get("CPU", 0) for node in self._ray.nodes() if node["Alive"]), default=0)
        num_stages, is_divisible = size // ranks_per_stage, size == ranks_per_stage
        if largest >= ranks_per_stage * cpus:  # of several stages each is on one machine
            timeout_s = TOGETHER_TIMEOUT_S if is_divisible else PLACEMENT_TIMEOUT_S
            if self._try_reserve(num_stages, ranks_per_stage * cpus, timeout_s):
                return ranks_per_stage
        if is_divisible and self._try_reserve(size, cpus, PLACEMENT_TIMEOUT_S):
            return 1
        raise ConfigError(
            f"the Ray cluster does not have the CPUs for {size} ranks of {cpus}, of which the first is on this machine "
            f"({self.own_address}): there are {self._describe()}",
            hint="add machines with 'ray start --address=HOST:6379', end what else runs there, or lower num_threads "
            "or the number of ranks", field=FIELD,
        )  # fmt: skip

    def _try_reserve(self, count: int, cpus: int, timeout_s: float) -> bool:
        """Take so many times so many CPUs, the first of them on this machine."""
        bundles: list[dict[str, float]] = [{"CPU": float(cpus)} for _ in range(count)]
        bundles[0][f"node:{self.own_address}"] = PIN
        self._group = self._ray.util.placement_group(bundles, strategy="PACK")
        try:
            self._ray.get(self._group.ready(), timeout=timeout_s)
        except self._ray.exceptions.GetTimeoutError:
            self.close()
            return False
        return True

    def _describe(self) -> str:
        alive = [node for node in self._ray.nodes() if node["Alive"]]
        cpus = [f"{node['Resources'].get('CPU', 0):g} on {node['NodeManagerAddress']}" for node in alive]
        free = self._ray.available_resources().get("CPU", 0)
        return f"{', '.join(cpus)}; {free:g} of them free"

    def result(self, reference: Any, what: str, timeout_s: float | None = START_TIMEOUT_S) -> Any:
        """What an actor's method returns.

        Raises:
            EngineDeadError: the actor has ended, or is too slow.
        """
        try:
            return self._ray.get(reference, timeout=timeout_s)
        except self._ray.exceptions.GetTimeoutError as error:
            raise EngineDeadError(f"{what} did not answer through Ray within {timeout_s:.0f} s") from error
        except self._ray.exceptions.RayError as error:
            text = " ".join(str(error).split())
            raise EngineDeadError(
                f"{what} ended: {text[:500]}", hint="see the logs of Ray on its machine (/tmp/ray/session_latest/logs)"
            ) from error

    def end(self, placed: Placed) -> None:
        """End an actor; harmless when it has ended."""
        try:
            self._ray.kill(placed.actor)
        except Exception as error:
            logger.debug("an actor could not be ended, so it has: %s", error)

    def close(self) -> None:
        """Give the CPUs back."""
        group, self._group = self._group, None
        if group is not None:
            try:
                self._ray.util.remove_placement_group(group)
            except Exception as error:
                logger.debug("a placement group could not be removed: %s", error)


def _import_ray() -> Any:
    try:
        ray = importlib.import_module("ray")
        importlib.import_module("ray.util.scheduling_strategies")
    except ImportError as error:
        raise ConfigError(
            f"{FIELD}='ray' needs Ray, which is not installed", hint="pip install 'quire[ray]'", field=FIELD
        ) from error
    return ray
