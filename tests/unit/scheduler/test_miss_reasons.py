"""Every reason for a miss, brought about by a script and named, with the first position that differs."""

from __future__ import annotations

import numpy as np
import pytest

from quire.core.cache_info import CacheMiss, MissReason
from quire.core.cache_salt import tenant_salt
from quire.core.kv_spec import PoolSize
from quire.core.request import Request
from quire.core.stats import EventKind
from quire.kv_cache.cached_prefix import CachedPrefix
from quire.kv_cache.miss_explainer import MAX_SIBLINGS, MissExplainer
from quire.kv_cache.prefix_index import PrefixIndex
from tests.unit.kv_cache.test_prefix_index import publish
from tests.unit.scheduler.harness import FULL, Engine, make_request, make_scheduler

BLOCK_SIZE = 4
TEXT = list(range(100, 120))  # five blocks, of which four can be used
RED, BLUE = tenant_salt("red", None), tenant_salt("blue", None)


class Script:
    """An engine and what it says of each request."""

    def __init__(self, **settings) -> None:
        groups = settings.get("groups", (FULL,))
        self.engine = Engine(make_scheduler(block_size=BLOCK_SIZE, **settings), groups=groups)
        self.num_requests = 0

    def start(self, prompt, **options) -> int:
        handle, self.num_requests = self.num_requests, self.num_requests + 1
        self.engine.add(make_request(handle, prompt, **options))
        return handle

    def run(self, prompt, **options) -> tuple[int, CacheMiss | None]:
        handle = self.start(prompt, **{"max_tokens": 1, **options})
        self.engine.run()
        return self.first_turn(handle)

    def first_turn(self, handle: int) -> tuple[int, CacheMiss | None]:
        return self.turns(handle)[0]

    def turns(self, handle: int) -> list[tuple[int, CacheMiss | None]]:
        return [
            (event.num_cached_tokens, event.cache_miss)
            for event in self.engine.events
            if event.handle == handle and event.kind is EventKind.SCHEDULED
        ]


def test_a_prompt_never_seen_is_cold():
    assert Script().run(TEXT) == (0, CacheMiss(MissReason.COLD, 0))


def test_what_follows_all_that_is_cached_is_cold_from_there_on():
    script = Script()
    script.run(TEXT[:8])
    assert script.run(TEXT) == (8, CacheMiss(MissReason.COLD, 8))


def test_a_prompt_that_is_cached_as_far_as_it_can_be_used_has_no_miss():
    script = Script()
    script.run(TEXT)
    assert script.run(TEXT[:18]) == (16, None)


def test_pages_that_others_needed_are_evicted():
    script = Script(num_blocks=10)
    script.run(TEXT)
    script.run([1] * 24)
    assert script.run(TEXT) == (12, CacheMiss(MissReason.EVICTED, 12))


@pytest.mark.parametrize("position", [3, 4, 6, 9, 15])
def test_a_different_token_is_found_by_its_position(position):
    script = Script()
    script.run(TEXT)
    other = [*TEXT[:position], 7, *TEXT[position + 1 :]]
    expected = position // BLOCK_SIZE * BLOCK_SIZE
    assert script.run(other) == (expected, CacheMiss(MissReason.DIFFERENT_TOKEN, position))


def test_of_several_siblings_the_one_that_agrees_longest_tells_the_position():
    script = Script()
    for last in (2, 3, 1):
        script.run([*TEXT[: 8 + last], *[50 + last] * 9])
    assert script.run(TEXT) == (8, CacheMiss(MissReason.DIFFERENT_TOKEN, 11))


def test_a_prompt_that_differs_in_its_first_token_is_cold():
    script = Script()
    script.run(TEXT)
    assert script.run([7, *TEXT[1:]]) == (0, CacheMiss(MissReason.COLD, 0))


def test_another_template_than_the_siblings_is_named():
    script = Script()
    script.run(TEXT, template_id=1)
    changed = [*TEXT[:6], 7, *TEXT[7:]]
    assert script.run(changed, template_id=2) == (4, CacheMiss(MissReason.TEMPLATE_CHANGED, 6))
    assert script.run([*TEXT[:5], 8, *TEXT[6:]], template_id=1)[1] == CacheMiss(MissReason.DIFFERENT_TOKEN, 5)
    assert script.run([*TEXT[:9], 8, *TEXT[10:]])[1] == CacheMiss(MissReason.DIFFERENT_TOKEN, 9)


@pytest.mark.parametrize(
    ("writer", "reader", "reason"),
    [
        ("a", "b", MissReason.OTHER_SALT),
        (None, "b", MissReason.OTHER_SALT),
        ("a", None, MissReason.OTHER_SALT),
        (tenant_salt("red", "x"), RED, MissReason.OTHER_SALT),
        (RED, BLUE, MissReason.OTHER_TENANT),
        (RED, None, MissReason.OTHER_TENANT),
    ],
    ids=["two salts", "none and one", "one and none", "salts of one tenant", "two tenants", "tenant and none"],
)
def test_pages_of_other_salts_are_told_to_operators_alone(writer, reader, reason):
    script = Script()
    script.run(TEXT, cache_salt=writer)
    cached, miss = script.run(TEXT, cache_salt=reader)
    assert (cached, miss) == (0, CacheMiss(MissReason.COLD, 0, reason))
    assert miss is not None and miss.full_reason is reason


