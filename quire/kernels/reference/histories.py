"""Drafts from history, searched anew in plain text each time: the readable twin of the native automata.

Called by tests, and by proposers where the native library is missing. The same drafts as the native ones, bit for bit;
only what the store's limit in bytes evicts differs, as a text takes less memory than an index.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from quire.kernels.histories import HistoryDrafts, HistoryLimits, HistoryRows, HistoryStats

STEADY = 32  # new tokens that are indexed whatever the limit
ENTRY_BYTES = 160
NO_DRAFT = 0.0


@dataclass(slots=True)
class _Answer:
    token_ids: np.ndarray
    last_used: int
    num_indexed: int = 0


@dataclass(slots=True)
class _Namespace:
    answers: dict[int, _Answer] = field(default_factory=dict)
    num_arrived: int = 0
    indexed: list[int] | None = None  # numbers in the order of indexing, the last one perhaps in part; None = no index
    waiting: list[int] = field(default_factory=list)  # the next one last
    epoch: int = 0
    num_open: int = 0  # requests that refer to it

    def texts(self) -> list[np.ndarray]:
        """What is indexed, the latest last."""
        answers = (self.answers[number] for number in self.indexed or ())
        return [answer.token_ids[: answer.num_indexed] for answer in answers]


@dataclass(slots=True)
class _Request:
    namespace: bytes | None = None
    num_tokens: int = 0  # indexed
    newest: int = -1
    match_length: int = 0  # of the end of its text in the namespace
    epoch: int = -1
    num_followed: int = 0


@dataclass(slots=True)
class _Draft:
    token_ids: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    score: float = NO_DRAFT  # expected number of tokens that stand
    match_length: int = 0


class ReferenceHistories:
    """`Histories` without an index."""

    def __init__(self, limits: HistoryLimits) -> None:
        self._limits = limits
        self._requests: dict[int, _Request] = {}
        self._namespaces: dict[bytes, _Namespace] = {}
        self._clock = self._num_evicted = self._num_indexed = 0

    # --- requests come and go ---

    def begin(self, handle: int, namespace: bytes) -> None:
        """As `Histories.begin`."""
        request = self._requests.setdefault(handle, _Request())
        if self._limits.max_store_answers and request.namespace is None:
            request.namespace = namespace
            self._namespaces.setdefault(namespace, _Namespace()).num_open += 1

    def end(self, handle: int, answer: np.ndarray) -> None:
        """As `Histories.end`."""
        request = self._requests.pop(handle, None)
        if request is None or request.namespace is None:
            return
        namespace = self._namespaces[request.namespace]
        namespace.num_open -= 1
        kept = answer[-(self._limits.max_store_bytes // 1024) :]
        if len(kept):
            self._clock += 1
            namespace.answers[namespace.num_arrived] = _Answer(kept.copy(), self._clock)
            namespace.waiting.append(namespace.num_arrived)
            namespace.num_arrived += 1
            self._evict()
        self._forget_empty()

    # --- drafts ---

    def propose_ngram(self, rows: HistoryRows, min_length: int, max_length: int) -> HistoryDrafts:
        """As `Histories.propose_ngram`."""
        drafts, left = [], self._limits.max_indexed_tokens
        for row, handle, num_tokens, most in _rows(rows):
            text = rows.token_ids[row, :num_tokens]
            left = self._catch_up(self._request(handle), text, left)
            is_complete = self._request(handle).num_tokens == num_tokens
            drafts.append(_ngram_draft(text, min_length, max_length, most) if is_complete else _Draft())
        return _join(drafts)

    def propose_suffix(self, rows: HistoryRows, max_spec_factor: float, min_token_prob: float) -> HistoryDrafts:
        """As `Histories.propose_suffix`."""
        left = self._limits.max_indexed_tokens
        for row, handle, num_tokens, _ in _rows(rows):
            left = self._catch_up(self._request(handle), rows.token_ids[row, :num_tokens], left)
        drafts, left = [], self._limits.max_indexed_tokens
        for row, handle, num_tokens, most in _rows(rows):
            best, request, text = _Draft(), self._request(handle), rows.token_ids[row, :num_tokens]
            if request.num_tokens == num_tokens:
                search = _Search(self._limits.max_context, max_spec_factor, min_token_prob, most)
                best = search.improve(best, text, min(num_tokens, self._limits.max_context), [text], is_own=True)
                if request.namespace is not None:
                    namespace = self._namespaces[request.namespace]
                    left -= self._index(namespace, left)
                    best = self._draft_from_answers(best, request, namespace, text, search)
            drafts.append(best)
        return _join(drafts)

    def _draft_from_answers(
        self, best: _Draft, request: _Request, namespace: _Namespace, text: np.ndarray, search: _Search
    ) -> _Draft:
        if namespace.indexed is None:
            return best
        texts = namespace.texts()
        self._follow(request, namespace, text, texts)
        better = search.improve(best, text, request.match_length, texts, is_own=False)
        if better is not best:
            match = text[len(text) - better.match_length :]
            latest = max(i for i, one in enumerate(texts) if len(_ends(one, match)))
            self._clock += 1
            namespace.answers[namespace.indexed[latest]].last_used = self._clock
        return better

    # --- what is indexed ---

    def _request(self, handle: int) -> _Request:
        return self._requests.setdefault(handle, _Request())

    def _catch_up(self, request: _Request, text: np.ndarray, left: int) -> int:
        """Take in what is new of a text; of more than a few tokens `left` at most. Returns what is left then."""
        known = request.num_tokens
        if known > len(text) or (known and text[known - 1] != request.newest):
            request.num_tokens = request.num_followed = 0
            request.epoch = -1
        num_new = len(text) - request.num_tokens
        if num_new > STEADY:
            num_new = min(num_new, left)
            left -= num_new
        request.num_tokens += num_new
        request.newest = int(text[request.num_tokens - 1]) if request.num_tokens else -1
        self._num_indexed += num_new
        return left

    def _follow(self, request: _Request, namespace: _Namespace, text: np.ndarray, texts: Sequence[np.ndarray]) -> None:
        """How much of the text's end occurs in the namespace: at most one token more than at the token before."""
        if request.epoch != namespace.epoch:
            request.epoch, request.match_length = namespace.epoch, 0
            request.num_followed = max(0, len(text) - self._limits.max_context)
        for end in range(request.num_followed, len(text)):
            length = min(request.match_length + 1, self._limits.max_context)
            while length and not any(len(_ends(one, text[end + 1 - length : end + 1])) for one in texts):
                length -= 1
            request.match_length = length
        request.num_followed = len(text)

    def _index(self, namespace: _Namespace, most: int) -> int:
        """Index at most so many tokens of answers that wait, the newest first; how many."""
        num_indexed = 0
        while num_indexed < most:
            latest = namespace.answers[namespace.indexed[-1]] if namespace.indexed else None
            if latest is None or latest.num_indexed == len(latest.token_ids):
                if not namespace.waiting:
                    break
                if namespace.indexed is None:
                    namespace.indexed = []
                    namespace.epoch += 1
                namespace.indexed.append(namespace.waiting.pop())
                continue
            num_new = min(most - num_indexed, len(latest.token_ids) - latest.num_indexed)
            latest.num_indexed += num_new
            num_indexed += num_new
        return num_indexed

    def _num_bytes(self) -> int:
        answers = (answer for one in self._namespaces.values() for answer in one.answers.values())
        return sum(ENTRY_BYTES + answer.token_ids.nbytes for answer in answers)

    def _num_answers(self) -> int:
        return sum(len(namespace.answers) for namespace in self._namespaces.values())

    def _evict(self) -> None:
        """Over a limit, the namespace of the least recently used answer forgets half of its tokens."""
        while self._num_answers() > self._limits.max_store_answers or self._num_bytes() > self._limits.max_store_bytes:
            by_use = [
                (answer.last_used, key) for key, one in self._namespaces.items() for answer in one.answers.values()
            ]
            self._forget_half(self._namespaces[min(by_use)[1]])
            self._forget_empty()

    def _forget_half(self, namespace: _Namespace) -> None:
        numbers = sorted(namespace.answers, key=lambda number: namespace.answers[number].last_used)
        num_tokens = sum(len(answer.token_ids) for answer in namespace.answers.values())
        num_forgotten, namespace.indexed, namespace.waiting = 0, None, []
        for number in numbers:
            namespace.answers[number].num_indexed = 0
            if 2 * num_forgotten >= num_tokens:
                namespace.waiting.append(number)
            else:
                num_forgotten += len(namespace.answers.pop(number).token_ids)
                self._num_evicted += 1

    def _forget_empty(self) -> None:
        for key in [key for key, one in self._namespaces.items() if not one.answers and not one.num_open]:
            del self._namespaces[key]

    def stats(self) -> HistoryStats:
        """As `Histories.stats`; requests take no memory of their own and lookups are not counted."""
        return HistoryStats(
            num_requests=len(self._requests),
            num_request_bytes=0,
            num_indexed_tokens=self._num_indexed,
            num_lookups=0,
            num_store_bytes=self._num_bytes(),
            num_store_answers=self._num_answers(),
            num_store_evictions=self._num_evicted,
            num_store_namespaces=len(self._namespaces),
        )


