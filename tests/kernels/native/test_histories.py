"""Drafts from history: automata give the drafts of a plain search within their limits, and keep namespaces apart."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from quire.errors import ShapeError
from quire.kernels.histories import MIN_STORE_BYTES, Histories, HistoryDrafts, HistoryLimits, HistoryRows
from quire.kernels.native.histories import NativeHistories
from quire.kernels.reference.histories import ReferenceHistories
from tests.each import each
from tests.effort import effort

LIMITS = HistoryLimits(max_context=6, max_indexed_tokens=50, max_store_answers=8)
MAX_MODEL_LEN = 400


class Texts:
    """Requests on rows, which grow."""

    def __init__(self, num_rows: int, max_model_len: int = MAX_MODEL_LEN) -> None:
        self.token_ids = np.zeros((num_rows, max_model_len), dtype=np.int32)
        self.num_tokens = np.zeros(num_rows, dtype=np.int32)
        self.handles = np.arange(num_rows, dtype=np.int64)

    def extend(self, row: int, tokens: list[int]) -> None:
        start = int(self.num_tokens[row])
        self.token_ids[row, start : start + len(tokens)] = tokens
        self.num_tokens[row] += len(tokens)

    def ask(self, rows: list[int], most: int = 8) -> HistoryRows:
        at = np.array(rows, dtype=np.int64)
        max_tokens = np.full(len(rows), most, dtype=np.int32)
        return HistoryRows(at, self.handles[at], self.num_tokens[at], max_tokens, self.token_ids)


def ask_once(histories: Histories, text: list[int], handle: int = 0, most: int = 8, factor: float = 1.0) -> list[int]:
    """Drafts by frequency for one text."""
    texts = Texts(1, max(len(text), 1))
    texts.extend(0, text)
    texts.handles[0] = handle
    return histories.propose_suffix(texts.ask([0], most), factor, 0.1).token_ids.tolist()


def assert_equal(one: HistoryDrafts, other: HistoryDrafts) -> None:
    for name in HistoryDrafts.__dataclass_fields__:
        left, right = getattr(one, name), getattr(other, name)
        assert left.dtype == right.dtype and left.tolist() == right.tolist(), name


def words(rng: random.Random, num_tokens: int, alphabet: int) -> list[int]:
    """Text that repeats itself now and then."""
    text: list[int] = []
    while len(text) < num_tokens:
        if text and rng.random() < 0.3:
            start = rng.randrange(len(text))
            text += text[start : start + rng.randint(1, 20)]
        else:
            text.append(rng.randrange(alphabet))
    return text[:num_tokens]


@each("seed", range(effort(6, 100)))
def test_drafts_are_those_of_a_plain_search(seed: int):
    rng = random.Random(seed)
    limits = replace(
        LIMITS,
        max_context=rng.choice((1, 2, 6, 24)),
        max_indexed_tokens=rng.choice((1, 40, 1000)),
        max_store_answers=rng.choice((0, 1, 3, 8)),
    )
    pair = NativeHistories(limits), ReferenceHistories(limits)
    texts, alphabet, num_rows = Texts(4), rng.choice((2, 5, 50)), 4
    for row in range(num_rows):
        texts.extend(row, words(rng, rng.randint(1, 60), alphabet))
    num_handles, num_drafts = num_rows, 0
    for _ in range(effort(60, 200)):
        asked = texts.ask(rng.sample(range(num_rows), rng.randint(1, num_rows)), rng.choice((0, 1, 5, 12)))
        factor, probability = rng.choice((0.5, 1.0, 3.0)), rng.choice((0.0, 0.1, 0.6))
        drafts = [histories.propose_suffix(asked, factor, probability) for histories in pair]
        assert_equal(*drafts)
        num_drafts += len(drafts[0].token_ids)
        for row in range(num_rows):
            texts.extend(row, words(rng, rng.choice((0, 1, 1, 2, 5, 40)), alphabet))
            if texts.num_tokens[row] > MAX_MODEL_LEN - 50 or rng.random() < 0.1:
                start = rng.randrange(int(texts.num_tokens[row]))
                answer = texts.token_ids[row, start : texts.num_tokens[row]].copy()
                ended = int(texts.handles[row])
                texts.handles[row], texts.num_tokens[row] = num_handles, 0
                texts.extend(row, words(rng, rng.randint(1, 60), alphabet))
                namespace = rng.choice((b"a", b"b"))
                for histories in pair:
                    histories.end(ended, answer)
                    histories.begin(num_handles, namespace)
                num_handles += 1
    assert num_drafts
    stats = [histories.stats() for histories in pair]
    for name in ("num_requests", "num_indexed_tokens", "num_store_answers", "num_store_evictions"):
        assert getattr(stats[0], name) == getattr(stats[1], name), name
    assert stats[0].num_store_namespaces == stats[1].num_store_namespaces


@each("seed", range(effort(3, 50)))
def test_drafts_by_prompt_lookup_are_those_of_a_plain_search(seed: int):
    rng = random.Random(seed)
    longest = rng.choice((1, 3, 5))
    shortest = rng.randint(1, longest)
    limits = replace(LIMITS, max_context=longest)
    pair = NativeHistories(limits), ReferenceHistories(limits)
    texts, num_drafts = Texts(3), 0
    for _ in range(60):
        for row in range(3):
            texts.extend(row, words(rng, rng.choice((1, 1, 3)), 4))
        drafts = [one.propose_ngram(texts.ask([2, 0, 1], 5), shortest, longest) for one in pair]
        assert_equal(*drafts)
        num_drafts += len(drafts[0].token_ids)
    assert num_drafts


def test_of_the_longest_ngrams_the_first_occurrence_is_continued():
    histories, texts = NativeHistories(LIMITS), Texts(1)
    texts.extend(0, [1, 2, 3, 9, 2, 3, 8, 1, 2, 3])
    drafts = histories.propose_ngram(texts.ask([0], 4), 1, 5)
    assert drafts.token_ids.tolist() == [9, 2, 3, 8] and drafts.match_lengths.tolist() == [3]
    assert drafts.scores.tolist() == pytest.approx([4 / 5, 5 / 6, 6 / 7, 7 / 8])
    assert not len(histories.propose_ngram(texts.ask([0], 4), 4, 5).token_ids)


def test_the_most_frequent_continuation_is_drafted_with_its_share():
    histories, texts = NativeHistories(LIMITS), Texts(1)
    texts.extend(0, [1, 2, 7, 1, 2, 8, 1, 2, 7, 5, 1, 2])
    drafts = histories.propose_suffix(texts.ask([0], 8), 1.0, 0.1)
    assert drafts.token_ids.tolist() == [7, 5], "of 5 and 1, which are as frequent, the later one"
    assert drafts.match_lengths.tolist() == [2]
    assert drafts.scores.tolist() == pytest.approx([2 / 3, 1 / 2])


def test_a_preempted_request_goes_on_where_it_was_and_another_one_on_its_row_begins_anew():
    histories, texts = NativeHistories(LIMITS), Texts(2)
    texts.extend(0, [1, 2, 3, 4, 1, 2])
    assert histories.propose_suffix(texts.ask([0]), 1.0, 0.1).token_ids.tolist() == [3, 4]
    indexed = histories.stats().num_indexed_tokens
    texts.handles[:] = [5, 0]  # the request is on row 1 now
    texts.extend(1, [1, 2, 3, 4, 1, 2, 3])
    texts.num_tokens[0] = 0
    texts.extend(0, [3, 3, 1, 2])
    drafts = histories.propose_suffix(texts.ask([0, 1]), 1.0, 0.1)
    assert drafts.counts.tolist() == [0, 3] and drafts.token_ids.tolist() == [4, 1, 2]
    assert histories.stats().num_indexed_tokens == indexed + 4 + 1
    histories.end(0, np.empty(0, np.int32))
    assert histories.stats().num_requests == 1


def test_a_handle_that_comes_back_with_another_text_is_indexed_again():
    pair = NativeHistories(LIMITS), ReferenceHistories(LIMITS)
    for histories in pair:
        assert ask_once(histories, [1, 2, 3, 1, 2]) == [3, 1]
        assert ask_once(histories, [1, 2, 3]) == []
        assert ask_once(histories, [5, 6, 7, 5, 6, 7, 8, 5]) == [6]


def test_a_long_prompt_is_indexed_over_several_steps_and_drafts_nothing_before():
    histories, texts = NativeHistories(replace(LIMITS, max_indexed_tokens=100)), Texts(2)
    texts.extend(0, [1, 2, 3, 4] * 80)
    texts.extend(1, [1, 2, 3, 4])
    for _ in range(3):
        assert histories.propose_suffix(texts.ask([0, 1]), 1.0, 0.1).counts[0] == 0
    assert histories.stats().num_indexed_tokens == 304, "short texts do not wait for long ones"
    assert histories.propose_suffix(texts.ask([0, 1]), 1.0, 0.1).counts.tolist() == [6, 0]


def test_answers_are_drafted_from_in_their_namespace_alone():
    for histories in (NativeHistories(LIMITS), ReferenceHistories(LIMITS)):
        secret = np.arange(100, 120, dtype=np.int32)
        histories.begin(0, b"one")
        histories.end(0, secret)
        for handle, namespace, expected in ((1, b"two", []), (2, b"one", [103, 104, 105]), (3, b"", [])):
            histories.begin(handle, namespace)
            assert ask_once(histories, [100, 101, 102], handle) == expected
        assert ask_once(histories, [100, 101, 102], handle=4) == [], "a request that was not announced"


def test_what_other_namespaces_hold_changes_neither_drafts_nor_work():
    outcomes = []
    for num_others in (0, 30):
        limits = replace(LIMITS, max_store_answers=1000, max_indexed_tokens=10_000)
        rng, histories = random.Random(1), NativeHistories(limits)
        other = random.Random(2)
        for i in range(num_others):
            histories.begin(1000 + i, b"other")
            histories.end(1000 + i, np.array(words(other, 300, 5), dtype=np.int32))
        histories.begin(999, b"other")
        ask_once(histories, [1, 2, 3], 999)  # indexes them
        before, drafts = histories.stats().num_lookups, []
        for handle in range(20):
            histories.begin(handle, b"own")
            drafts.append(ask_once(histories, words(rng, 60, 5), handle))
            histories.end(handle, np.array(words(rng, 60, 5), dtype=np.int32))
        outcomes.append((drafts, histories.stats().num_lookups - before))
    assert outcomes[0] == outcomes[1]
    assert any(outcomes[0][0])


def test_the_store_keeps_to_its_bytes_and_forgets_what_was_not_used():
    rng, limits = random.Random(3), replace(LIMITS, max_store_answers=10_000, max_indexed_tokens=1000)
    histories = NativeHistories(replace(limits, max_store_bytes=MIN_STORE_BYTES))
    useful = list(range(1000, 1040))
    histories.begin(0, b"a")
    histories.end(0, np.array(useful, dtype=np.int32))
    most = 0
    for handle in range(1, effort(300, 3000)):
        histories.begin(handle, b"a" if handle % 3 else b"b")
        ask_once(histories, useful[:10], handle)
        histories.end(handle, np.array([rng.randrange(50_000) for _ in range(100)], dtype=np.int32))
        most = max(most, histories.stats().num_store_bytes)
    stats = histories.stats()
    assert MIN_STORE_BYTES // 2 < most <= MIN_STORE_BYTES
    assert stats.num_store_evictions > 50 and stats.num_store_answers + stats.num_store_evictions == handle + 1
    histories.begin(0, b"a")
    for _ in range(20):
        drafts = ask_once(histories, useful[:10], 0)
    assert drafts == useful[10:16], "used in every step, so it is not among the least recently used"


def test_an_answer_larger_than_the_store_is_kept_in_part():
    histories = NativeHistories(replace(LIMITS, max_store_bytes=MIN_STORE_BYTES, max_indexed_tokens=10**6))
    rng = random.Random(4)
    answer = [rng.randrange(1 << 17) for _ in range(200_000)]
    histories.begin(0, b"")
    histories.end(0, np.array(answer, dtype=np.int32))
    histories.begin(1, b"")
    assert ask_once(histories, answer[-30:-20], 1) == answer[-20:-14]
    assert histories.stats().num_store_bytes <= MIN_STORE_BYTES


@each("kind", ["one token", "all different", "two tokens"])
def test_memory_of_a_request_is_bounded_by_its_tokens_and_given_back(kind: str):
    rng, num_tokens = random.Random(5), 20_000
    choose = {"one token": lambda i: 7, "all different": lambda i: i, "two tokens": lambda i: rng.randrange(2)}[kind]
    histories, texts = NativeHistories(replace(LIMITS, max_indexed_tokens=10**6)), Texts(1, num_tokens)
    texts.extend(0, [choose(i) for i in range(num_tokens)])
    histories.propose_suffix(texts.ask([0]), 1.0, 0.1)
    assert 32 * num_tokens <= histories.stats().num_request_bytes <= 200 * num_tokens
    histories.end(0, np.empty(0, np.int32))
    assert histories.stats().num_request_bytes == 0


def test_calls_that_would_read_elsewhere_are_refused():
    histories, texts = NativeHistories(LIMITS), Texts(2)
    texts.extend(0, [1, 2, 3])
    texts.extend(1, [1, -2])
    rows = texts.ask([0])
    spoilt = (
        replace(rows, rows=np.array([2], dtype=np.int64)),
        replace(rows, rows=np.array([-1], dtype=np.int64)),
        replace(rows, num_tokens=np.array([MAX_MODEL_LEN + 1], dtype=np.int32)),
        replace(rows, num_tokens=np.array([0], dtype=np.int32)),
        replace(rows, max_tokens=np.array([-1], dtype=np.int32)),
        replace(rows, max_tokens=np.array([1 << 30], dtype=np.int32)),
        replace(rows, handles=np.array([0, 1], dtype=np.int64)),
        replace(rows, token_ids=texts.token_ids[:, ::2]),
        replace(rows, token_ids=texts.token_ids.astype(np.int64)),
        replace(rows, rows=np.array([0], dtype=np.int32)),
        texts.ask([1]),
    )
    for one in spoilt:
        with pytest.raises(ShapeError):
            histories.propose_suffix(one, 1.0, 0.1)
    for lengths in ((0, 1), (2, 1), (1, LIMITS.max_context + 1)):
        with pytest.raises(ShapeError):
            histories.propose_ngram(rows, *lengths)
    with pytest.raises(ShapeError):
        histories.propose_suffix(rows, float("nan"), 0.1)
    with pytest.raises(ShapeError):
        NativeHistories(replace(LIMITS, max_context=0))
    assert histories.propose_suffix(rows, 1.0, 0.1).counts.tolist() == [0]
