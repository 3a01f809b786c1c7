"""LayerHooks: a connector's calls around each attention layer of a step, through the context that layers are handed.

Made by `ConnectorWorker` for a step, used by the model runner. A layer asks the context for its cache before it
computes: by then the layer before has written its keys and values, and this one has not read any. So no layer knows of
hooks, and a step without them costs nothing. Such a step is computed call by call: a replay calls no Python.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from quire.attention.context import ForwardContext
from quire.attention.metadata import AttentionMetadata
from quire.kv_transfer.connector import KVConnector


class LayerHooks:
    """The calls of one step.

    Args:
        layer_names: in the order of `ForwardContext.kv_caches`.
        on_error: called with the name of a call that raised; no more calls are made in the step.
    """

    def __init__(self, connector: KVConnector, layer_names: Sequence[str], on_error: Callable[[str], None]) -> None:
        self._connector = connector
        self._layer_names = layer_names
        self._on_error = on_error
        self._entered: set[int] = set()
        self._current: tuple[int, torch.Tensor, AttentionMetadata] | None = None
        self._has_failed = False

    def around(self, context: ForwardContext) -> ForwardContext:
        """`context`, with these calls around its layers."""
        values = {one.name: getattr(context, one.name) for one in dataclasses.fields(context)}
        return _HookedContext(**values, hooks=self)

    def enter(self, layer_idx: int, cache: torch.Tensor, metadata: AttentionMetadata) -> None:
        """A layer is about to compute; of several that share a cache the first one counts."""
        if layer_idx in self._entered:
            return
        self.leave()
        self._entered.add(layer_idx)
        self._current = layer_idx, cache, metadata
        name = self._layer_names[layer_idx]
        self._call("wait_for_layer_load", lambda: self._connector.wait_for_layer_load(name))

    def leave(self) -> None:
        """The layer that was entered last has computed, as the model has after the last one."""
        if self._current is None:
            return
        (layer_idx, cache, metadata), self._current = self._current, None
        name = self._layer_names[layer_idx]
        self._call("save_kv_layer", lambda: self._connector.save_kv_layer(name, cache, metadata))

    def _call(self, name: str, call: Callable[[], None]) -> None:
        if self._has_failed:
            return
        try:
            call()
        except Exception:  # a foreign class may raise anything; what it should have loaded is computed
            self._has_failed = True
            self._on_error(name)


@dataclass(frozen=True, slots=True)
class _HookedContext(ForwardContext):
    hooks: LayerHooks | None = None

    def attention(self, layer_idx: int) -> tuple[torch.Tensor, AttentionMetadata]:
        """As `ForwardContext`."""
        cache, metadata = ForwardContext.attention(self, layer_idx)  # `super` does not work in a class with slots
        assert self.hooks is not None, "made by `LayerHooks.around`"
        self.hooks.enter(layer_idx, cache, metadata)
        return cache, metadata
