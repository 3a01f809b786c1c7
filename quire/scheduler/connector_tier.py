"""ConnectorTier: the scheduler's half of a KV connector, as a tier behind the cache.

Called by `KVTiers`. Translates between what that accounts for (names of blocks, transfers) and the connector's contract
(requests, numbers of tokens, metadata of its own). Owns what is between two calls: who ended, what responses carry.
A call of the connector that raises is logged and counted, and the request is computed as if it had offered nothing. A
connector of which a call raised that changes what it keeps account of is used no longer: what it sends might be stale.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from quire.core.kv_events import KVEvent
from quire.core.kv_transfer import ConnectorMessage
from quire.core.request import Request
from quire.core.runner_output import ModelRunnerOutput
from quire.core.scheduler_output import SchedulerOutput
from quire.kv_cache.cached_prefix import CachedPrefix
from quire.kv_transfer.connector import KVConnector
from quire.kv_transfer.requests import ConnectorRequest, ConnectorStep
from quire.logger import get_logger
from quire.scheduler.kv_tier import ExternalHit, KVTier

logger = get_logger(__name__)

Result = TypeVar("Result")

ENDS = {
    (False, True): "loaded_blocks", (False, False): "failed_blocks", (True, True): "saved_blocks",
    (True, False): "unsaved_blocks",
}  # fmt: skip
"""Names of counts, by whether it was a save, and whether it was done."""


class ConnectorTier(KVTier):
    """A connector behind the cache.

    Args:
        connector: its scheduler half.
        clock: seconds, for requests that wait for a load.

    Attributes:
        num_errors: calls of the connector that raised.
        is_off: it is used no longer.
    """

    sends_messages = True

    def __init__(self, connector: KVConnector, clock: Callable[[], float] = time.monotonic) -> None:
        self._connector = connector
        self._config = connector.config
        self._clock = clock
        self._finished: set[str] = set()
        self._deadlines: dict[int, float] = {}  # of requests that wait for a load, by handle
        self._params: dict[int, dict[str, Any]] = {}  # for the responses of requests that ended, by handle
        self.fails_requests = self._config.fails_requests
        self._counts: dict[str, float] = {}
        self.num_errors = 0
        self.is_off = False

    # --- at admission ---

    def request_arrived(self, request: Request) -> None:
        """As `KVTier`."""
        self._call(lambda: self._connector.on_new_request(ConnectorRequest(request)), None)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> ExternalHit | None:
        """As `KVTier`."""
        if self.is_off or not self._config.is_kv_consumer:
            return None
        view = ConnectorRequest(request)
        nothing: tuple[int | None, bool] = (0, False)
        num_tokens, is_async = self._call(
            lambda: self._connector.get_num_new_matched_tokens(view, num_computed_tokens), nothing
        )
        if num_tokens is None:
            return ExternalHit(num_computed_tokens, is_pending=True)
        return ExternalHit(num_computed_tokens + num_tokens, bool(is_async)) if num_tokens > 0 else None

    def update_state_after_alloc(
        self, request: Request, prefix: CachedPrefix, hit: ExternalHit | None, block_ids: tuple[np.ndarray, ...]
    ) -> None:
        """As `KVTier`."""
        if hit is None:
            return
        block_size = self._connector.layout.block_size
        ids = block_ids[0][: hit.num_tokens // block_size].tolist()
        num_external = hit.num_tokens - prefix.num_tokens
        if hit.is_async and self._config.kv_load_timeout_s:
            self._deadlines[request.handle] = self._clock() + self._config.kv_load_timeout_s
        view = ConnectorRequest(request)
        self._change(lambda: self._connector.update_state_after_alloc(view, ids, num_external), None)

    def is_overdue(self, request: Request) -> bool:
        """As `KVTier`."""
        deadline = self._deadlines.get(request.handle)
        if deadline is None or self._clock() < deadline:
            return False
        del self._deadlines[request.handle]
        self._count("late_loads")
        logger.warning("request %s: its KV blocks were not loaded in time; it is computed", request.request_id)
        return True

    # --- at the end ---

    def request_finished(self, request: Request, keys: Sequence[bytes], block_ids: np.ndarray) -> Sequence[bytes]:
        """As `KVTier`."""
        return keys if self._end(request, block_ids[: len(keys)].tolist()) else ()

    def request_left(self, request: Request) -> None:
        """As `KVTier`."""
        self._end(request, [])

    def _end(self, request: Request, block_ids: list[int]) -> bool:
        """Whether the request's blocks stay until they are reported as sent."""
        self._deadlines.pop(request.handle, None)
        self._finished.add(request.unique_id)
        view = ConnectorRequest(request)
        nothing: tuple[bool, Mapping[str, Any] | None] = (False, None)
        is_delayed, params = self._change(lambda: self._connector.request_finished(view, block_ids), nothing)
        if params:
            self._params[request.handle] = dict(params)
        return bool(is_delayed and block_ids)

    def has_pending_work(self) -> bool:
        """As `KVTier`."""
        return not self.is_off and self._call(self._connector.has_pending_work, False)

    def take_params(self, handle: int) -> dict[str, Any] | None:
        """As `KVTier`."""
        return self._params.pop(handle, None)

    # --- messages ---

    def build_message(
        self, output: SchedulerOutput, request_on: Callable[[int], Request], block_ids_on: Callable[[int], np.ndarray]
    ) -> ConnectorMessage | None:
        """As `KVTier`."""
        step = ConnectorStep(output, request_on, block_ids_on)
        metadata = self._change(lambda: self._connector.build_connector_meta(step), None)
        has_transfers = output.kv_transfers is not None
        if metadata is None and not self._finished and not has_transfers:
            return None
        finished, self._finished = frozenset(self._finished), set()
        return ConnectorMessage(metadata, finished, has_failed=self.is_off)

    def transfer_ended(self, keys: Sequence[bytes], *, is_save: bool, is_done: bool) -> None:
        """As `KVTier`."""
        self._count(ENDS[is_save, is_done], len(keys))

    def take_counts(self) -> dict[str, float] | None:
        """As `KVTier`: what became of blocks, late loads, errors, and the connector's own counts."""
        if not self._counts:
            return None
        taken, self._counts = self._counts, {}
        return taken

    def _count(self, event: str, number: float = 1) -> None:
        self._counts[event] = self._counts.get(event, 0) + number

    def take_events(self) -> list[KVEvent]:
        """As `KVTier`."""
        nothing: Iterable[Any] = ()
        events = self._call(lambda: list(self._connector.take_events()), nothing)
        return [event for event in events if isinstance(event, KVEvent)]

    def update_from_output(self, scheduled: SchedulerOutput, output: ModelRunnerOutput, seconds: float | None) -> None:
        """As `KVTier`."""
        report = None if output.kv_transfers is None else output.kv_transfers.connector
        if report is not None:
            for name, number in report.stats.items():
                if number > 0:
                    self._count(str(name), float(number))
            self._call(lambda: self._connector.update_connector_output(report), None)

    def _change(self, call: Callable[[], Result], otherwise: Result) -> Result:
        """A call that changes what the connector keeps account of."""
        if self.is_off:
            return otherwise
        num_errors = self.num_errors
        result = self._call(call, otherwise)
        if self.num_errors > num_errors:
            self.is_off = True
            logger.error("KV connector %s is used no longer: every request is computed", self._config.kv_connector)
        return result

    def _call(self, call: Callable[[], Result], otherwise: Result) -> Result:
        try:
            return call()
        except Exception:  # a foreign class may raise anything; no request ends for it
            self.num_errors += 1
            self._count("errors")
            logger.exception("KV connector %s failed in the scheduler", self._config.kv_connector)
            return otherwise
