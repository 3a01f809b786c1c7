"""A tier behind the KV cache: what it keeps is loaded, late or never, and no block is lost or misread."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.engine_messages import FinishReason
from quire.core.kv_transfer import BlockTransfer, KVTransferResults
from quire.core.runner_output import ModelRunnerOutput
from quire.core.scheduler_output import SchedulerOutput
from quire.errors import ValidationError
from quire.scheduler.waiting import WaitReason
from tests.unit.dictionary_tier import DictionaryTier
from tests.unit.scheduler import test_properties as properties
from tests.unit.scheduler.cache_groups import make_spec
from tests.unit.scheduler.harness import (
    FULL,
    Engine,
    FakeWorker,
    expected_answer,
    make_request,
    make_scheduler,
    make_siblings,
)
from tests.unit.scheduler.test_steps_in_flight import LateEngine

PROMPT = [5, 6, 7, 8, 9] * 5


class TierWorker(FakeWorker):
    """A pretended worker with the other half: blocks by name. An asynchronous copy is made when it is reported.

    Args:
        delay: steps until an asynchronous transfer is made; 0 = in its own step.
        fails: which loads fail.
    """

    def __init__(
        self, engine: Engine, num_blocks: int, delay: Callable[[int], int], fails: Callable[[int], bool]
    ) -> None:
        tiers, kv = engine.scheduler._tiers, engine.scheduler._kv
        num_swap_blocks = sum(pool.num_blocks for pool in tiers.swapping._pools)
        super().__init__(num_blocks, kv.block_size, engine.groups, num_swap_blocks)
        self.may_be_empty = True
        self.blocks: dict[bytes, Any] = {}
        self._delay, self._fails = delay, fails
        self._under_way: dict[int, tuple[BlockTransfer, bool, int]] = {}
        self._done: list[int] = []
        self._failed: list[int] = []
        self._lost: set[int] = set()

    def execute(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        output = super().execute(scheduled)
        results = KVTransferResults(tuple(self._done), tuple(self._failed))
        self._done, self._failed = [], []
        return dataclasses.replace(output, kv_transfers=results)

    def _apply(self, scheduled: SchedulerOutput) -> None:
        self._begin(scheduled)
        for row in scheduled.freed_rows.tolist():
            self._lost.difference_update(self.rows[row].block_ids[0] if row in self.rows else ())
        for number, (transfer, is_save, steps) in list(self._under_way.items()):
            if steps and transfer.is_async:
                self._under_way[number] = (transfer, is_save, steps - 1)
                continue
            del self._under_way[number]
            self._copy(transfer, is_save)
        super()._apply(scheduled)

    def _check_reads(self, row: int, num_computed: int) -> None:
        if not self._lost.intersection(self.rows[row].block_ids[0]):  # else what it computes is thrown away
            super()._check_reads(row, num_computed)

    def spoil(self, scheduled: SchedulerOutput) -> None:
        super().spoil(scheduled)
        if scheduled.step % 2:  # it got so far
            self._begin(scheduled)
            self._under_way = {one: entry for one, entry in self._under_way.items() if entry[0].is_async}

    def _begin(self, scheduled: SchedulerOutput) -> None:
        meta = scheduled.kv_transfers
        for is_save, transfers in () if meta is None else ((False, meta.loads), (True, meta.saves)):
            for one in transfers:
                if is_save and not one.is_async:
                    self.blocks.update(
                        {key: self.slots[i].copy() for key, i in zip(one.keys, one.block_ids, strict=True)}
                    )
                    continue
                self._under_way[one.transfer_id] = (one, is_save, self._delay(one.transfer_id))

    def _copy(self, transfer: BlockTransfer, is_save: bool) -> None:
        pairs = zip(transfer.keys, transfer.block_ids.tolist(), strict=True)
        if is_save:
            self.blocks.update({key: self.slots[block_id].copy() for key, block_id in pairs})
        elif self._fails(transfer.transfer_id) or not self.blocks.keys() >= set(transfer.keys):
            self.slots[transfer.block_ids] = -3
            self._failed.append(transfer.transfer_id)
            self._lost.update(transfer.block_ids.tolist())
            return
        else:
            for key, block_id in pairs:
                self.slots[block_id] = self.blocks[key]
        self._done.append(transfer.transfer_id)


def make_engine(
    is_async: Callable[[int], bool] = lambda handle: False,
    delay: Callable[[int], int] = lambda number: 0,
    fails: Callable[[int], bool] = lambda number: False,
    depth: int = 1,
    **config: Any,
) -> tuple[Engine, DictionaryTier]:
    config = {"block_size": 4, "max_model_len": properties.MAX_MODEL_LEN, "num_blocks": 40, **config}
    groups = config.get("groups", (FULL,))
    specs = [] if groups == (FULL,) else [make_spec(kind, size, config["block_size"]) for kind, size in groups]
    tier = DictionaryTier(config["block_size"], is_async, specs)
    scheduler = make_scheduler(tier=tier, max_steps_in_flight=depth, **config)
    engine = Engine(scheduler, groups=groups) if depth == 1 else LateEngine(scheduler, groups=groups, depth=depth)
    engine.worker = TierWorker(engine, len(scheduler._kv._pool.ref_counts()), delay, fails)
    return engine, tier


def answer_to(handle: int) -> list[int]:
    return expected_answer(make_request(handle, PROMPT, max_tokens=4), properties.MAX_MODEL_LEN)[0]


def filled(**options: Any) -> tuple[Engine, DictionaryTier]:
    """An engine whose tier has the blocks of `PROMPT`, and whose cache has nothing."""
    engine, tier = make_engine(**options)
    engine.add(make_request(0, PROMPT, max_tokens=4))
    engine.run()
    settle(engine)
    assert len(tier.keys) == 7 and engine.scheduler.reset_prefix_cache()
    engine.scheduled.clear()
    return engine, tier


def settle(engine: Engine) -> None:
    """Step until no transfer is in flight."""
    while engine.scheduler._tiers.is_waiting:
        engine.step()
    take_in_all(engine)


def take_in_all(engine: Engine) -> None:
    if isinstance(engine, LateEngine):
        engine.drain()


def num_computed(engine: Engine) -> int:
    return sum(message.total_num_scheduled_tokens for message in engine.scheduled)


@pytest.mark.parametrize("is_async", [False, True], ids=["in the step", "before it"])
def test_a_request_computes_only_what_the_tier_has_not(is_async):
    engine, _ = filled(is_async=lambda handle: is_async)
    engine.add(make_request(1, PROMPT, max_tokens=4))
    engine.run()
    assert engine.tokens[1] == answer_to(1)
    assert num_computed(engine) == 1 + 3  # the last token of the prompt, and all sampled ones but the last
    assert [event.num_cached_tokens for event in engine.events if event.handle == 1 and event.num_cached_tokens] == [24]


def test_a_request_that_waits_for_its_load_holds_up_no_other_and_says_so():
    engine, _ = filled(is_async=lambda handle: handle == 1, delay=lambda number: 6)
    engine.add(make_request(1, PROMPT, max_tokens=4), make_request(2, 6, max_tokens=3))
    step = engine.scheduler.schedule()
    assert step is not None and [one.request_id for one in step.output.new_reqs] == ["r2"]
    assert step.plan.blocked is not None and step.plan.blocked.reason is WaitReason.WAITING_FOR_REMOTE_KVS
    engine.receive(engine.scheduler.update_from_output(step, engine.worker.execute(step.output)))
    engine.run()
    assert list(engine.finished)[1:] == [2, 1] and engine.tokens[1] == answer_to(1)


@pytest.mark.parametrize("is_async", [False, True], ids=["in the step", "before it"])
def test_what_could_not_be_loaded_is_computed(is_async):
    engine, tier = filled(is_async=lambda handle: is_async, fails=lambda number: True)
    engine.add(make_request(1, PROMPT, max_tokens=4))
    engine.step()
    assert len(tier.keys) == 1 or is_async  # the six that failed are not offered again
    engine.run()
    assert engine.tokens[1] == answer_to(1) and num_computed(engine) >= len(PROMPT) + 3
    settle(engine)
    assert engine.scheduler._kv.usage == 0.0


def test_siblings_share_no_blocks_of_a_load_that_may_still_fail():
    engine, _ = filled(depth=2, fails=lambda number: number == 1)
    engine.add(*make_siblings((1, 2), PROMPT, max_tokens=4))
    engine.run()
    assert engine.tokens[1] == answer_to(1)
    settle(engine)
    assert engine.scheduler._kv.usage == 0.0


def test_pages_of_an_aborted_load_and_of_a_save_are_free_when_that_is_reported_and_not_before():
    engine, _ = filled(is_async=lambda handle: True, delay=lambda number: 5)
    engine.add(make_request(1, PROMPT, max_tokens=4))
    engine.step()
    engine.abort(1)
    for _ in range(4):
        assert engine.scheduler._kv.usage == pytest.approx(6 / 39)
        engine.step()
    settle(engine)
    assert engine.scheduler._kv.usage == 0.0
    engine.add(make_request(2, [9] * 9, max_tokens=1))
    while 2 not in engine.finished:
        engine.step()
    assert engine.scheduler._kv.usage == pytest.approx(2 / 39)
    settle(engine)
    assert engine.scheduler._kv.usage == 0.0


def test_what_a_preempted_request_has_computed_is_copied_and_loaded_again():
    engine, tier = make_engine(is_async=lambda handle: True, num_blocks=10, preemption_mode="recompute")
    tier.copies_at_once = True
    engine.add(make_request(1, PROMPT[:14], max_tokens=12), make_request(2, PROMPT[1:15], max_tokens=12))
    engine.run()
    settle(engine)
    expected = [expected_answer(make_request(1, PROMPT[i : 14 + i], max_tokens=12), 99)[0] for i in (0, 1)]
    assert [engine.tokens[1], engine.tokens[2]] == expected
    loads = [one for message in engine.scheduled if message.kv_transfers for one in message.kv_transfers.loads]
    assert loads and num_computed(engine) < 2 * 14 + 2 * 11 + 14


@settings(max_examples=properties.EXAMPLES, deadline=None)
@given(properties.scheduler_settings(), properties.scripts(), st.sampled_from([1, 2]), st.booleans())
def test_whatever_is_loaded_late_or_lost_every_request_gets_its_answer_and_every_page_comes_back(
    config, script, depth, copies
):
    config = {**config, "prefix_caching": True}
    engine, tier = make_engine(
        is_async=lambda handle: handle % 2 > 0,
        delay=lambda number: zlib.crc32(b"%d" % number) % 4,
        fails=lambda number: number % 5 == 4,
        depth=depth,
        **config,
    )
    tier.copies_at_once = copies
    accepted: dict[int, Any] = {}
    for action in script:
        if isinstance(action, properties.Add):
            try:
                engine.add(action.request)
                accepted[action.request.handle] = action.request
            except ValidationError:
                continue
        elif isinstance(action, properties.Abort):
            engine.abort(action.handle)
        elif isinstance(action, properties.Hold):
            engine.scheduler.hold(action.handles)
        elif isinstance(action, properties.Fail):
            engine.fail_step()
        elif isinstance(action, properties.Reset):
            take_in_all(engine)
            engine.scheduler.reset_prefix_cache(action.with_running)
        else:
            engine.step(action.abort_in_flight)
    engine.scheduler.hold(())
    engine.run()
    properties.check_answers(engine, accepted)
    settle(engine)
    assert copies or tier.keys <= engine.worker.blocks.keys()
    assert all(end.finish_reason is not FinishReason.ERROR for end in engine.finished.values())
    assert engine.scheduler._kv.usage == 0.0 and engine.scheduler.reset_prefix_cache()
