"""DeviceOps: everything the worker does differently on different devices, made once from the platform.

Made by the registry, held by the worker, which hands the parts to those who call them: nothing is looked up in a step.

A new device is one constructor in a file of its own and its entry in `registry.DEVICES`. That of a GPU starts from
`torch_ops` and replaces part by part: `attention` and `layers`, then `sampling`, then `make_graphs`.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from quire.attention.backend import AttentionBackend
from quire.distributed.communicator import Communicator, SingleCommunicator
from quire.distributed.expert_exchange import ExpertExchange
from quire.distributed.pipeline import PipelineStage
from quire.kernels.native.runtime import NativeRuntime
from quire.layers.kernels import LayerKernels
from quire.models.packing_cache import PackingCache
from quire.sample.ops.interface import SamplingOps
from quire.worker.device.draft_chains import MakeDraftChains
from quire.worker.device.graphs import MakeStepGraphs, no_graphs
from quire.worker.device.memory import DeviceMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceOps:
    """The operations of one device.

    Attributes:
        device: where weights, cache and activations are.
        layers: what computes the model's layers, and how their weights are stored.
        attention: one backend for every layer.
        sampling: what is done with logits.
        memory: what is free, and the tensors of the KV cache with what copies their blocks.
        make_graphs: captures steps and replays them, once there is a KV cache.
        make_chains: captures models that draft token by token; None = each of their passes is a call.
        make_draft_graphs: of a model that drafts, which the first pipeline stage alone computes; None = `make_graphs`.
        graph_bytes: memory that graphs need beside the activations of a step.
        packing_cache: where weights in the form of `layers` are kept on disk; None = nowhere.
        communicator: to the other processes that compute the same layers.
        experts: to other replicas, with which this one shares experts; None = it has all.
        stage: the layers that this process has, and the way to the others; None = all.
        runtime: of the native kernels; None = the device has others.
        measure_limits: operations and bytes a second at most, measured in half a second; None = it cannot be.
        clock: seconds, for what drafting takes; that of the engine core's draft controller.
    """

    device: torch.device
    layers: LayerKernels
    attention: AttentionBackend
    sampling: SamplingOps
    memory: DeviceMemory
    make_graphs: MakeStepGraphs = no_graphs
    make_chains: MakeDraftChains | None = None
    make_draft_graphs: MakeStepGraphs | None = None
    graph_bytes: int = 0
    packing_cache: PackingCache | None = None
    communicator: Communicator = field(default_factory=SingleCommunicator)
    experts: ExpertExchange | None = None
    stage: PipelineStage | None = None
    runtime: NativeRuntime | None = None
    measure_limits: Callable[[], tuple[float, float]] | None = None
    clock: Callable[[], float] = time.perf_counter

    @property
    def all_ranks(self) -> Communicator:
        """To all other processes that compute the model."""
        return self.communicator if self.stage is None else self.stage.communicator

    def of_drafts(self) -> DeviceOps:
        """What a model that drafts is computed with."""
        graphs = self.make_draft_graphs
        return self if graphs is None else dataclasses.replace(self, make_graphs=graphs, make_draft_graphs=None)

    def abort(self, rank: int) -> None:
        """`rank` has ended: what waits, here and on ranks that can be reached, fails and names it."""
        self.communicator.abort(rank)
        if self.stage is not None:
            self.stage.communicator.abort(rank)
