"""Grammars of an engine core: requests wait for them, fail alone, and take up where a core that died has left."""

from __future__ import annotations

import dataclasses
import threading
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import numpy as np

from quire.core.engine_messages import EngineCoreOutputs, EngineCoreRequest, FinishedRequest, FinishReason
from quire.core.sampling_params import SamplingParams
from quire.core.scheduler_output import DraftTokens
from quire.core.stats import SchedulerStats
from quire.errors import ValidationError
from quire.structured_output.compile.errors import BudgetError
from quire.structured_output.interface import CompiledGrammar, GrammarSpec, Matcher, Vocabulary
from quire.structured_output.manager import GrammarManager

EOS, END_TOO = 40, 41


class Counting(CompiledGrammar, Matcher):
    """Allows 0, then 1, 2, ...; may end from 3 on."""

    def __init__(self) -> None:
        self.next_id = 0
        self.has_ended = False

    def start(self) -> Matcher:
        return Counting()

    def accept(self, token_id: int) -> bool:
        self.has_ended = token_id == EOS and self.next_id >= 3
        is_allowed = self.has_ended or token_id == self.next_id
        self.next_id += is_allowed
        return is_allowed

    def rollback(self, num_tokens: int) -> None:
        self.next_id -= num_tokens
        self.has_ended = self.has_ended and not num_tokens

    def fill_bitmask(self, bitmask: np.ndarray, row: int) -> None:
        bitmask[row] = 0
        bitmask[row, self.next_id // 32] = 1 << self.next_id % 32
        if self.next_id >= 3:
            bitmask[row, 1] = 1 << (EOS - 32)

    def is_terminated(self) -> bool:
        return self.has_ended


class Pool:
    """A compile pool whose grammars are made when a test says so."""

    vocabulary = Vocabulary((*(b"x" for _ in range(EOS)), b"", b""), EOS)

    def __init__(self) -> None:
        self.futures: list[Future[Any]] = []

    def compile(self, spec: GrammarSpec, tenant: str) -> Future[Any]:
        self.futures.append(Future())
        return self.futures[-1]

    def close(self) -> None:
        """Nothing to end."""


def make(count: int, **fields: Any) -> tuple[GrammarManager, Pool]:
    """`count` requests of one grammar, by handles from 0."""
    pool = Pool()
    manager = GrammarManager(lambda eos: pool)  # type: ignore[arg-type, return-value]
    for handle in range(count):
        add(manager, handle, **fields)
    return manager, pool


def add(
    manager: GrammarManager, handle: int, output: list[int] | None = None, regex: str = "a", salt: str | None = None,
    tenant: str = "", bad_words: list[list[int]] | None = None,
) -> None:  # fmt: skip
    form = {"regex": regex}
    params = SamplingParams(structured_outputs=form, stop_token_ids=[END_TOO, 7])  # type: ignore[arg-type]
    params.bad_words_token_ids = bad_words
    manager.add(
        EngineCoreRequest(
            handle=handle, request_id=str(handle), prompt_token_ids=np.array([1], np.int32), sampling_params=params,
            seed=0, eos_token_id=EOS, output_token_ids=None if output is None else np.array(output, np.int32),
            cache_salt=salt, tenant=tenant,
        )
    )  # fmt: skip


def outputs(tokens: dict[int, int], ended: tuple[int, ...] = ()) -> EngineCoreOutputs:
    return EngineCoreOutputs(
        handles=np.array(list(tokens), np.int64), new_token_ids=np.array(list(tokens.values()), np.int32),
        logprobs=None, prompt_logprobs=(), finished=tuple(FinishedRequest(one, FinishReason.STOP) for one in ended),
        events=(), stats=SchedulerStats(step=0), timestamp=0.0,
    )  # fmt: skip


def settle(manager: GrammarManager) -> None:
    """Wait until no row sits out."""
    while manager.settle():
        manager.wait()


def allowed(manager: GrammarManager, handles: list[int]) -> dict[int, list[int]]:
    """Position among `handles` -> ids that may be sampled, once their grammars are through their tokens."""
    settle(manager)
    masks = manager.begin_masks(lambda: np.array(handles, np.int64))
    if masks is None:
        return {}
    found = masks.result()
    bits = np.unpackbits(found.bitmask.view(np.uint8), axis=1, bitorder="little")
    return {line: np.flatnonzero(row).tolist() for line, row in zip(found.lines.tolist(), bits)}


def test_requests_of_one_grammar_wait_for_one_compilation_and_others_for_none():
    manager, pool = make(2)
    assert len(pool.futures) == 1 and not manager.is_ready(0) and manager.is_ready(99)
    pool.futures[0].set_result((Counting(), 10))
    assert manager.is_ready(0) and manager.is_ready(1)
    add(manager, 2)
    assert len(pool.futures) == 1 and manager.is_ready(2)


def test_a_grammar_that_another_tenant_has_compiled_is_compiled_again_and_ones_own_is_not():
    manager, pool = make(1, salt="alice", tenant="alice")
    pool.futures[0].set_result((Counting(), 10))
    add(manager, 1, salt="bob", tenant="bob")
    assert len(pool.futures) == 2 and not manager.is_ready(1), "how soon it is there says nothing of alice"
    add(manager, 2, salt="alice", tenant="alice")
    assert len(pool.futures) == 2 and manager.is_ready(2)


def test_a_tenant_that_fills_the_cache_of_grammars_loses_its_own_alone():
    pool = Pool()
    manager = GrammarManager(lambda eos: pool, cache_bytes=3 << 16)  # type: ignore[arg-type, return-value]
    for handle, (tenant, regex) in enumerate([("bob", "b"), ("alice", "1"), ("alice", "2"), ("alice", "3")]):
        add(manager, handle, regex=regex, tenant=tenant)
    add(manager, 9, regex="b", tenant="bob")
    assert len(pool.futures) == 4
    add(manager, 10, regex="1", tenant="alice")
    assert len(pool.futures) == 5


def test_several_tokens_of_a_step_advance_a_grammar_in_their_order():
    manager, pool = make(2)
    pool.futures[0].set_result((Counting(), 10))
    assert manager.is_ready(0) and manager.is_ready(1)
    several = {"handles": np.array([0, 1, 0, 0], np.int64), "new_token_ids": np.array([0, 0, 1, 2], np.int32)}
    manager.note(dataclasses.replace(outputs({}), **several))
    assert allowed(manager, [1, 0]) == {0: [1], 1: [3, EOS, END_TOO]}


def masks_with_drafts(manager: GrammarManager, drafts: dict[int, list[int]]) -> tuple[dict[int, list[int]], list[int]]:
    """Row of logits -> ids that may be sampled, and the closed rows, of handles with these drafts."""
    settle(manager)
    counts = np.array([len(ids) for ids in drafts.values()], np.int32)
    token_ids = np.array([one for ids in drafts.values() for one in ids], np.int32)
    masks = manager.begin_masks(lambda: np.array(list(drafts), np.int64), DraftTokens(counts, token_ids))
    assert masks is not None
    found = masks.result()
    bits = np.unpackbits(found.bitmask.view(np.uint8), axis=1, bitorder="little")
    lines = {line: np.flatnonzero(row).tolist() for line, row in zip(found.lines.tolist(), bits, strict=True)}
    return lines, [] if found.closed is None else found.closed.tolist()


def test_behind_each_draft_is_what_the_grammar_allows_there_and_nothing_behind_a_refused_one():
    manager, pool = make(2)
    pool.futures[0].set_result((Counting(), 10))
    assert manager.is_ready(0) and manager.is_ready(1)
    for _ in range(2):  # nothing of the drafts is left
        lines, closed = masks_with_drafts(manager, {50: [1, 2], 0: [0, 1, 5, 2], 1: []})
        assert lines == {3: [0], 4: [1], 5: [2], 8: [0]} and closed == [6, 7]
    manager.note(outputs({0: 0}))
    lines, closed = masks_with_drafts(manager, {0: [1, 2, END_TOO], 50: [4]})
    assert lines == {0: [1], 1: [2], 2: [3, EOS, END_TOO], 3: [EOS, END_TOO]} and closed == []
    assert allowed(manager, [0]) == {0: [1]}


class Loud(Counting):
    """Complains of tokens that it does not allow."""

    def start(self) -> Matcher:
        return Loud()

    def accept(self, token_id: int) -> bool:
        assert super().accept(token_id), f"{token_id} was shown to it, and its mask excludes it"
        return True


def test_a_library_is_shown_no_draft_that_its_mask_excludes():
    manager, pool = make(1)
    pool.futures[0].set_result((Loud(), 10))
    assert manager.is_ready(0)
    assert masks_with_drafts(manager, {0: [5, 1]}) == ({0: [0]}, [1, 2])
    assert masks_with_drafts(manager, {0: [0, 1, 7]}) == ({0: [0], 1: [1], 2: [2]}, [3])
    assert not manager.take_failures()


def test_what_a_request_forbids_behind_a_draft_ends_it_only_when_it_is_reached():
    manager, pool = make(0)
    add(manager, 0, bad_words=[[1, 2]])
    pool.futures[0].set_result((Counting(), 10))
    assert manager.is_ready(0)
    lines, closed = masks_with_drafts(manager, {0: [0, 1, 2]})
    assert lines == {0: [0], 1: [1]} and closed == [2, 3] and not manager.take_failures()
    for token_id in (0, 1):
        manager.note(outputs({0: token_id}))
    masks_with_drafts(manager, {0: [2]})
    assert manager.take_failures()[0].field == "bad_words"


def test_a_grammar_that_a_process_follows_is_not_taken_through_drafts():
    manager, pool = make(1)
    pool.futures[0].set_result((Counting(), 10))
    assert manager.is_ready(0)
    answer = manager._answers[0]
    answer.follower, answer.grammar = SimpleNamespace(line=np.array([1, 0], np.int32), is_terminated=False), None
    assert masks_with_drafts(manager, {0: [0, 1]}) == ({0: [0]}, [1, 2])


def test_requests_whose_grammars_have_processes_are_named_while_they_run():
    manager, pool = make(2)
    expensive = Counting()
    expensive.is_expensive = True
    follower = SimpleNamespace(close=lambda: None)
    manager._followers = SimpleNamespace(begin=lambda *given: follower, close=lambda: None)  # type: ignore[assignment]
    pool.futures[0].set_result((expensive, 10))
    assert not manager.followed and not manager.is_ready(0)
    assert manager.followed == {0}, "the other one was not begun"
    manager.note(outputs({}, ended=(0,)))
    assert not manager.followed


def test_masks_are_for_structured_rows_alone_and_follow_what_was_sampled():
    manager, pool = make(2)
    pool.futures[0].set_result((Counting(), 10))
    assert manager.is_ready(0) and manager.is_ready(1)
    assert allowed(manager, [50, 51]) == {}
    assert allowed(manager, [50, 1, 0]) == {1: [0], 2: [0]}
    manager.note(outputs({1: 0, 50: 9}))
    assert allowed(manager, [1, 50, 0]) == {0: [1], 2: [0]}
    manager.note(outputs({1: 1}, ended=(0,)))
    assert allowed(manager, [0, 1]) == {1: [2]}
    manager.shutdown()


def test_a_continued_request_begins_where_its_output_ends_and_every_end_of_the_model_ends_it():
    manager, pool = make(1, output=[0, 1, 2])
    pool.futures[0].set_result((Counting(), 10))
    assert not manager.take_failures()
    settle(manager)
    assert manager.is_ready(0)
    assert allowed(manager, [0]) == {0: [3, EOS, END_TOO]}, "7 is a stop id, but a text's token like any other"
    manager.note(outputs({0: END_TOO}))
    assert allowed(manager, [0]) == {0: [EOS, END_TOO]}
    manager.shutdown()


def test_a_grammar_that_fails_ends_its_requests_with_the_field_and_only_a_refusal_is_remembered():
    manager, pool = make(1)
    add(manager, 1, regex="b")
    pool.futures[0].set_exception(BudgetError("too much", field="x"))
    pool.futures[1].set_exception(ValidationError("no", field="x"))
    failures = manager.take_failures()
    assert {handle: error.field for handle, error in failures.items()} == dict.fromkeys(
        [0, 1], "structured_outputs.regex"
    )
    assert manager.take_failures() == {}
    manager.note(outputs({}, ended=(0, 1)))
    add(manager, 2)
    add(manager, 3, regex="b")
    assert len(pool.futures) == 3 and not manager.is_ready(2) and list(manager.take_failures()) == [3]


def test_a_grammar_that_nobody_waits_for_any_more_is_not_compiled():
    manager, pool = make(2)
    manager.note(outputs({}, ended=(0,)))
    assert not pool.futures[0].cancelled()
    manager.note(outputs({}, ended=(1,)))
    assert pool.futures[0].cancelled()
    add(manager, 2)
    assert len(pool.futures) == 2


class Slow(Counting):
    """Takes as long for a token as a test says."""

    gate = threading.Event()

    def start(self) -> Matcher:
        return Slow()

    def accept(self, token_id: int) -> bool:
        return self.gate.wait(60.0) and super().accept(token_id)


def test_a_grammar_that_takes_long_for_a_token_sits_out_and_holds_up_neither_the_engine_nor_its_neighbours():
    manager, pool = make(1)
    add(manager, 1, regex="slow")
    pool.futures[0].set_result((Counting(), 10))
    pool.futures[1].set_result((Slow(), 10))
    assert manager.is_ready(0) and manager.is_ready(1)
    manager.note(outputs({1: 0, 0: 0}))
    while 0 in manager.settle():
        manager.wait()
    for token_id in (1, 2):
        assert manager.settle() == {1} and not manager.is_ready(1)
        manager.note(outputs({0: token_id}))
        while 0 in manager.settle():
            manager.wait()
    assert manager.is_ready(0) and not manager.take_failures()
    Slow.gate.set()
    assert allowed(manager, [0, 1]) == {0: [3, EOS, END_TOO], 1: [1]}
    manager.shutdown()


def test_a_request_that_ends_while_its_grammar_is_busy_leaves_nothing_behind():
    Slow.gate.clear()
    manager, pool = make(1)
    pool.futures[0].set_result((Slow(), 10))
    assert manager.is_ready(0)
    manager.note(outputs({0: 9}))
    manager.note(outputs({}, ended=(0,)))
    assert not manager.settle()
    Slow.gate.set()
    manager.shutdown()
    assert not manager.take_failures()


def test_a_library_that_gives_up_within_a_step_ends_its_own_request_and_the_step_goes_on():
    manager, pool = make(2)
    pool.futures[0].set_result((Counting(), 10))
    assert manager.is_ready(0) and manager.is_ready(1)
    answer = manager._answers[0]
    assert isinstance(answer.grammar, Counting)
    answer.grammar.fill_bitmask = lambda bitmask, row: 1 // 0  # type: ignore[method-assign, assignment]
    assert allowed(manager, [0, 1]) == {0: [], 1: [0]}
    failures = manager.take_failures()
    assert list(failures) == [0] and isinstance(failures[0], ValidationError)
    manager.shutdown()
