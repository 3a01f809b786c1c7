"""What holds for every load: random requests, pools, budgets and settings, against the pretended worker.

More examples: QUIRE_EXAMPLES=5000 pytest tests/unit/scheduler/test_properties.py
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.core.beam_search import BeamSpec
from quire.core.engine_messages import EngineCoreRequest, FinishReason
from quire.core.kv_spec import PoolSize
from quire.core.request import ExtraKeys
from quire.core.scheduler_output import SchedulerOutput
from quire.errors import ValidationError
from quire.kv_cache.block_hash import BLOCK_HASHES
from tests.unit.scheduler.harness import (
    FULL,
    Engine,
    Group,
    expected_answer,
    make_beams,
    make_request,
    make_scheduler,
    make_siblings,
    same_message,
)
from tests.unit.scheduler.kv_event_consumer import KVEventConsumer
from tests.unit.scheduler.pretended_model import expected_beams

EXAMPLES = int(os.environ.get("QUIRE_EXAMPLES", "60"))
MAX_MODEL_LEN = 40
POOL_OF_STATES = st.integers(3, 14)  # a state that is read, and one that is written
SHARED_TEXTS = ([3] * 40, [3, 3, 3, 3, 4, 5, 6, 7, 8, 9] * 4)


@dataclass(frozen=True)
class Add:
    request: EngineCoreRequest


@dataclass(frozen=True)
class Abort:
    handle: int


@dataclass(frozen=True)
class Step:
    abort_in_flight: tuple[int, ...] = ()


@dataclass(frozen=True)
class Hold:
    handles: tuple[int, ...]


@dataclass(frozen=True)
class Fail:
    pass


@dataclass(frozen=True)
class Reset:
    with_running: bool = False


Action = Add | Abort | Hold | Step | Fail | Reset


@st.composite
def scheduler_settings(draw: st.DrawFn) -> dict[str, Any]:
    chunked = draw(st.booleans())
    return {
        "scheduling_policy": draw(st.sampled_from(["fcfs", "priority", "fair", "shortest"])),
        "max_model_len": MAX_MODEL_LEN,
        "num_blocks": draw(st.integers(2, 30)),
        "num_swap_blocks": draw(st.sampled_from([0, 3, 10, 100])),
        "preemption_mode": draw(st.sampled_from(["auto", "recompute", "swap"])),
        "block_size": draw(st.integers(1, 5)),
        "max_num_seqs": draw(st.integers(1, 6)),
        "budget": draw(st.integers(1, 50) if chunked else st.integers(MAX_MODEL_LEN, 60)),
        "enable_chunked_prefill": chunked,
        "max_decode_slowdown": draw(st.sampled_from([None, 1.0, 2.0])),
        "max_inter_token_latency_ms": draw(st.sampled_from([0.0, 0.0, 5.0, 30.0])),
        "long_prefill_token_threshold": draw(st.sampled_from([0, 1, 3, 10])),
        "reserve_full_prompt": draw(st.booleans()),
        "watermark": draw(st.sampled_from([0.0, 0.2])),
        "prefix_caching": draw(st.booleans()),
        **draw(cache_layouts()),
    }


@st.composite
def group_lists(draw: st.DrawFn) -> tuple[Group, ...]:
    """One group that keeps whole sequences, or none, and up to two that free blocks."""
    local = st.tuples(st.sampled_from(["window", "chunk"]), st.integers(1, 12))
    full = draw(st.sampled_from([(FULL,), (FULL,), ()]))
    return (*full, *draw(st.lists(local, min_size=0 if full else 1, max_size=2)))


@st.composite
def cache_layouts(draw: st.DrawFn) -> dict[str, Any]:
    """Groups of one pool, or with recurrent layers and others whose blocks have other bytes in pools of their own."""
    groups = draw(group_lists())
    if draw(st.booleans()):
        return {"groups": groups}
    latent = draw(st.sampled_from([(), (), (("latent", 3),)]))
    states = draw(st.sampled_from([(), (("state", 2),), (("state", 2),)]))
    if states and draw(st.integers(0, 3)) == 0:
        return {
            "groups": states,
            "checkpoint_interval": draw(st.sampled_from([0, 6])),
            "num_blocks": draw(POOL_OF_STATES),
        }
    pools = [PoolSize(num_blocks=draw(st.integers(2, 30)), num_swap_blocks=draw(st.sampled_from([0, 3, 20])))] * len(
        latent
    )
    pools += [PoolSize(num_blocks=draw(POOL_OF_STATES), num_swap_blocks=draw(st.sampled_from([0, 1, 20])))] * len(
        states
    )
    return {
        "groups": (*latent, *groups, *states),
        "more_pools": pools,
        "checkpoint_interval": draw(st.sampled_from([0, 0, 1, 6])),
    }


@st.composite
def prompts(draw: st.DrawFn) -> list[int]:
    shared = draw(st.sampled_from(SHARED_TEXTS))[: draw(st.integers(0, 25))]
    own = draw(st.lists(st.integers(1, 3), max_size=10))
    return shared + own or [1]


@st.composite
def requests(draw: st.DrawFn, handle: int) -> EngineCoreRequest:
    return make_request(
        handle,
        draw(prompts()),
        max_tokens=draw(st.one_of(st.none(), st.integers(1, 20))),
        ignore_eos=draw(st.booleans()),
        stop_token_ids=draw(st.one_of(st.none(), st.lists(st.integers(1, 49), max_size=6))),
        no_store=draw(st.sampled_from([False, False, True])),
        skip_reading_prefix_cache=draw(st.sampled_from([None, None, True])),
        cache_salt=draw(st.sampled_from([None, None, "salt"])),
        priority=draw(st.sampled_from([0, 0, -1, 5])),
        tenant=draw(st.sampled_from(["", "a", "b"])),
        weight=draw(st.sampled_from([1.0, 1.0, 0.5, 4.0])),
        tenant_policy=draw(st.sampled_from(["fcfs", "priority", "shortest"])),
    )


@st.composite
def siblings(draw: st.DrawFn, handle: int) -> list[EngineCoreRequest]:
    handles = range(handle, handle + draw(st.integers(2, 4)))
    family = make_siblings(
        handles,
        draw(prompts()),
        max_tokens=draw(st.integers(1, 20)),
        skip_reading_prefix_cache=draw(st.sampled_from([None, True])),
        cache_salt=draw(st.sampled_from([None, "salt"])),
        priority=draw(st.sampled_from([0, -1])),
    )
    return [replace(one, sampling_params=one.sampling_params.clone()) for one in family]


@st.composite
def beams(draw: st.DrawFn, handle: int) -> list[EngineCoreRequest]:
    num_beams = draw(st.integers(1, 3))
    spec = BeamSpec(
        num_beams=num_beams,
        length_penalty=draw(st.sampled_from([0.0, 0.8, 1.0, 1.2])),
        early_stopping=draw(st.sampled_from([True, False, "never"])),
    )
    return make_beams(
        range(handle, handle + num_beams),
        draw(prompts()),
        spec,
        max_tokens=draw(st.integers(1, 12)),
        ignore_eos=draw(st.booleans()),
        stop_token_ids=draw(st.one_of(st.none(), st.lists(st.integers(1, 49), max_size=3))),
        cache_salt=draw(st.sampled_from([None, "salt"])),
        priority=draw(st.sampled_from([0, -1])),
    )


@st.composite
def scripts(draw: st.DrawFn) -> list[Action]:
    script: list[Action] = []
    num_added = 0
    for kind in draw(st.lists(st.sampled_from("aaagbssssxfreh"), min_size=1, max_size=40)):
        handles = st.integers(0, max(0, num_added - 1))
        if kind == "a":
            script.append(Add(draw(requests(num_added))))
            num_added += 1
        elif kind == "g":
            family = draw(siblings(num_added))
            script.extend(Add(one) for one in family)
            num_added += len(family)
        elif kind == "b":
            search = draw(beams(num_added))
            script.extend(Add(one) for one in search)
            num_added += len(search)
        elif kind == "x":
            script.append(Abort(draw(handles)))
        elif kind == "h":
            script.append(Hold(tuple(draw(st.lists(handles, max_size=3)))))
        elif kind == "r":
            script.append(Reset(draw(st.booleans())))
        elif kind == "e":
            script.append(Fail())
        else:
            script.append(Step((draw(handles),) if kind == "f" else ()))
    return script


def any_duration(scheduled: SchedulerOutput) -> float | None:
    """Seconds that follow no law but are the same for the same step; None = not measured."""
    num_tokens = scheduled.num_scheduled_tokens.tobytes()
    return [None, 0.0, 1e-9, 0.01, 0.02, 0.05, 1e6][zlib.crc32(num_tokens) % 7]


def any_swap_durations(scheduled: SchedulerOutput) -> tuple[float | None, float | None]:
    """Seconds of the copies out and back, as lawless."""
    kinds = [None, 0.0, 1e-6, 0.01, 1e6]
    outs, ins = (zlib.crc32(copies.source_ids.tobytes()) for copies in (scheduled.swap_outs, scheduled.swap_ins))
    return kinds[outs % 5], kinds[ins % 5]


def play(
    config: dict[str, Any], script: list[Action], make_engine: Callable[..., Engine] = Engine
) -> tuple[Engine, dict[int, Any]]:
    """Run a script, then everything that is left, to the end; (engine, accepted requests)."""
    engine = make_engine(
        make_scheduler(**config),
        duration=any_duration,
        swap_durations=any_swap_durations,
        budget=config["budget"],
        groups=config.get("groups", (FULL,)),
    )
    accepted: dict[int, Any] = {}
    for action in script:
        if isinstance(action, Add):
            try:
                engine.add(action.request)
                accepted[action.request.handle] = action.request
            except ValidationError as error:
                assert error.hint
        elif isinstance(action, Abort):
            engine.abort(action.handle)
        elif isinstance(action, Hold):
            engine.scheduler.hold(action.handles)
        elif isinstance(action, Fail):
            engine.fail_step()
        elif isinstance(action, Reset):
            engine.drain()
            assert engine.scheduler.reset_prefix_cache(action.with_running) or not action.with_running
        else:
            engine.step(action.abort_in_flight)
    engine.scheduler.hold(())
    engine.run()
    return engine, accepted


def check_answers(engine: Engine, accepted: dict[int, Any]) -> None:
    """Every accepted request ended; those that were not aborted got what they get when they run alone."""
    assert engine.finished.keys() == accepted.keys()
    for handle, request in accepted.items():
        if request.sampling_params.beam_search is not None:
            check_beam(engine, request)
            continue
        answer, end = expected_answer(request, MAX_MODEL_LEN)
        got = engine.tokens[handle]
        if engine.finished[handle].finish_reason is FinishReason.ABORT:
            assert got == answer[: len(got)]
        else:
            assert (got, engine.finished[handle]) == (answer, end)


def check_beam(engine: Engine, request: EngineCoreRequest) -> None:
    """The i-th request of a search has its i-th best sequence; all of them end alike."""
    first = request.fork_group
    assert first is not None and request.sampling_params.beam_search is not None
    end = engine.finished[request.handle]
    if FinishReason.ABORT in (end.finish_reason, engine.finished[first].finish_reason):
        assert end.finish_reason is engine.finished[first].finish_reason
        return
    tokens, cum_logprob = expected_beams(request, MAX_MODEL_LEN)[request.handle - first]
    assert end.beam is not None and end.beam.token_ids.tolist() == tokens
    assert end.beam.cum_logprob == pytest.approx(cum_logprob, abs=1e-4)


@settings(max_examples=EXAMPLES, deadline=None)
@given(scheduler_settings(), scripts())
def test_whatever_arrives_every_request_ends_with_its_own_answer_and_no_page_is_misused(config, script):
    engine, accepted = play(config, script)
    check_answers(engine, accepted)
    assert engine.scheduler.get_request_counts() == (0, 0)
    assert engine.scheduler._kv.usage == 0.0
    assert engine.scheduler.reset_prefix_cache()


@settings(max_examples=EXAMPLES // 2, deadline=None)
@given(scheduler_settings(), scripts())
def test_the_same_arrivals_give_the_same_schedule(config, script):
    first, _ = play(config, script)
    second, _ = play(config, script)
    assert len(first.scheduled) == len(second.scheduled)
    assert all(same_message(a, b) for a, b in zip(first.scheduled, second.scheduled, strict=True))
    assert first.events == second.events and first.stats == second.stats


@settings(max_examples=EXAMPLES // 2, deadline=None)
@given(scheduler_settings(), scripts(), st.integers(0, 40))
def test_a_request_that_ends_before_it_was_planned_leaves_no_trace(config, script, place):
    if config["scheduling_policy"] in ("fair", "shortest"):
        config = {
            **config,
            "scheduling_policy": "fcfs",
        }  # under these, to have come counts: as age, and as no longer idle
    place = min(place, len(script))
    ghost = make_request(999, [3] * 12, max_tokens=3)
    haunted = [*script[:place], Add(ghost), Abort(999), *script[place:]]
    first, _ = play(config, script)
    second, _ = play(config, haunted)
    assert len(first.scheduled) == len(second.scheduled)
    assert all(same_message(a, b) for a, b in zip(first.scheduled, second.scheduled, strict=True))


def two_bit_hash(parent: bytes, tokens: bytes, extra_keys: ExtraKeys) -> bytes:
    return bytes([(sum(parent) + sum(tokens)) % 4])


@settings(max_examples=EXAMPLES // 2, deadline=None)
@given(scheduler_settings(), scripts())
def test_a_hash_that_collides_all_the_time_never_leads_to_a_wrong_page(config, script):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(BLOCK_HASHES, "sha256", two_bit_hash)
        patch.setattr(KVEventConsumer, "check", lambda consumer: None)  # it knows blocks by their hashes alone
        engine, accepted = play({**config, "prefix_caching": True}, script)
    check_answers(engine, accepted)


@settings(max_examples=EXAMPLES // 2, deadline=None)
@given(st.integers(3, 8), st.integers(1, 4), st.booleans(), st.sampled_from(["recompute", "swap", "auto"]))
def test_a_pool_too_small_for_all_preempts_and_still_ends_everything(num_seqs, block_size, prefix_caching, mode):
    longest = 30
    config = {
        "max_model_len": MAX_MODEL_LEN,
        "num_blocks": -(-longest // block_size) + 2,
        "block_size": block_size,
        "max_num_seqs": num_seqs,
        "budget": 50,
        "prefix_caching": prefix_caching,
        "preemption_mode": mode,
        "num_swap_blocks": 1000,
    }
    script: list[Any] = [Add(make_request(handle, [handle + 1] * 4, max_tokens=24)) for handle in range(num_seqs)]
    engine, accepted = play(config, script)
    check_answers(engine, accepted)
    assert engine.num_preemptions > 0
    assert (engine.num_swap_preemptions > 0) == (mode != "recompute")
