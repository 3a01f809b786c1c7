"""MultiConnector: several connectors as one. Blocks are saved to all, and loaded from the first that has some.

The name and the setting are vLLM's: `kv_connector_extra_config: {"connectors": [{"kv_connector": ...}, ...]}`. Owns the
connectors, and which of them a request's load and saves belong to.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.config.kv_transfer import FIELD, KVTransferConfig, parse_kv_transfer
from quire.core.kv_transfer import KVConnectorOutput
from quire.errors import ConfigError
from quire.kv_transfer.connector import BlockAccess, KVConnector, KVConnectorRole, Tensor
from quire.kv_transfer.layout import KVCacheLayout
from quire.kv_transfer.registry import connector_class, make_connector
from quire.kv_transfer.requests import ConnectorRequest, ConnectorStep


@dataclass(frozen=True, slots=True)
class _Metadata:
    """One value for each connector, and how many of them keep the blocks of which ended requests."""

    parts: tuple[Any, ...]
    num_saves: Mapping[str, int]


class MultiConnector(KVConnector):
    """Asks its connectors in their order."""

    quire_contract = 1
    extra_config_keys = ("connectors",)

    def __init__(self, config: KVTransferConfig, role: KVConnectorRole, layout: KVCacheLayout) -> None:
        super().__init__(config, role, layout)
        self.connectors = [self._make(values) for values in _listed(config)]
        self._source: dict[str, KVConnector] = {}  # of a request's blocks
        self._num_saves: dict[str, int] = {}
        self._num_left: dict[str, int] = {}  # beside the model: connectors that have not sent yet
        self._unsaved: set[str] = set()

    def _make(self, values: Mapping[str, Any]) -> KVConnector:
        inherited = {
            "engine_id": self.config.engine_id, "kv_role": self.config.kv_role,
            "kv_load_failure_policy": self.config.kv_load_failure_policy,
            "kv_load_timeout_s": self.config.kv_load_timeout_s,
        }  # fmt: skip
        part = parse_kv_transfer({**inherited, **values})
        assert part is not None, "it has a name"
        kind = connector_class(part)
        if kind.has_layer_hooks:
            raise ConfigError(
                f"{FIELD}: {part.kv_connector} is called for every layer, which MultiConnector does not do",
                hint="use it alone", field=FIELD,
            )  # fmt: skip
        return make_connector(kind, part, self.role, self.layout)

    # --- the scheduler's half ---

    def on_new_request(self, request: ConnectorRequest) -> None:
        """As `KVConnector`."""
        for one in self.connectors:
            one.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: ConnectorRequest, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """The first connector that has something; it waits for those before it that do not know yet."""
        for one in self.connectors:
            if not one.config.is_kv_consumer:
                continue
            num_tokens, is_async = one.get_num_new_matched_tokens(request, num_computed_tokens)
            if num_tokens is None:
                return None, is_async
            if num_tokens >= self.layout.block_size:
                self._source[request.request_id] = one
                return num_tokens, is_async
        return 0, False

    def update_state_after_alloc(
        self, request: ConnectorRequest, block_ids: Sequence[int], num_external_tokens: int
    ) -> None:
        """As `KVConnector`, for the one that offered the blocks."""
        self._source[request.request_id].update_state_after_alloc(request, block_ids, num_external_tokens)

    def build_connector_meta(self, step: ConnectorStep) -> _Metadata | None:
        """As `KVConnector`."""
        parts = tuple(one.build_connector_meta(step) for one in self.connectors)
        num_saves, self._num_saves = self._num_saves, {}
        return _Metadata(parts, num_saves) if num_saves or any(part is not None for part in parts) else None

    def has_pending_work(self) -> bool:
        """As `KVConnector`."""
        return any(one.has_pending_work() for one in self.connectors)

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        """As `KVConnector`; each gets its own value."""
        metas = output.worker_meta or (None,) * len(self.connectors)
        for one, meta in zip(self.connectors, metas, strict=True):
            one.update_connector_output(
                KVConnectorOutput(
                    finished_sending=output.finished_sending, finished_recving=output.finished_recving,
                    invalid_block_ids=output.invalid_block_ids, worker_meta=meta, stats=output.stats,
                )
            )  # fmt: skip

    def request_finished(
        self, request: ConnectorRequest, block_ids: Sequence[int]
    ) -> tuple[bool, Mapping[str, Any] | None]:
        """As `KVConnector`: the blocks stay until all that keep them have sent them; the first parameters count."""
        self._source.pop(request.request_id, None)
        results = [one.request_finished(request, block_ids) for one in self.connectors]
        num_saves = sum(is_delayed for is_delayed, _ in results)
        if num_saves:
            self._num_saves[request.request_id] = num_saves
        return num_saves > 0, next((params for _, params in results if params), None)

    def take_events(self) -> Iterable[Any]:
        """As `KVConnector`."""
        return [event for one in self.connectors for event in one.take_events()]

    def reset_cache(self) -> bool:
        """As `KVConnector`."""
        results = [one.reset_cache() for one in self.connectors]  # each is asked
        return all(results)

    # --- the worker's half ---

    def register_kv_caches(self, kv_caches: Mapping[str, Tensor], blocks: BlockAccess) -> None:
        """As `KVConnector`."""
        for one in self.connectors:
            one.register_kv_caches(kv_caches, blocks)

    def bind_connector_metadata(self, metadata: _Metadata) -> None:
        """As `KVConnector`."""
        super().bind_connector_metadata(metadata)
        self._num_left.update(metadata.num_saves)
        for one, part in zip(self.connectors, metadata.parts, strict=True):
            if part is not None:
                one.bind_connector_metadata(part)

    def clear_connector_metadata(self) -> None:
        """As `KVConnector`."""
        for one in self._bound():
            one.clear_connector_metadata()
        super().clear_connector_metadata()

    def start_load_kv(self) -> None:
        """As `KVConnector`."""
        for one in self._bound():
            one.start_load_kv()

    def wait_for_save(self) -> None:
        """As `KVConnector`."""
        for one in self._bound():
            one.wait_for_save()

    def _bound(self) -> list[KVConnector]:
        parts = () if self.metadata is None else self.metadata.parts
        return [one for one, part in zip(self.connectors, parts, strict=False) if part is not None]

    def get_finished(self, finished_req_ids: frozenset[str]) -> tuple[set[str], set[str]]:
        """As `KVConnector`; a request is sent when all of its connectors have sent it."""
        sent, received = set[str](), set[str]()
        for one in self.connectors:
            own_sent, own_received = one.get_finished(finished_req_ids)
            received |= own_received
            for request_id in own_sent:
                num_left = self._num_left.get(request_id, 1) - 1
                if num_left:
                    self._num_left[request_id] = num_left
                else:
                    self._num_left.pop(request_id, None)
                    sent.add(request_id)
        return sent, received

    def get_block_ids_with_load_errors(self) -> set[int]:
        """As `KVConnector`."""
        return set().union(*(one.get_block_ids_with_load_errors() for one in self.connectors))

    def get_failed_saves(self) -> set[str]:
        """As `KVConnector`: a connector could not save them, and all have sent them."""
        self._unsaved.update(*(one.get_failed_saves() for one in self.connectors))
        ended = {request_id for request_id in self._unsaved if request_id not in self._num_left}
        self._unsaved -= ended
        return ended

    def build_connector_worker_meta(self) -> tuple[Any, ...] | None:
        """As `KVConnector`: one value for each."""
        metas = tuple(one.build_connector_worker_meta() for one in self.connectors)
        return metas if any(meta is not None for meta in metas) else None

    # --- both ---

    def get_kv_connector_stats(self) -> Mapping[str, float]:
        """As `KVConnector`: sums, by name."""
        total: dict[str, float] = {}
        for one in self.connectors:
            for name, number in one.get_kv_connector_stats().items():
                total[name] = total.get(name, 0) + number
        return total

    def shutdown(self) -> None:
        """As `KVConnector`."""
        for one in self.connectors:
            one.shutdown()


def _listed(config: KVTransferConfig) -> list[Mapping[str, Any]]:
    listed = config.kv_connector_extra_config.get("connectors")
    is_list = isinstance(listed, list) and listed and all(isinstance(one, Mapping) and one for one in listed)
    if not is_list or any(one.get("kv_connector") == config.kv_connector for one in listed or ()):
        raise ConfigError(
            f"{FIELD}: {config.kv_connector} needs connectors, a list of objects like kv_transfer_config",
            hint='write {"connectors": [{"kv_connector": "ExampleConnector", ...}]}, without another one of its kind',
            field=FIELD,
        )
    return list(listed or ())
