"""Where the worker puts the native kernels' threads, and how long they spin."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import pytest

from quire.kernels.native.runtime import DEFAULT_SPIN_US
from quire.kernels.native.sampling import MAX_VOCAB_SIZE
from quire.sample.ops.native import NativeSamplingOps
from quire.sample.ops.torch_ops import TorchSamplingOps
from quire.utils.cpus import Core, UsableCpus
from quire.worker.device import native_cpu
from quire.worker.device.graphs import no_graphs
from quire.worker.device.native_cpu import QUOTA_SPIN_US, make_runtime
from quire.worker.device.ops import DeviceOps
from quire.worker.device.recorded_steps import ARENA_BYTES
from quire.worker.device.registry import make_device_ops
from quire.worker.setup import make_setup
from tests.unit.worker.tiny import TINY_ARCH, cpu_platform, tiny_config

SIBLINGS = (Core((0, 4)), Core((1, 5)), Core((2, 6)), Core((3, 7)))
TWO_NODES = (Core((0,), node=0), Core((1,), node=0), Core((2,), node=1), Core((3,), node=1))
TWO_SPEEDS = (Core((0,), speed=1), Core((1,), speed=1), Core((2,), speed=2), Core((3,), speed=2))
PLAIN = (Core((0,)), Core((1,)))


class Recorded:
    """Takes the place of the runtime: no thread is made for CPUs that this machine lacks."""

    def __init__(self, tier: str, num_threads: int, cpus: tuple[int, ...], spin_us: int) -> None:
        self.tier, self.num_threads, self.cpus, self.spin_us = tier, num_threads, cpus, spin_us


def runtime_on(monkeypatch: Any, cores: tuple[Core, ...], num_threads: int, quota: float | None = None) -> Recorded:
    monkeypatch.setattr(native_cpu, "NativeRuntime", Recorded)
    ids = tuple(sorted(cpu for core in cores for cpu in core.cpus))
    platform = dataclasses.replace(cpu_platform(), cpus=UsableCpus(ids=ids, cores=cores, quota=quota))
    config = tiny_config(attention_backend="native_cpu", num_threads=num_threads)
    runtime: Any = make_runtime(make_setup(config, platform))
    assert runtime.num_threads == num_threads
    return runtime


@pytest.mark.parametrize(
    ("cores", "num_threads", "cpus"),
    [
        pytest.param(SIBLINGS, 4, (0, 1, 2, 3), id="one a core"),
        pytest.param(SIBLINGS, 3, (0, 1, 2), id="fewer than cores"),
        pytest.param(TWO_NODES, 2, (0, 1), id="on one memory node"),
        pytest.param(TWO_SPEEDS, 2, (2, 3), id="fast cores first"),
        pytest.param(PLAIN, 2, (), id="cores alike and all of them"),
        pytest.param(SIBLINGS, 1, (), id="one thread"),
        pytest.param(SIBLINGS, 5, (), id="more threads than cores"),
    ],
)
def test_threads_are_bound_as_the_platform_says(monkeypatch, caplog, cores, num_threads, cpus):
    with caplog.at_level(logging.INFO, "quire"):
        runtime = runtime_on(monkeypatch, cores, num_threads)
    assert runtime.cpus == cpus and runtime.spin_us == DEFAULT_SPIN_US
    assert (f"on CPUs {', '.join(map(str, cpus))}" if cpus else "not pinned") in caplog.text


def test_under_a_quota_threads_are_not_bound_and_sleep_soon(monkeypatch):
    runtime = runtime_on(monkeypatch, SIBLINGS, 2, quota=2.0)
    assert runtime.cpus == () and runtime.spin_us == QUOTA_SPIN_US < DEFAULT_SPIN_US


def test_a_machine_of_unknown_cpus_gets_threads_too():
    config = tiny_config(attention_backend="native_cpu", num_threads=2)
    runtime = make_runtime(make_setup(config, cpu_platform()))
    assert runtime.pool.num_threads == 2


def native_ops(**overrides: Any) -> DeviceOps:
    return make_device_ops(make_setup(tiny_config(attention_backend="native_cpu", **overrides), cpu_platform()))


def test_memory_is_set_aside_for_graphs_where_steps_are_recorded():
    recorded, eager = native_ops(), native_ops(enforce_eager=True)
    assert recorded.graph_bytes == ARENA_BYTES and recorded.make_graphs is not no_graphs
    assert eager.graph_bytes == 0 and eager.make_graphs is no_graphs


def test_a_vocabulary_that_is_too_large_for_the_kernels_is_sampled_by_torch():
    assert isinstance(native_ops().sampling, NativeSamplingOps)
    large = dataclasses.replace(TINY_ARCH, vocab_size=MAX_VOCAB_SIZE + 1)
    assert isinstance(native_ops(arch=large).sampling, TorchSamplingOps)
