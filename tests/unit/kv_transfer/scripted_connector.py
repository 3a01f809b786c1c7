"""A connector whose loads and saves are late, lost or raise by a script, and the pretended worker that calls it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from quire.config.kv_transfer import KVTransferConfig
from quire.core.runner_output import ModelRunnerOutput
from quire.core.scheduler_output import SchedulerOutput
from quire.kv_transfer.connector import KVConnector, KVConnectorRole
from quire.kv_transfer.layout import KVCacheLayout
from quire.scheduler.connector_tier import ConnectorTier
from quire.worker.connector_worker import ConnectorWorker
from tests.unit.scheduler.harness import FULL, Engine, FakeWorker, make_scheduler
from tests.unit.scheduler.test_steps_in_flight import LateEngine


def layout_of(block_size: int) -> KVCacheLayout:
    return KVCacheLayout(
        block_size=block_size, order="fingerprints", layers=(), groups=("full attention x 1",), model="", build=""
    )


class ScriptedConnector(KVConnector):
    """Keeps blocks in a dictionary. What is asynchronous is copied in the call that reports it.

    Attributes:
        is_async: whether a request waits for its load.
        delay: calls until a transfer is made, by its number.
        fails: which loads fail.
        knows_late: lookups of a request that say "not known yet".
        raises: names of calls that raise.
        params: of the responses.
    """

    quire_contract = 1

    def __init__(self, config: KVTransferConfig, role: KVConnectorRole, layout: KVCacheLayout) -> None:
        super().__init__(config, role, layout)
        self.is_async: Callable[[str], bool] = lambda request_id: False
        self.delay: Callable[[int], int] = lambda number: 0
        self.fails: Callable[[int], bool] = lambda number: False
        self.knows_late = 0
        self.raises: set[str] = set()
        self.params: dict[str, Any] | None = None
        self.known: set[bytes] = set()
        self.lookups: dict[str, int] = {}
        self.loads: list[Any] = []
        self.saves: list[Any] = []
        self.kept: dict[bytes, Any] = {}
        self.under_way: list[list[Any]] = []  # [steps left, is_save, request id, [(name, block)], number]
        self.num_begun = 0
        self.new: list[bytes] = []
        self.errors: set[int] = set()
        self.ended: list[str] = []
        self.num_events = 0

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        self._may_raise("get_num_new_matched_tokens")
        self.lookups[request.request_id] = self.lookups.get(request.request_id, 0) + 1
        if self.lookups[request.request_id] <= self.knows_late:
            return None, False
        size, names = self.layout.block_size, request.block_hashes
        num = first = num_computed_tokens // size
        while num < len(names) and names[num] in self.known:
            num += 1
        return (num - first) * size, self.is_async(request.request_id)

    def update_state_after_alloc(self, request: Any, block_ids: Sequence[int], num_external_tokens: int) -> None:
        self._may_raise("update_state_after_alloc")
        num = num_external_tokens // self.layout.block_size
        assert num > 0 and num_external_tokens % self.layout.block_size == 0
        names = request.block_hashes[len(block_ids) - num : len(block_ids)]
        is_async = self.is_async(request.request_id)
        self.loads.append((request.request_id, is_async, list(zip(names, block_ids[-num:], strict=True))))

    def request_finished(self, request: Any, block_ids: Sequence[int]) -> tuple[bool, Any]:
        self._may_raise("request_finished")
        self.ended.append(request.request_id)
        pairs = list(zip(request.block_hashes[: len(block_ids)], block_ids, strict=True))
        if pairs and self.config.is_kv_producer:
            self.saves.append((request.request_id, pairs))
        return bool(pairs) and self.config.is_kv_producer, self.params

    def build_connector_meta(self, step: Any) -> Any:
        self._may_raise("build_connector_meta")
        for one in step.scheduled:
            assert one.num_scheduled_tokens > 0
            assert len(one.block_ids) * self.layout.block_size >= one.num_computed_tokens + one.num_scheduled_tokens
        meta, self.loads, self.saves = (self.loads, self.saves), [], []
        return meta if any(meta) else None

    def update_connector_output(self, output: Any) -> None:
        self.known.update(output.worker_meta or ())

    def start_load_kv(self) -> None:
        self._may_raise("start_load_kv")
        loads, saves = self.metadata
        for request_id, is_async, pairs in loads:
            if is_async:
                self._begin(False, request_id, pairs)
            else:
                self._load(pairs, self.num_begun)
                self.num_begun += 1
        for request_id, pairs in saves:
            self._begin(True, request_id, pairs)

    def _begin(self, is_save: bool, request_id: str, pairs: Any) -> None:
        self.under_way.append([self.delay(self.num_begun), is_save, request_id, pairs, self.num_begun])
        self.num_begun += 1

    def _load(self, pairs: Any, number: int) -> None:
        assert self.blocks is not None
        for name, block_id in pairs:
            if self.fails(number):
                self.blocks.write([block_id], [np.full((1, self.layout.block_size), -3)])  # type: ignore[list-item]
                self.errors.add(block_id)
            else:
                self.blocks.write([block_id], self.kept[name])

    def get_finished(self, finished_req_ids: frozenset[str]) -> tuple[set[str], set[str]]:
        self._may_raise("get_finished")
        sent, received = set[str](), set[str]()
        for one in list(self.under_way):
            if one[0] > 0:
                one[0] -= 1
                continue
            _, is_save, request_id, pairs, number = one
            self.under_way.remove(one)
            if is_save:
                assert self.blocks is not None
                self.kept.update((name, self.blocks.read([block_id])) for name, block_id in pairs)
                self.new += [name for name, _ in pairs]
                sent.add(request_id)
            else:
                self._load(pairs, number)
                received.add(request_id)
        return sent, received

    def get_block_ids_with_load_errors(self) -> set[int]:
        errors, self.errors = self.errors, set()
        return errors

    def build_connector_worker_meta(self) -> Any:
        new, self.new = self.new, []
        return new or None

    def _may_raise(self, call: str) -> None:
        if call in self.raises:
            raise RuntimeError(call)


class Slots:
    """The pretended worker's cache as blocks."""

    def __init__(self, slots: np.ndarray) -> None:
        self._slots = slots

    def read(self, block_ids: Any) -> Any:
        return [self._slots[list(block_ids)].copy()]

    def write(self, block_ids: Any, blocks: Any) -> None:
        self._slots[list(block_ids)] = blocks[0]


