"""GrammarManager: the grammars of the requests in an engine core.

Owned by `EngineCore`. Owns the grammar of every structured request from arrival to end, and the cache of compiled
ones. A request waits, while its grammar is made, outside of any step; a step's masks are filled on a thread beside the
model; tokens advance a grammar when the step is taken in. A core that replaces one that died gets the tokens that are
out already, and takes the grammar through them.
"""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from quire.core.engine_messages import EngineCoreOutputs, EngineCoreRequest
from quire.core.grammar_bitmask import GrammarBitmask
from quire.errors import EngineGenerateError, QuireError, UnsupportedError, ValidationError
from quire.logger import get_logger
from quire.structured_output.compile_pool import CompilePool, Made
from quire.structured_output.delayed import DelayedGrammar
from quire.structured_output.grammar_cache import Asker, GrammarCache
from quire.structured_output.interface import CompiledGrammar, Grammar, GrammarError, Vocabulary
from quire.structured_output.restrictions import Restrictions, no_token_left
from quire.structured_output.spec import spec_of
from quire.structured_output.thinking import Thinking, ThinkingMasks

WAIT_S = 0.002

logger = get_logger(__name__)


@dataclass(slots=True, eq=False)
class _Answer:
    """One structured request.

    Attributes:
        compiled: its grammar, made or in the making.
        grammar: where the answer stands; None until the grammar is made.
        end_ids: ids that end the answer besides the primary one.
        restrictions: what else the request forbids; None = nothing.
        output: the tokens so far, kept where there are restrictions.
    """

    message: EngineCoreRequest
    compiled: Future[Made]
    grammar: Grammar | None = None
    end_ids: tuple[int, ...] = ()
    restrictions: Restrictions | None = None
    output: list[int] = field(default_factory=list)

    @property
    def is_free(self) -> bool:
        """Any token may come next."""
        return self.grammar is not None and self.grammar.is_free


