"""KVConnector: the contract between the engine and a program that keeps or carries blocks of the KV cache.

One class, made twice: `KVConnectorRole.SCHEDULER` decides beside the scheduler, `KVConnectorRole.WORKER` moves blocks
beside the model. The names and their order are those of vLLM's `KVConnectorBase_V1`. docs/explanation/connectors.md has
the life of a request through them, docs/how-to/connectors.md an example of 40 lines.

Version 1. What a later version adds has a default here; what breaks a connector raises `CONTRACT_VERSION`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from typing import Any, ClassVar, Protocol, TypeAlias

import numpy as np

from quire.config.kv_transfer import KVTransferConfig
from quire.core.kv_transfer import KVConnectorOutput
from quire.kv_transfer.layout import KVCacheLayout
from quire.kv_transfer.requests import ConnectorRequest, ConnectorStep

CONTRACT_VERSION = 1

Tensor: TypeAlias = Any
"""`torch.Tensor`, by name alone: the scheduler's half is made where torch is not loaded."""


class KVConnectorRole(IntEnum):
    """Which half an instance is."""

    SCHEDULER = 0
    WORKER = 1


class BlockAccess(Protocol):
    """Blocks of the KV cache by number, whole: every layer, as the layout says."""

    def read(self, block_ids: np.ndarray | Sequence[int]) -> list[Tensor]:
        """Per tensor of the layout: [num_blocks, ...] uint8 on the host, a copy of these blocks."""

    def write(self, block_ids: np.ndarray | Sequence[int], blocks: Sequence[Tensor]) -> None:
        """Put what `read` returned into these blocks, which are distinct."""


class KVConnector:
    """A connector; a subclass overrides what it needs, every method has a default that does nothing.

    No call may wait for anything outside the process: work that takes time is begun in one call and reported by a later
    one. A call that raises is logged and counted, must have begun nothing or stopped it, and what it was about is
    computed instead; after one of `update_state_after_alloc`, `request_finished` and `build_connector_meta` the
    connector is not used any longer.

    Args:
        config: as the user gave it, checked.
        role: which half this is.
        layout: of the blocks it gets and has to give.

    Attributes:
        quire_contract: version that the class was written for; a plugin declares it.
        extra_config_keys: allowed keys of `kv_connector_extra_config`; None = it checks them itself.
        has_layer_hooks: `wait_for_layer_load` and `save_kv_layer` are called around every attention layer of steps
            that carry metadata. Such steps run call by call, without recorded graphs.
    """

    quire_contract: ClassVar[int]
    extra_config_keys: ClassVar[tuple[str, ...] | None] = None
    has_layer_hooks: ClassVar[bool] = False

    def __init__(self, config: KVTransferConfig, role: KVConnectorRole, layout: KVCacheLayout) -> None:
        self.config = config
        self.role = role
        self.layout = layout
        self.metadata: Any = None
        self.blocks: BlockAccess | None = None
        self.kv_caches: Mapping[str, Tensor] = {}

    # --- the scheduler's half ---

    def on_new_request(self, request: ConnectorRequest) -> None:
        """A request arrived."""

    def get_num_new_matched_tokens(
        self, request: ConnectorRequest, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """How much more than the prefix cache has can be loaded for a request without a row.

        May be called again and again, with or without the request being placed in between, and changes nothing.

        Args:
            num_computed_tokens: whole blocks of them are in the prefix cache.

        Returns:
            (tokens beyond these, whether the request has to wait until they are loaded). Whole blocks count; of a whole
            prompt its last token is computed. None tokens = not known yet: the request waits and is asked again.
        """
        return 0, False

    def update_state_after_alloc(
        self, request: ConnectorRequest, block_ids: Sequence[int], num_external_tokens: int
    ) -> None:
        """Blocks were given to a request, to be loaded as was offered.

        Args:
            block_ids: its blocks in order, up to the last that is to be loaded; `request.block_hashes` has their names.
            num_external_tokens: that are to be loaded, in the last of these blocks: perhaps fewer than were offered.
        """

    def build_connector_meta(self, step: ConnectorStep) -> Any:
        """What the worker's half has to know of this step; None = nothing. Called for every step, once.

        A step that fails is not sent again: its metadata was carried out once, or never.
        """
        return None

    def has_pending_work(self) -> bool:
        """Whether `build_connector_meta` has something to say although no request may run: then a step is sent."""
        return False

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        """What the worker's half reported."""

    def request_finished(
        self, request: ConnectorRequest, block_ids: Sequence[int]
    ) -> tuple[bool, Mapping[str, Any] | None]:
        """A request ends, however it does.

        Args:
            block_ids: its blocks that are full and final, whose names are `request.block_hashes`; empty = nothing of it
                may be kept.

        Returns:
            (whether the blocks have to stay until `get_finished` reports the request as sent,
            `kv_transfer_params` of the response).
        """
        return False, None

    def take_events(self) -> Iterable[Any]:
        """KV events (`core.kv_events`) since the last call, of blocks that are kept elsewhere."""
        return ()

    def reset_cache(self) -> bool:
        """Forget what is kept; False = that is not possible."""
        return False

    # --- the worker's half ---

    def register_kv_caches(self, kv_caches: Mapping[str, Tensor], blocks: BlockAccess) -> None:
        """The cache, once, before the first step: per layer by name, and by block."""
        self.kv_caches, self.blocks = kv_caches, blocks

    def bind_connector_metadata(self, metadata: Any) -> None:
        """What `build_connector_meta` made for the step that begins."""
        self.metadata = metadata

    def clear_connector_metadata(self) -> None:
        """The step has ended."""
        self.metadata = None

    def start_load_kv(self) -> None:
        """Begin the loads of the step. Of requests that do not wait all must be done when this returns, or, with layer
        hooks, when `wait_for_layer_load` does.
        """

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Return when the step's blocks of this layer are loaded; before its attention computes."""

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: Any) -> None:
        """The step's keys and values of this layer are in `kv_layer`, the layer's whole cache."""

    def wait_for_save(self) -> None:
        """The step has computed; return when the blocks that it saves may be written again."""

    def get_finished(self, finished_req_ids: frozenset[str]) -> tuple[set[str], set[str]]:
        """Requests whose transfers have ended since the last call; called after every step, and while nothing computes.

        Args:
            finished_req_ids: requests that have ended since the last call; a load of one is still to be reported.

        Returns:
            (requests whose blocks were sent, requests that waited and whose blocks were loaded or cannot be).
        """
        return set(), set()

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Blocks that could not be loaded since the last call. Their requests are computed instead, or fail."""
        return set()

    def get_failed_saves(self) -> set[str]:
        """Of the requests that `get_finished` named as sent since the last call: those whose blocks are not kept.

        They count as unsaved, and nothing else follows from it.
        """
        return set()

    def build_connector_worker_meta(self) -> Any:
        """Anything that the scheduler's half has to know, in `KVConnectorOutput.worker_meta`; None = nothing."""
        return None

    # --- both ---

    def get_kv_connector_stats(self) -> Mapping[str, float]:
        """Counts since the last call, by name."""
        return {}

    def shutdown(self) -> None:
        """The engine ends; harmless when repeated."""