class ConnectorFakeWorker(FakeWorker):
    """A pretended worker that calls a connector as the model runner does."""

    def __init__(self, engine: Engine, num_blocks: int, half: ScriptedConnector) -> None:
        tiers, kv = engine.scheduler._tiers, engine.scheduler._kv
        super().__init__(num_blocks, kv.block_size, (FULL,), tiers.swapping._pool.num_blocks)
        self.may_be_empty = True
        self.half = half
        self._adapter = ConnectorWorker(half, {})
        self._adapter.register_kv_caches(Slots(self.slots))  # type: ignore[arg-type]
        self._lost: set[int] = set()

    def execute(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        output = super().execute(scheduled)
        self._adapter.finish_forward()
        return dataclasses.replace(output, kv_transfers=self._adapter.get_finished())

    def _apply(self, scheduled: SchedulerOutput) -> None:
        for row in scheduled.freed_rows.tolist():
            self._lost.difference_update(self.rows[row].block_ids[0] if row in self.rows else ())
        self._adapter.begin_step()
        if scheduled.kv_transfers is not None:
            self._adapter.start_transfers(scheduled.kv_transfers)
            self._lost.update(getattr(self.half, "errors", ()))
            if getattr(self.half, "raises", ()):
                self._lost.update(*(one.block_ids.tolist() for one in scheduled.kv_transfers.loads))
        super()._apply(scheduled)

    def _check_reads(self, row: int, num_computed: int) -> None:
        if not self._lost.intersection(self.rows[row].block_ids[0]):  # else what it computes is thrown away
            super()._check_reads(row, num_computed)

    def spoil(self, scheduled: SchedulerOutput) -> None:
        super().spoil(scheduled)
        if scheduled.step % 2 and scheduled.kv_transfers is not None:  # it got so far
            self._adapter.begin_step()
            self._adapter.start_transfers(scheduled.kv_transfers)


def make_engine(
    depth: int = 1,
    clock: Callable[[], float] = lambda: 0.0,
    transfer: dict[str, Any] | None = None,
    kind: Any = ScriptedConnector,
    **config: Any,
) -> tuple[Engine, Any, Any]:
    """An engine with a connector: its scheduler half and its worker half, whose scripts may be changed."""
    config = {"block_size": 4, "max_model_len": 64, "num_blocks": 40, **config}
    settings = KVTransferConfig(**{"kv_connector": "Scripted", **(transfer or {})})
    layout = layout_of(config["block_size"])
    halves = [kind(settings, role, layout) for role in KVConnectorRole]
    scheduler = make_scheduler(tier=ConnectorTier(halves[0], clock), max_steps_in_flight=depth, **config)
    engine = Engine(scheduler) if depth == 1 else LateEngine(scheduler, depth=depth)
    engine.worker = ConnectorFakeWorker(engine, config["num_blocks"], halves[1])
    return engine, halves[0], halves[1]
