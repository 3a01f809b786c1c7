"""What the scheduler's half of a disk decides: what is loaded, what is stored, and when neither is worth it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from quire.core.request import Request
from quire.core.runner_output import ModelRunnerOutput
from quire.core.sampling_params import SamplingParams
from quire.core.stats import OffloadStats
from quire.errors import ValidationError
from quire.kv_offload.counts import OffloadCounts
from quire.kv_offload.store import BlockMemory, BlockStore, FinishedJobs, Found, Place
from quire.scheduler.offloading import LIMIT_UNKNOWN_S, MIN_LIMIT_S, RETRY_S, Offloading
from tests.unit.scheduler.harness import FULL, Engine, make_kv_cache_config, make_request, make_scheduler

BLOCK_SIZE = 4
NO_IDS = np.empty(0, dtype=np.int32)  # the tier does not look at them
NAMES = [bytes([number]) * 32 for number in range(20)]


class PretendedStore(BlockStore):
    """Says what it is told to."""

    def __init__(self, num_here: int = 0) -> None:
        self.num_here = num_here
        self.here: Callable[[Sequence[bytes]], Sequence[bytes]] = lambda keys: NAMES[: self.num_here]
        self.is_on_disk = True
        self.num_waiting = 0
        self.times: list[tuple[int, float]] = []
        self.given_up = 0
        self.has_others = False
        self.prefetched: list[list[bytes]] = []
        self.counts = OffloadCounts()

    def start(self, memory: BlockMemory) -> None: ...

    def lookup(self, keys: Sequence[bytes], first: int = 0) -> Found:
        num_blocks = max(0, min(len(self.here(keys)), len(keys)) - first)
        return Found(num_blocks, num_blocks if self.is_on_disk else 0)

    def places(self, keys: Sequence[bytes]) -> np.ndarray:
        here = self.here(keys)
        return np.array([Place.DISK if key in here else Place.NOWHERE for key in keys], np.uint8)

    def touch(self, keys: Sequence[bytes]) -> None: ...

    def submit_store(self, job_id: int, keys: Sequence[bytes], block_ids: Sequence[int]) -> None: ...

    copies_at_once = is_hung = False

    def is_of_others(self, key: bytes) -> bool:
        return self.has_others

    def copy_now(self, keys: Sequence[bytes], block_ids: Sequence[int]) -> None: ...

    def submit_load(self, *args: object) -> None: ...

    def prefetch(self, keys: Sequence[bytes]) -> None:
        self.prefetched.append(list(keys))

    def get_finished(self) -> FinishedJobs:
        return FinishedJobs()

    def give_up_stores(self) -> None:
        self.given_up += 1

    @property
    def num_storing(self) -> int:
        return self.num_waiting

    def count_dropped(self, num_blocks: int) -> None:
        self.counts.add(num_dropped=num_blocks)

    def count_kept_out(self) -> None:
        self.counts.add(num_kept_out=1)

    def take_load_times(self) -> list[tuple[int, float]]:
        times, self.times = self.times, []
        return times

    def take_stats(self) -> OffloadStats | None:
        return self.counts.take()

    def totals(self) -> OffloadStats:
        return self.counts.totals()

    def close(self, seconds: float = 0.0) -> None: ...


@pytest.fixture
def store() -> PretendedStore:
    return PretendedStore(num_here=8)


@pytest.fixture
def now() -> list[float]:
    return [1000.0]


@pytest.fixture
def tier(store, now) -> Offloading:
    return Offloading(store, make_kv_cache_config(40, BLOCK_SIZE, (FULL,)), clock=lambda: now[0])


def make_waiting(num_tokens: int = 40) -> Request:
    request = Request.from_message(make_request(1, num_tokens))
    request.block_hashes = NAMES[: num_tokens // BLOCK_SIZE]
    return request


def measure(tier: Offloading, store: PretendedStore, *, prompt_token_s: float = 0.0, load_s: float = 0.0) -> None:
    """A step with a prompt of 40 tokens, and a load of 8 blocks that ended in it."""
    engine = Engine(make_scheduler(block_size=BLOCK_SIZE))
    engine.add(make_request(7, 40))
    engine.step()
    if load_s:
        store.times.append((8, load_s))
    nothing = ModelRunnerOutput(rows=np.empty(0, np.int32), sampled_token_ids=np.empty(0, np.int32))
    tier.update_from_output(engine.scheduled[0], nothing, 40 * prompt_token_s)


def test_what_is_there_beyond_the_cache_is_loaded_before_the_request_runs(tier):
    hit = tier.get_num_new_matched_tokens(make_waiting(), 8)
    assert hit is not None and hit.num_tokens == 32 and hit.is_async and hit.time_limit_s == LIMIT_UNKNOWN_S
    assert tier.get_num_new_matched_tokens(make_waiting(), 32) is None


def test_a_load_that_takes_longer_than_computing_is_left_out_and_tried_again_later(tier, store, now):
    measure(tier, store, prompt_token_s=0.01, load_s=10.0)
    assert tier.get_num_new_matched_tokens(make_waiting(), 0) is None and store.totals().num_kept_out == 1
    store.is_on_disk = False
    assert tier.get_num_new_matched_tokens(make_waiting(), 0) is not None, "host memory is always faster"
    store.is_on_disk = True
    now[0] += RETRY_S
    hit = tier.get_num_new_matched_tokens(make_waiting(), 0)
    assert hit is not None and hit.time_limit_s == MIN_LIMIT_S


def test_a_load_is_given_up_after_twice_the_time_of_computing(tier, store):
    measure(tier, store, prompt_token_s=1.0, load_s=0.1)
    hit = tier.get_num_new_matched_tokens(make_waiting(), 0)
    assert hit is not None and hit.time_limit_s == pytest.approx(2 * 32 * 1.0)


def test_what_is_not_there_is_stored_unless_too_much_waits(tier, store):
    request = make_waiting()
    assert tier.request_finished(request, NAMES[:10], NO_IDS) == NAMES[8:10]
    assert tier.request_finished(request, NAMES[:10], NO_IDS) == [], "they are being stored"
    tier.transfer_ended(NAMES[8:10], is_save=True, is_done=False)
    store.num_here = 0
    assert len(tier.request_finished(request, NAMES, NO_IDS)) == 20  # nothing waits
    tier.transfer_ended(NAMES, is_save=True, is_done=False)
    store.num_waiting = 1
    assert len(tier.request_finished(request, NAMES[:9], NO_IDS)) == 9
    assert len(tier.request_finished(request, NAMES[9:], NO_IDS)) == 0
    assert store.totals().num_dropped == 11


def test_stores_are_given_up_where_blocks_are_short():
    store = PretendedStore()
    tier = Offloading(store, make_kv_cache_config(12, BLOCK_SIZE, (FULL,)))
    engine = Engine(make_scheduler(tier=tier, block_size=BLOCK_SIZE, num_blocks=12))
    engine.worker.may_be_empty = True
    engine.add(make_request(0, 30, max_tokens=2))
    engine.run()
    engine.add(make_request(1, 30, max_tokens=2))
    engine.step()
    engine.step()
    assert store.given_up


def test_the_reason_why_no_more_was_loaded_is_the_first_that_holds(tier, store):
    request, reasons = make_waiting(), []
    measure(tier, store, prompt_token_s=0.01, load_s=10.0)
    reasons.append(tier.explain_miss(request, 8))
    tier.request_finished(request, NAMES[8:9], NO_IDS)
    reasons.append(tier.explain_miss(request, 32))
    tier.transfer_ended(NAMES[8:9], is_save=True, is_done=False)
    reasons.append(tier.explain_miss(request, 32))
    store.has_others = True
    reasons.append(tier.explain_miss(request, 32))
    store.is_hung = True
    reasons += [tier.explain_miss(request, 32), tier.explain_miss(request, 36)]
    assert [str(one) for one in reasons] == [
        "slower_to_load", "being_stored", "not_in_tier", "other_digest", "tier_down", "None",
    ]  # fmt: skip


def test_a_miss_says_what_the_tier_says_of_it():
    store = PretendedStore()
    tier = Offloading(store, make_kv_cache_config(40, BLOCK_SIZE, (FULL,)))
    engine = Engine(make_scheduler(tier=tier, block_size=BLOCK_SIZE, num_blocks=40))
    engine.worker.may_be_empty = True
    engine.add(make_request(0, 30, max_tokens=2))
    engine.run()
    store.has_others = True
    engine.add(make_request(5, 30, max_tokens=2))
    engine.run()
    misses = [event.cache_miss for event in engine.events if event.cache_miss is not None]
    assert [str(miss.reason) for miss in misses] == ["cold", "other_digest"]
    looked_up = [(one.external_prefix_cache_queries, one.external_prefix_cache_hits) for one in engine.stats]
    assert sum(queries for queries, _ in looked_up) == 60 and not any(hits for _, hits in looked_up)


def test_only_a_request_that_has_to_wait_has_its_blocks_prefetched(store):
    tier = Offloading(store, make_kv_cache_config(40, BLOCK_SIZE, (FULL,)))
    engine = Engine(make_scheduler(tier=tier, block_size=BLOCK_SIZE, num_blocks=40, max_num_seqs=1))
    engine.worker.may_be_empty = True
    store.num_here = 0
    engine.add(make_request(1, 14, max_tokens=6))
    engine.step()
    engine.step()
    assert not store.prefetched, "it was placed at once"
    engine.add(make_request(2, 14))
    store.here = lambda keys: keys
    engine.step()
    assert [len(keys) for keys in store.prefetched] == [3], "of 14 tokens one is computed, with its block"
    engine.step()
    assert len(store.prefetched) == 1, "once"
    measure(tier, store, prompt_token_s=0.0001, load_s=10.0)
    tier.prefetch(make_waiting(), 0)
    assert len(store.prefetched) == 1, "not what is slower than computing"


def test_hints_prefetch_at_once_and_share_a_prompt_before_its_request_ends(store):
    tier = Offloading(store, make_kv_cache_config(40, BLOCK_SIZE, (FULL,)))
    engine = Engine(make_scheduler(tier=tier, block_size=BLOCK_SIZE, num_blocks=40))
    engine.worker.may_be_empty = True
    store.here = lambda keys: keys
    hints = {"actions": [{"action_type": "prefetch"}]}
    engine.scheduler.add_request(make_request(1, 14, extra_args={"kv_hints": hints}))
    assert [len(keys) for keys in store.prefetched] == [3]
    engine.abort(1)
    store.here = lambda keys: []
    hints = {"protocol_version": "1", "message_id": "m", "actions": [{"action_id": "a", "action_type": "share"}]}
    engine.add(make_request(2, 14, max_tokens=20, extra_args={"kv_hints": hints}))
    for _ in range(4):
        engine.step()
    saves = [one for message in engine.scheduled if message.kv_transfers for one in message.kv_transfers.saves]
    assert [len(one.keys) for one in saves] == [3] and 2 not in engine.finished


@pytest.mark.parametrize(
    ("hints", "words"),
    [
        (5, "an object"),
        ({}, "actions is not a list"),
        ({"actions": [{}] * 33}, "at most 32"),
        ({"actions": [{"action_type": "erase"}]}, r"actions\[0\].action_type='erase' is not one of"),
        ({"actions": ["pin"]}, r"actions\[0\] is not an object"),
        ({"actions": [], "more": 1}, "has no key 'more'"),
        ({"actions": [{"action_type": "pin", "payload": 3}]}, "payload is not an object"),
        ({"actions": [], "message_id": "x" * 300}, "longer than 256"),
    ],
)
def test_hints_that_are_no_envelope_are_refused_by_name(hints, words):
    with pytest.raises(ValidationError, match=words) as error:
        SamplingParams(extra_args={"kv_hints": hints})
    assert error.value.field == "kv_hints"