class GrammarManager:
    """Keeps grammars.

    Args:
        make_pool: makes what compiles them, given the id that ends an answer; called for the first grammar.
        cache_bytes: compiled grammars are kept up to so many bytes.
    """

    def __init__(self, make_pool: Callable[[int], CompilePool], cache_bytes: int = 256 << 20) -> None:
        self._make_pool = make_pool
        self._pool: CompilePool | None = None
        self._cache_bytes = cache_bytes
        self._cache: GrammarCache | None = None
        self._answers: dict[int, _Answer] = {}
        self._waiting: set[int] = set()
        self._failures: dict[int, QuireError] = {}
        self._mask_thread: ThreadPoolExecutor | None = None
        self._thinking_masks: ThinkingMasks | None = None
        self._last_word = -1

    # --- requests come and go ---

    def add(self, message: EngineCoreRequest) -> None:
        """Begin to make the grammar of a request that has one, or a budget of thinking."""
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
        self._answers[message.handle] = _Answer(message, compiled)
        self._waiting.add(message.handle)

    def is_ready(self, handle: int) -> bool:
        """Whether a request may run: it has no grammar, or its grammar is made."""
        if handle not in self._waiting:
            return handle not in self._failures
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
        return handle not in self._failures

    def take_failures(self) -> dict[int, QuireError]:
        """Handle -> what is wrong with its grammar, for requests that are to be ended."""
        if self._waiting:
            for handle in list(self._waiting):
                self.is_ready(handle)
        failures, self._failures = self._failures, {}
        return failures

    def wait(self) -> None:
        """Wait a little for a grammar, when nothing else can be done."""
        if self._waiting:
            pending = [self._answers[handle].compiled for handle in self._waiting]
            concurrent.futures.wait(pending, WAIT_S, concurrent.futures.FIRST_COMPLETED)

    def shutdown(self) -> None:
        """End the workers; harmless when repeated."""
        if self._pool is not None:
            self._pool.close()
        if self._mask_thread is not None:
            self._mask_thread.shutdown(wait=True)
            self._mask_thread = None

    def _leave(self, answer: _Answer) -> None:
        """A grammar that nobody else waits for is not compiled."""
        if self._cache is not None and all(other.compiled is not answer.compiled for other in self._answers.values()):
            self._cache.forget(answer.compiled)

    def _begin(self, answer: _Answer) -> None:
        compiled, _ = answer.compiled.result()
        assert self._pool is not None, "a request with a grammar was added"
        message, pieces = answer.message, self._pool.vocabulary.pieces
        self._last_word = _last_word(self._pool.vocabulary)
        stop_ids = message.sampling_params.stop_token_ids or ()
        answer.end_ids = tuple(one for one in stop_ids if not pieces[one] and one != message.eos_token_id)
        grammar = self._started(answer, compiled)
        answer.restrictions = Restrictions.of(message.sampling_params, message.eos_token_id, len(pieces))
        if message.output_token_ids is not None:
            answer.output = message.output_token_ids.tolist()
            for token_id in answer.output:
                if not _advance(grammar, token_id, answer):
                    raise EngineGenerateError(f"the grammar of request {message.request_id} refuses its own output")
        answer.grammar = grammar
        if answer.restrictions is not None and not answer.is_free:
            line = np.empty((1, self._pool.vocabulary.bitmask_size), dtype=np.int32)
            self._fill_line(answer, line, 0)  # fails the request when no first token is left

    def _started(self, answer: _Answer, compiled: CompiledGrammar) -> Grammar:
        """The place of a new answer, which may think before its grammar begins."""
        assert self._pool is not None, "a request with a grammar was added"
        params, vocabulary = answer.message.sampling_params, self._pool.vocabulary
        if params.thinking is None:
            return compiled.start()
        if self._thinking_masks is None:
            self._thinking_masks = ThinkingMasks(vocabulary)
        thinking = Thinking(
            params.thinking, vocabulary, shows_special=not params.skip_special_tokens,
            budget=params.thinking_token_budget,
        )  # fmt: skip
        end_ids = (answer.message.eos_token_id, *answer.end_ids)
        return DelayedGrammar(compiled, thinking, self._thinking_masks, end_ids)

    # --- steps ---

    def begin_masks(self, sampling_handles: Callable[[], np.ndarray]) -> Future[GrammarBitmask] | None:
        """Fill the masks of a step on a thread of their own; None when no request of the step has a grammar.

        Args:
            sampling_handles: gives [num_sampled] int64, the requests that get a token in this step.
        """
        if not self._answers:
            return None
        handles = sampling_handles()
        lines = np.flatnonzero(np.isin(handles, list(self._answers)))
        if not len(lines):
            return None
        answers = [self._answers[handle] for handle in handles[lines].tolist()]
        bound = [index for index, answer in enumerate(answers) if not answer.is_free]
        if len(bound) < len(answers):
            if not bound:
                return None
            lines, answers = lines[bound], [answers[index] for index in bound]
        if self._mask_thread is None:
            self._mask_thread = ThreadPoolExecutor(1, "grammar masks")
        return self._mask_thread.submit(self._fill, lines.astype(np.int32), answers)

    def note(self, outputs: EngineCoreOutputs) -> None:
        """Take in a step: tokens advance their grammars, ended requests leave."""
        if not self._answers:
            return
        for one in outputs.finished:
            answer = self._answers.pop(one.handle, None)
            if answer is not None and not answer.compiled.done():
                self._leave(answer)
            self._waiting.discard(one.handle)
            self._failures.pop(one.handle, None)
        if not len(outputs.handles):
            return
        lines = np.flatnonzero(np.isin(outputs.handles, list(self._answers)))
        handles, token_ids = outputs.handles[lines].tolist(), outputs.new_token_ids[lines].tolist()
        for handle, token_id in zip(handles, token_ids, strict=True):
            answer = self._answers[handle]
            assert answer.grammar is not None, "only requests whose grammar is made run"
            if answer.restrictions is not None:
                answer.output.append(token_id)
            if not _advance(answer.grammar, token_id, answer):
                self._failures[handle] = EngineGenerateError(f"token {token_id} was sampled against its grammar")

    def _try_fill(self, answer: _Answer, grammar: Grammar, bitmask: np.ndarray, row: int) -> bool:
        """Fill a line; False, with nothing allowed and the request on its way out, when the library gives up."""
        try:
            grammar.fill_bitmask(bitmask, row)
            bitmask[row, -1] &= self._last_word
            if not bitmask[row].any():
                raise GrammarError("no token of the vocabulary comes next")
        except Exception as error:  # a library's limits show themselves in many classes; the step must go on
            logger.warning("request %s: %s: %s", answer.message.request_id, type(error).__name__, str(error)[:200])
            bitmask[row] = 0
            self._failures[answer.message.handle] = _too_complex(answer, error)
            return False
        return True

    def _fill(self, lines: np.ndarray, answers: list[_Answer]) -> GrammarBitmask:
        assert self._pool is not None, "a request with a grammar was added"
        bitmask = np.empty((len(lines), self._pool.vocabulary.bitmask_size), dtype=np.int32)
        for row, answer in enumerate(answers):
            self._fill_line(answer, bitmask, row)
        return GrammarBitmask(lines, bitmask)

    def _fill_line(self, answer: _Answer, bitmask: np.ndarray, row: int) -> None:
        """What an answer may go on with; when nothing is left, the request is on its way out."""
        assert self._pool is not None, "a request with a grammar was added"
        assert answer.grammar is not None, "only requests whose grammar is made run"
        eos_token_id = self._pool.vocabulary.eos_token_id
        if answer.grammar.is_terminated():  # only with ignore_eos: it ends again and again
            bitmask[row] = 0
            _set_bit(bitmask[row], eos_token_id)
        elif not self._try_fill(answer, answer.grammar, bitmask, row):
            return
        if answer.end_ids and _has_bit(bitmask[row], eos_token_id):
            for token_id in answer.end_ids:
                _set_bit(bitmask[row], token_id)
        if answer.restrictions is None:
            return
        blamed = answer.restrictions.conflict(bitmask[row], answer.output)
        if blamed is not None:
            bitmask[row] = -1  # the token of this step is not taken
            self._failures[answer.message.handle] = no_token_left(blamed, len(answer.output))