def test_what_a_tenant_is_told_does_not_depend_on_what_others_have_sent():
    def told(*others: tuple[str, list[int]]) -> list[tuple[int, MissReason, int]]:
        script = Script(num_blocks=200)
        script.run([*TEXT[:6], *[9] * 10], cache_salt=RED)
        for salt, prompt in others:
            script.run(prompt, cache_salt=salt)
        answers = []
        for prompt in (TEXT, [8] * 20, TEXT):
            cached, miss = script.run(prompt, cache_salt=RED)
            answers.append((cached, miss and miss.reason, miss and miss.position))
        return answers

    alone = told()
    assert alone[0] == (4, MissReason.DIFFERENT_TOKEN, 6)
    crowd = [(tenant_salt(f"t{i}", None), TEXT[: 5 + i % 15]) for i in range(MAX_SIBLINGS + 5)]
    assert told((BLUE, TEXT), (BLUE, [8] * 20), *crowd) == alone


def test_a_prompt_without_a_page_that_can_be_used_is_below_one_page():
    script = Script()
    assert script.run(TEXT[:3]) == (0, CacheMiss(MissReason.BELOW_ONE_PAGE, 0))
    assert script.run(TEXT[:4]) == (0, CacheMiss(MissReason.BELOW_ONE_PAGE, 0))


@pytest.mark.parametrize("num_blocks", [1, 3])
def test_a_prompt_cached_to_its_last_token_computes_its_last_page_again(num_blocks):
    script = Script()
    script.run(TEXT)
    end = BLOCK_SIZE * (num_blocks - 1)
    assert script.run(TEXT[: BLOCK_SIZE * num_blocks]) == (end, CacheMiss(MissReason.LAST_TOKEN, end))


def test_caching_that_is_off_is_the_reason():
    assert Script(prefix_caching=False).run(TEXT) == (0, CacheMiss(MissReason.CACHING_OFF, 0))


def test_a_request_that_does_not_want_to_read_says_so():
    script = Script()
    script.run(TEXT)
    assert script.run(TEXT, skip_reading_prefix_cache=True) == (0, CacheMiss(MissReason.READING_SKIPPED, 0))


def test_prompt_logprobs_need_every_position():
    script = Script()
    script.run(TEXT)
    handle = script.start(TEXT, max_tokens=1, prompt_logprobs=1)
    script.engine.run()
    assert script.first_turn(handle) == (0, CacheMiss(MissReason.PROMPT_LOGPROBS, 0))


def test_pages_that_their_writer_did_not_store_are_named():
    script = Script()
    script.run(TEXT[:9])
    script.run(TEXT, no_store=True)
    assert script.run(TEXT) == (8, CacheMiss(MissReason.NO_STORE, 8))
    assert script.run(TEXT) == (16, CacheMiss(MissReason.LAST_TOKEN, 16))


def test_a_page_that_a_running_request_computes_is_still_being_computed():
    script = Script(budget=24)
    first = script.start(TEXT)
    second = script.start(TEXT)
    script.engine.run()
    assert script.first_turn(first) == (0, CacheMiss(MissReason.COLD, 0))
    assert script.first_turn(second) == (0, CacheMiss(MissReason.STILL_COMPUTING, 0))


@pytest.mark.parametrize(("salt", "other"), [(RED, BLUE), (None, RED), (RED, None)])
def test_a_page_that_another_tenants_request_computes_is_not_mentioned(salt, other):
    script = Script(budget=24)
    script.start(TEXT, cache_salt=other)
    handle = script.start(TEXT, cache_salt=salt)
    script.engine.run()
    assert script.first_turn(handle) == (0, CacheMiss(MissReason.COLD, 0))


def test_a_prompt_that_is_half_computed_is_still_being_computed_from_there_on():
    script = Script(budget=10, long_prefill_token_threshold=9)
    script.start(TEXT)
    script.engine.step()
    second = script.start(TEXT)
    script.engine.run()
    assert script.first_turn(second) == (8, CacheMiss(MissReason.STILL_COMPUTING, 8))


def test_after_a_reset_the_cache_says_so_until_the_page_is_evicted_anew():
    script = Script(num_blocks=10)
    script.run(TEXT)
    assert script.engine.scheduler.reset_prefix_cache()
    assert script.run(TEXT) == (0, CacheMiss(MissReason.CACHE_RESET, 0))
    script.run([1] * 24)
    assert script.run(TEXT) == (12, CacheMiss(MissReason.EVICTED, 12))


def test_a_request_that_lost_its_pages_says_that_it_was_preempted():
    script = Script(num_blocks=12, max_num_seqs=2)
    handles = [script.start([base] * 16, max_tokens=20) for base in (1, 2)]
    script.engine.run()
    turns = script.turns(handles[1])
    assert turns[0] == (0, CacheMiss(MissReason.COLD, 0))
    assert len(turns) > 1
    reasons = [miss.reason for _, miss in turns[1:] if miss is not None]
    assert reasons and set(reasons) == {MissReason.PREEMPTED}