@dataclass(frozen=True, slots=True)
class _Search:
    """Drafts by frequency, of one row."""

    max_context: int
    max_spec_factor: float
    min_token_prob: float
    most: int

    def improve(
        self, best: _Draft, text: np.ndarray, longest: int, texts: Sequence[np.ndarray], *, is_own: bool
    ) -> _Draft:
        """A better draft than `best` for the end of `text`, if any of its suffixes up to `longest` has one."""
        for length in range(longest, 0, -1):
            allowed = int(min(self.most, length * self.max_spec_factor + 1e-6))
            if allowed <= best.score:  # a token adds at most 1, and shorter suffixes are allowed fewer
                break
            draft = self._walk(text[len(text) - length :].tolist(), allowed, texts, is_own=is_own)
            if draft.score > best.score:
                best = draft
                best.match_length = length
        return best

    def _walk(self, context: list[int], allowed: int, texts: Sequence[np.ndarray], *, is_own: bool) -> _Draft:
        draft, chance = _Draft(), 1.0
        for _ in range(allowed):
            found = _most_frequent(texts, np.array(context[-self.max_context :], dtype=np.int32), is_own=is_own)
            if found is None:
                break
            token_id, share = found
            chance *= share
            if chance < self.min_token_prob:
                break
            draft.token_ids.append(token_id)
            draft.scores.append(share)
            draft.score += chance
            context = [*context, token_id]
        return draft