def _too_complex(answer: _Answer, error: Exception) -> QuireError:
    params = answer.message.sampling_params.structured_outputs
    assert params is not None, "only requests with a grammar have masks"
    return ValidationError(
        f"the grammar cannot be followed further by {params.backend}: {str(error)[:200]}",
        hint="make it simpler", field=params.field,
    )  # fmt: skip


def no_pool(eos_token_id: int) -> CompilePool:
    """For an engine core that has no means to make grammars."""
    raise UnsupportedError("structured_outputs needs a tokenizer", field="structured_outputs")


def _advance(grammar: Grammar, token_id: int, answer: _Answer) -> bool:
    """Take the grammar through a token; whatever ends an answer is to it the primary end."""
    if token_id in answer.end_ids:
        token_id = answer.message.eos_token_id
    if grammar.is_terminated():
        return token_id == answer.message.eos_token_id
    return grammar.accept(token_id)


def _last_word(vocabulary: Vocabulary) -> int:
    """The last word of a mask that allows every id; libraries leave anything in the bits beyond."""
    is_inside = np.arange(32) <= (vocabulary.vocab_size - 1) % 32
    return int(np.packbits(is_inside, bitorder="little").view(np.int32)[0])


def _has_bit(words: np.ndarray, token_id: int) -> bool:
    return bool(int(words[token_id >> 5]) >> (token_id & 31) & 1)


def _set_bit(words: np.ndarray, token_id: int) -> None:
    words.view(np.uint32)[token_id >> 5] |= np.uint32(1 << (token_id & 31))