def test_pages_of_another_adapter_are_named():
    index, tokens = PrefixIndex(8), np.array([1, 2, 3], dtype=np.int32)
    publish(index, [1], tokens, {0: (("lora", "one"),)})
    explainer = MissExplainer(index, 2, lambda *_: False)
    request = Request.from_message(make_request(0, tokens.tolist()))
    request.extra_keys = {0: (("lora", "two"),)}
    request.block_tokens = [tokens[:2].tobytes()]
    miss = explainer.explain(request, CachedPrefix((np.empty(0, dtype=np.int32),), 0))
    assert miss == CacheMiss(MissReason.COLD, 0, MissReason.ADAPTER)


def test_what_is_remembered_of_evicted_pages_is_bounded():
    script = Script(num_blocks=12)
    for base in range(1, 60):
        script.run([base] * 16)
    past = script.engine.scheduler._kv._pool.prefix_index.past
    assert len(past) <= 2 * 12


def test_where_all_layers_have_windows_a_miss_is_cold_evicted_or_none():
    script = Script(groups=(("window", 6),), num_blocks=12)
    assert script.run(TEXT) == (0, CacheMiss(MissReason.COLD, 0))
    assert script.run(TEXT[:3]) == (0, CacheMiss(MissReason.BELOW_ONE_PAGE, 0))
    assert script.run(TEXT[:18]) == (16, None)
    assert script.run([*TEXT, *[7] * 9]) == (20, CacheMiss(MissReason.COLD, 20))


def test_a_prefix_of_which_a_windows_pages_are_gone_is_evicted():
    script = Script(groups=(("full", 0), ("window", 6)), num_blocks=30)
    script.run(TEXT)
    pool = script.engine.scheduler._kv._pool
    pool.prefix_index.forget(np.array(list(pool.prefix_index.blocks[1].values())))
    assert script.run(TEXT) == (0, CacheMiss(MissReason.EVICTED, 0))


def hybrid(**settings) -> Script:
    more_pools = [PoolSize(num_blocks=settings.pop("num_states", 20))]
    return Script(groups=(FULL, ("state", 2)), more_pools=more_pools, **settings)


LONG = list(range(100, 136))  # nine blocks; states are kept after eight and nine of them


def test_where_no_state_was_kept_the_end_of_the_common_tokens_would_have_helped():
    script = hybrid()
    script.run(LONG)
    assert script.run([*LONG[:21], 1, 2, 3, 4]) == (0, CacheMiss(MissReason.NO_CHECKPOINT, 20))
    assert script.run([*LONG[:20], 5, 6, 7, 8, 9]) == (20, CacheMiss(MissReason.DIFFERENT_TOKEN, 20))
    assert script.run([*LONG[:34]]) == (32, None)


def test_a_state_that_was_needed_for_another_request_is_evicted():
    script = hybrid(num_states=6)
    script.run(LONG)
    for base in range(4):
        script.run([base] * 21)
    assert script.run([*LONG, 1]) == (0, CacheMiss(MissReason.EVICTED, 36))


def test_a_state_that_a_running_request_will_leave_is_still_computing():
    script = hybrid(budget=8, long_prefill_token_threshold=4)
    script.start(LONG)
    second = script.start([*LONG, 3])
    script.engine.run()
    assert script.first_turn(second) == (0, CacheMiss(MissReason.STILL_COMPUTING, 0))
    script = hybrid(budget=8, long_prefill_token_threshold=4)
    script.start(LONG)
    script.engine.step()
    second = script.start([*LONG, 3])
    script.engine.run()
    assert script.first_turn(second) == (0, CacheMiss(MissReason.STILL_COMPUTING, 8))


def test_a_model_of_states_alone_says_the_same():
    script = Script(groups=(("state", 2),))
    script.run(LONG)
    assert script.run([*LONG[:21], 1, 2, 3, 4]) == (0, CacheMiss(MissReason.NO_CHECKPOINT, 20))
    assert script.run([*LONG[:20], 5, 6, 7, 8, 9]) == (20, CacheMiss(MissReason.DIFFERENT_TOKEN, 20))


def test_pages_of_requests_that_are_swapped_out_are_reset_with_running_ones_alone():
    script = Script(num_blocks=12, max_num_seqs=2, preemption_mode="swap", num_swap_blocks=20)
    for base in (1, 2):
        script.start([base] * 16, max_tokens=20)
    scheduler = script.engine.scheduler
    while not len(scheduler._tiers.swapping):
        assert script.engine.step() is not None
    while scheduler._running.rows.size:
        handle = int(scheduler._table.handle[scheduler._running.rows[0]])
        script.engine.abort(handle)
    assert scheduler._kv.usage == 0.0 and not scheduler.reset_prefix_cache()
    assert scheduler.reset_prefix_cache(reset_running_requests=True) and not len(scheduler._tiers.swapping)
    script.engine.run()