def _most_frequent(texts: Sequence[np.ndarray], context: np.ndarray, *, is_own: bool) -> tuple[int, float] | None:
    """The token that follows `context` most often, of equals the latest; its share of all occurrences.

    Where a request's own text ends it has not been continued yet; where an answer ends it was not.
    """
    following: list[int] = []
    num_ends = 0
    for text in texts:
        ends = _ends(text, context)
        following += text[ends[ends + 1 < len(text)] + 1].tolist()
        num_ends += len(ends)
    if not following:
        return None
    latest = {token_id: i for i, token_id in enumerate(following)}
    counts = {token_id: following.count(token_id) for token_id in latest}
    token_id = max(counts, key=lambda one: (counts[one], latest[one]))
    return token_id, counts[token_id] / (len(following) if is_own else num_ends)


def _ends(text: np.ndarray, context: np.ndarray) -> np.ndarray:
    """Places in `text` where `context` ends."""
    ends = np.arange(len(context) - 1, len(text))
    for back in range(len(context)):
        ends = ends[text[ends - back] == context[-1 - back]]
    return ends


def _ngram_draft(text: np.ndarray, min_length: int, max_length: int, most: int) -> _Draft:
    for length in range(min(max_length, len(text) - 1), min_length - 1, -1):
        first = int(_ends(text, text[len(text) - length :])[0])
        if first < len(text) - 1:
            token_ids = text[first + 1 :][:most].tolist()
            scores = [(length + i + 1) / (length + i + 2) for i in range(len(token_ids))]
            return _Draft(token_ids, scores, match_length=length)
    return _Draft()


def _rows(rows: HistoryRows) -> list[tuple[int, int, int, int]]:
    columns = (rows.rows, rows.handles, rows.num_tokens, rows.max_tokens)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def _join(drafts: Sequence[_Draft]) -> HistoryDrafts:
    return HistoryDrafts(
        np.array([len(draft.token_ids) for draft in drafts], dtype=np.int32),
        np.array([token_id for draft in drafts for token_id in draft.token_ids], dtype=np.int32),
        np.array([score for draft in drafts for score in draft.scores], dtype=np.float32),
        np.array([draft.match_length for draft in drafts], dtype=np.int32),
    )
