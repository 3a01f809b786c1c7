"""GrammarManager: the grammars of the requests in an engine core.

Owned by `EngineCore`. Owns the grammar of every structured request from arrival to end, and the cache of compiled
ones. A request waits, while its grammar is made, outside of any step. When a step is taken in, its tokens advance the
grammars on threads of their own, and a row whose grammar is not through sits out the next steps; masks are filled by
`MaskFiller`, beside the model. A grammar that is expensive to follow gets a process of its own. A core that replaces
one that died gets the tokens that are out already, and takes the grammar through them.

A request with the regex `ya?` from arrival to end:

    add(message)            # a process compiles the grammar; the request waits at the scheduler's gate
    is_ready(7)             # False, then True: the scheduler admits it
    begin_masks(handles)    # while the model runs: only tokens that begin with "y" are allowed
    note(outputs)           # "y" was sampled: the grammar advances, on a thread
    begin_masks(handles)    # "a" or the end of the sequence
    note(outputs)           # the request has ended: its grammar is dropped, the compiled one stays in the cache
"""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue

import numpy as np

from quire.core.engine_messages import EngineCoreOutputs, EngineCoreRequest
from quire.core.grammar_bitmask import GrammarBitmask
from quire.core.scheduler_output import DraftTokens
from quire.errors import EngineGenerateError, QuireError, UnsupportedError
from quire.structured_output.answer import Answer
from quire.structured_output.answer_steps import advance, begin
from quire.structured_output.compile.cache import Asker, GrammarCache
from quire.structured_output.compile.pool import CompilePool
from quire.structured_output.crew import Crew
from quire.structured_output.follow_messages import FollowReply, FollowStart
from quire.structured_output.followers import Followers
from quire.structured_output.interface import GrammarError
from quire.structured_output.mask_filler import MaskFiller, Span, too_complex
from quire.structured_output.reasoning_state import ReasoningMasks
from quire.structured_output.restrictions import Restrictions
from quire.structured_output.spec import spec_of

WAIT_S = 0.002


@dataclass(slots=True, eq=False)
class _Advanced:
    """An answer was taken through tokens, or a process that follows it has replied.

    Attributes:
        cpu_s: CPU time of this engine's own thread.
    """

    answer: Answer
    cpu_s: float = 0.0
    error: QuireError | None = None


class GrammarManager:
    """Keeps grammars.

    Args:
        make_pool: makes what compiles them, given the id that ends an answer; called for the first grammar.
        cache_bytes: compiled grammars are kept up to so many bytes.

    Attributes:
        followed: handles of the requests whose grammars have processes of their own, which see no drafts.
    """

    def __init__(self, make_pool: Callable[[int], CompilePool], cache_bytes: int = 256 << 20) -> None:
        self.followed: set[int] = set()
        self._make_pool = make_pool
        self._pool: CompilePool | None = None
        self._cache_bytes = cache_bytes
        self._cache: GrammarCache | None = None
        self._answers: dict[int, Answer] = {}
        self._waiting: set[int] = set()
        self._failures: dict[int, QuireError] = {}
        self._filler: MaskFiller | None = None
        self._crew = Crew()
        self._followers: Followers | None = None
        self._busy: set[int] = set()
        self._advanced: SimpleQueue[_Advanced] = SimpleQueue()
        self._has_news = threading.Event()
        self._reasoning_masks: ReasoningMasks | None = None

    @property
    def cached_bytes(self) -> int:
        """Of the compiled grammars that are kept."""
        return 0 if self._cache is None else self._cache.num_bytes

    # --- requests come and go ---

    def add(self, message: EngineCoreRequest) -> None:
        """Begin to make the grammar of a request that has one, or a budget of reasoning."""
        params = message.sampling_params
        if params.structured_outputs is None and params.thinking_token_budget is None:
            return
        if self._pool is None or self._cache is None:
            self._pool = self._make_pool(message.eos_token_id)
            self._cache = GrammarCache(self._pool, self._cache_bytes)
        if params.structured_outputs is None:
            compiled = self._pool.free_text(message.tenant)
        else:
            asker = Asker(message.tenant, message.cache_salt or "")
            compiled = self._cache.get(spec_of(params.structured_outputs), asker)
        self._answers[message.handle] = Answer(message, compiled)
        self._waiting.add(message.handle)

    def is_ready(self, handle: int) -> bool:
        """Whether a request may run: it has no grammar, or its grammar is made and through all tokens."""
        if handle not in self._waiting:
            return handle not in self._failures and handle not in self._busy
        answer = self._answers[handle]
        if not answer.compiled.done():
            return False
        self._waiting.discard(handle)
        try:
            self._begin(answer)
        except QuireError as error:
            params = answer.message.sampling_params.structured_outputs
            named = None if params is None or error.field is None else params.field
            self._failures[handle] = type(error)(error.message, hint=error.hint, field=named)
        return handle not in self._failures and handle not in self._busy

    def settle(self) -> set[int]:
        """Handles of the requests that sit out the next step, as their grammars are not through their tokens yet."""
        if self._busy:
            self._crew.settle()
            self._collect()
        return self._busy

    def take_failures(self) -> dict[int, QuireError]:
        """Handle -> what is wrong with its grammar, for requests that are to be ended."""
        for handle in list(self._waiting):
            self.is_ready(handle)
        self._collect()
        failures, self._failures = self._failures, {}
        return failures

    def wait(self) -> None:
        """Wait a little for a grammar, when nothing else can be done."""
        if self._busy:
            self._has_news.wait(WAIT_S)
            self._has_news.clear()
        elif self._waiting:
            pending = [self._answers[handle].compiled for handle in self._waiting]
            concurrent.futures.wait(pending, WAIT_S, concurrent.futures.FIRST_COMPLETED)

    def shutdown(self) -> None:
        """End the workers; harmless when repeated."""
        self._crew.close()
        if self._followers is not None:
            self._followers.close()
        if self._pool is not None:
            self._pool.close()
        if self._filler is not None:
            self._filler.close()
            self._filler = None

    def _leave(self, answer: Answer) -> None:
        """A grammar that no other request waits for is not compiled, nor followed."""
        if answer.follower is not None:
            answer.follower.close()
        if answer.compiled.done() or self._cache is None:
            return
        if all(other.compiled is not answer.compiled for other in self._answers.values()):
            self._cache.forget(answer.compiled)

    def _begin(self, answer: Answer) -> None:
        compiled, _ = answer.compiled.result()
        assert self._pool is not None, "a request with a grammar was added"
        message, pieces = answer.message, self._pool.vocabulary.pieces
        self._filler = self._filler or MaskFiller(self._pool.vocabulary, self._fail)
        stop_ids = message.sampling_params.stop_token_ids or ()
        answer.end_ids = tuple(one for one in stop_ids if not pieces[one] and one != message.eos_token_id)
        answer.restrictions = Restrictions.of(message.sampling_params, message.eos_token_id, len(pieces))
        if message.output_token_ids is not None:
            answer.output = message.output_token_ids.tolist()
        if compiled.is_expensive:
            self._follow(answer)
            return
        if message.sampling_params.reasoning is not None and self._reasoning_masks is None:
            self._reasoning_masks = ReasoningMasks(self._pool.vocabulary)
        answer.grammar = begin(compiled, _start_of(answer), self._pool.vocabulary, self._reasoning_masks)
        if answer.output:
            self._advance([(answer, answer.output.copy())])
        elif answer.restrictions is not None and not answer.is_free:
            self._filler.fill([Span(0, answer)])  # fails the request when no first token is left

    # --- through tokens ---

    def _advance(self, steps: list[tuple[Answer, list[int]]]) -> None:
        """Take grammars through tokens, beside the engine's loop; what was less expensive so far comes first."""
        self._busy.update(answer.message.handle for answer, _ in steps)
        steps.sort(key=lambda step: step[0].mean_s)
        self._crew.put([partial(self._advance_one, answer, token_ids) for answer, token_ids in steps])

    def _advance_one(self, answer: Answer, token_ids: list[int]) -> None:
        """On a thread of the crew."""
        done, start_s = _Advanced(answer), time.thread_time()
        try:
            assert answer.grammar is not None, "only requests whose grammar is made run"
            for token_id in token_ids:
                if not advance(answer.grammar, token_id, answer.message.eos_token_id, answer.end_ids):
                    done.error = _refused(token_id)
                    break
        except Exception as error:  # a library's limits show themselves in many classes
            done.error = too_complex(answer, error)
        done.cpu_s = time.thread_time() - start_s
        self._report(done)

    def _follow(self, answer: Answer) -> None:
        """Leave a grammar to a process of its own, from the tokens on that the answer has."""
        assert self._pool is not None, "a request with a grammar was added"
        self._followers = self._followers or Followers(self._pool.setup)
        self._busy.add(answer.message.handle)
        self.followed.add(answer.message.handle)
        answer.grammar = None
        answer.follower = self._followers.begin(
            _start_of(answer), answer.message.tenant, lambda reply: self._report(_replied(answer, reply))
        )

    def _fail(self, answer: Answer, error: QuireError) -> None:
        """On any thread: a request is to be ended."""
        self._failures[answer.message.handle] = error

    def _report(self, advanced: _Advanced) -> None:
        """On any thread: something can go on."""
        self._advanced.put(advanced)
        if not self._has_news.is_set():
            self._has_news.set()

    def _collect(self) -> None:
        """Take in what the threads have done."""
        while not self._advanced.empty():
            done = self._advanced.get()
            answer, handle = done.answer, done.answer.message.handle
            if self._answers.get(handle) is not answer:
                continue
            self._busy.discard(handle)
            if done.error is not None:
                self._failures[handle] = done.error
            elif answer.follower is None and answer.is_expensive(done.cpu_s) and not answer.is_free:
                answer.compiled.result()[0].is_expensive = True
                self._follow(answer)

    # --- steps ---

    def begin_masks(
        self, sampling_handles: Callable[[], np.ndarray], drafts: DraftTokens | None = None
    ) -> Future[GrammarBitmask] | None:
        """Fill the masks of a step on a thread of their own; None when no request of the step has a grammar.

        Args:
            sampling_handles: gives [num_sampling] int64, the requests that get a token in this step.
            drafts: tokens that they may get, with counts per request; None = no request has any.
        """
        if not self._answers:
            return None
        handles = sampling_handles()
        positions = np.flatnonzero(np.isin(handles, list(self._answers))).tolist()
        if drafts is None:
            spans = [Span(position, self._answers[int(handles[position])]) for position in positions]
        else:
            ends = np.cumsum(drafts.counts)
            spans = [
                Span(
                    position + int(ends[position] - drafts.counts[position]),
                    self._answers[int(handles[position])],
                    drafts.token_ids[ends[position] - drafts.counts[position] : ends[position]].tolist(),
                )
                for position in positions
            ]
        spans = [span for span in spans if span.drafts or not span.answer.is_free]
        if not spans:
            return None
        assert self._filler is not None, "only requests whose grammar is made run"
        return self._filler.submit(spans)

    def note(self, outputs: EngineCoreOutputs) -> None:
        """Take in a step: tokens advance their grammars, ended requests leave."""
        if not self._answers:
            return
        for one in outputs.finished:
            answer = self._answers.pop(one.handle, None)
            if answer is not None:
                self._leave(answer)
            self._waiting.discard(one.handle)
            self._busy.discard(one.handle)
            self.followed.discard(one.handle)
            self._failures.pop(one.handle, None)
        if not len(outputs.handles):
            return
        lines = np.flatnonzero(np.isin(outputs.handles, list(self._answers)))
        handles, token_ids = outputs.handles[lines].tolist(), outputs.new_token_ids[lines].tolist()
        steps: dict[int, list[int]] = {}
        for handle, token_id in zip(handles, token_ids, strict=True):
            answer = self._answers[handle]
            answer.output.append(token_id)
            if answer.follower is None:
                steps.setdefault(handle, []).append(token_id)
            else:
                self._busy.add(handle)
                answer.follower.push(token_id)
        if steps:
            self._advance([(self._answers[handle], new_ids) for handle, new_ids in steps.items()])


def _refused(token_id: int) -> QuireError:
    return EngineGenerateError(f"token {token_id} was sampled against its grammar")


def _replied(answer: Answer, reply: FollowReply) -> _Advanced:
    if reply.error is not None:
        return _Advanced(answer, error=too_complex(answer, GrammarError(reply.error)))
    return _Advanced(answer, error=None if reply.refused_id is None else _refused(reply.refused_id))


def _start_of(answer: Answer) -> FollowStart:
    params = answer.message.sampling_params
    form = params.structured_outputs
    return FollowStart(
        spec=None if form is None else answer.compiled.result()[0].spec or spec_of(form),
        reasoning=params.reasoning,
        shows_special=not params.skip_special_tokens,
        budget=params.thinking_token_budget,
        end_ids=answer.end_ids,
        token_ids=answer.output,
    )


def no_pool(eos_token_id: int) -> CompilePool:
    """For an engine core that has no means to make grammars."""
    raise UnsupportedError("structured_outputs needs a tokenizer", field="structured_outputs")
