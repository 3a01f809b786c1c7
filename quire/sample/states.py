"""SamplingStates: how the request on each row wants its tokens chosen.

Owned by the worker, filled when a request is placed on a row, read by the sampler. Plain numbers are columns by
row; rarer needs live in processors that keep state for the rows that ask for it. Each row carries a flag per need,
so a step of greedy rows costs one gather of flags and an argmax.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from enum import IntFlag
from typing import TypeVar

import numpy as np
import torch

from quire.core.sampling_params import SamplingParams
from quire.errors import QuireError
from quire.sample.bad_words import BadWords
from quire.sample.logits_processor import LogitsProcessor, ProcessorKind, RowRequest, processor_failure
from quire.sample.penalties import ApplyPenalties, Penalties, apply_penalties_inplace
from quire.sample.ragged import take_lines, to_device
from quire.sample.sparse_processor import SparseProcessor
from quire.sample.token_masks import AllowedTokenIds, LogitBias, MinTokens

_SEED_MASK = (1 << 64) - 1
_FIRST_PROCESSOR_BIT = 8
_T = TypeVar("_T")


class FeatureFlag(IntFlag):
    """What a row's sampling needs beyond an argmax. Processors have the bits from 8 up, in order."""

    RANDOM = 1
    TOP_K = 2
    TOP_P = 4
    MIN_P = 8
    LOGPROBS = 16


class SamplingStates:
    """Sampling parameters of the requests on rows.

    Args:
        max_num_seqs: number of rows.
        vocab_size: width of the logits.
        device: where the logits are.
        custom_processors: classes of the engine's own processors, applied in this order.
        apply_penalties: the device's operation for penalties.

    Attributes:
        flags: [max_num_seqs] int64; `FeatureFlag` and processor bits; 0 on free rows.
        temperature: [max_num_seqs] float32; 0 on greedy rows.
        top_k: int32, 0 where it does nothing; top_p: float64; log_min_p: float32; valid on random rows.
        num_logprobs: int64; top tokens wanted besides the sampled one; valid where LOGPROBS is set.
        seeds: uint64.
        logprob_token_ids: row -> [k] int32, the tokens whose log-probabilities are wanted; `num_logprobs` is 0 there.
    """

    def __init__(
        self,
        max_num_seqs: int,
        vocab_size: int,
        device: torch.device,
        custom_processors: Sequence[type[ProcessorKind]] = (),
        apply_penalties: ApplyPenalties = apply_penalties_inplace,
    ) -> None:
        self.vocab_size = vocab_size
        self.flags = np.zeros(max_num_seqs, dtype=np.int64)
        self.temperature = np.zeros(max_num_seqs, dtype=np.float32)
        self.top_k = np.zeros(max_num_seqs, dtype=np.int32)
        self.top_p = np.ones(max_num_seqs, dtype=np.float64)
        self.log_min_p = np.zeros(max_num_seqs, dtype=np.float32)
        self.num_logprobs = np.zeros(max_num_seqs, dtype=np.int64)
        self.seeds = np.zeros(max_num_seqs, dtype=np.uint64)
        self.logprob_token_ids: dict[int, np.ndarray] = {}
        # Of rows with processors: parameters, prompt length, end of sequence.
        self._placed: dict[int, tuple[SamplingParams, int, int]] = {}
        custom = [processor.create(vocab_size, max_num_seqs, device) for processor in custom_processors]
        early = [kind(vocab_size, max_num_seqs, device) for kind in (AllowedTokenIds, BadWords, MinTokens, LogitBias)]
        late = [Penalties(vocab_size, max_num_seqs, device, apply_penalties)]
        changing = [processor for processor in custom if not processor.is_argmax_invariant()]
        keeping = [processor for processor in custom if processor.is_argmax_invariant()]
        self._processors: list[LogitsProcessor] = [*early, *changing, *late, *keeping]
        self._num_argmax_changing = len(self._processors) - len(keeping)
        self._argmax_invariant_bits = sum(bit for bit, _ in self._numbered(self._num_argmax_changing))

    def add_row(
        self,
        row: int,
        params: SamplingParams,
        token_ids: np.ndarray,
        num_prompt_tokens: int,
        seed: int,
        eos_token_id: int = -1,
    ) -> None:
        """Place a request on `row`, which is free.

        Args:
            token_ids: [num_tokens] int32; the prompt, then the output so far.
            seed: 64-bit key of its random numbers, of either sign.
            eos_token_id: -1 = none.

        Raises:
            EngineGenerateError: a custom processor raised; the row stays free.
        """
        self.flags[row] = 0
        self._write_columns(row, params, seed)
        flags = self._flags_of(params) | self._add_to_processors(
            row, params, token_ids, num_prompt_tokens, eos_token_id
        )
        self.flags[row] = flags
        if self.has_processor(flags):
            self._placed[row] = params, num_prompt_tokens, eos_token_id

    def remove_row(self, row: int) -> None:
        """The request on `row` is gone; a free row is left as it is."""
        flags = int(self.flags[row])
        self.flags[row] = 0
        self.logprob_token_ids.pop(row, None)
        self._placed.pop(row, None)
        for bit, processor in self._numbered(0):
            if flags & bit:
                processor.remove_row(row)

    def follows_tokens(self, rows: np.ndarray) -> np.ndarray:
        """Which of [n] rows have processors, which know the row's tokens; [n] bool."""
        found: np.ndarray = self.flags[rows] >> _FIRST_PROCESSOR_BIT != 0
        return found

    def rewind(self, row: int, token_ids: np.ndarray) -> None:
        """The tokens of `row`, which follows them, are `token_ids` [num_tokens]: fewer than it was given.

        Cost: that of placing the request anew.
        """
        params, num_prompt_tokens, eos_token_id = self._placed[row]
        for bit, processor in self._numbered(0):
            if int(self.flags[row]) & bit:
                processor.remove_row(row)
        plain = int(self.flags[row]) & ((1 << _FIRST_PROCESSOR_BIT) - 1)
        self.flags[row] = plain
        self.flags[row] = plain | self._add_to_processors(row, params, token_ids, num_prompt_tokens, eos_token_id)

    def append(self, rows: np.ndarray, token_ids: np.ndarray) -> None:
        """Tokens were sampled: [n] int32 distinct rows and their ids. Costs nothing for rows without processors."""
        flags = self.flags[rows]
        for bit, processor in self._used(flags, 0, len(self._processors)):
            lines = np.flatnonzero(flags & bit)
            self._guarded(processor, "append", lambda p=processor, i=lines: p.append(rows[i], token_ids[i]))  # type: ignore[misc]

    def apply_argmax_changing(self, logits: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
        """Masks, biases, custom processors and penalties, in that order; `logits` [n, vocab_size] may be changed."""
        return self._apply(logits, rows, 0, self._num_argmax_changing)

    def apply_argmax_invariant(self, logits: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
        """Custom processors that only matter to random draws; `logits` [n, vocab_size] may be changed."""
        return self._apply(logits, rows, self._num_argmax_changing, len(self._processors))

    @staticmethod
    def has_processor(needs: int) -> bool:
        """Whether the bits of some rows' flags name a processor."""
        return needs >> _FIRST_PROCESSOR_BIT != 0

    def has_argmax_invariant(self, flags: np.ndarray) -> np.ndarray:
        """Which of [n] `flags` name a custom processor that `apply_argmax_invariant` would run; [n] bool."""
        found: np.ndarray = (flags & self._argmax_invariant_bits) != 0
        return found

    def _write_columns(self, row: int, params: SamplingParams, seed: int) -> None:
        self.temperature[row] = 0.0 if params.is_greedy else params.temperature
        self.top_k[row] = params.top_k if 0 < params.top_k < self.vocab_size else 0
        self.top_p[row] = params.top_p
        self.log_min_p[row] = math.log(params.min_p) if params.min_p > 0 else -math.inf
        self.num_logprobs[row] = (
            self.vocab_size if params.logprobs == -1 else min(params.logprobs or 0, self.vocab_size)
        )
        self.logprob_token_ids.pop(row, None)
        if params.logprob_token_ids is not None:
            self.num_logprobs[row] = 0
            self.logprob_token_ids[row] = np.asarray(params.logprob_token_ids, dtype=np.int32)
        self.seeds[row] = seed & _SEED_MASK

    def _flags_of(self, params: SamplingParams) -> int:
        flags = FeatureFlag(0)
        if params.logprobs is not None:
            flags |= FeatureFlag.LOGPROBS
        if params.is_greedy:
            return flags
        flags |= FeatureFlag.RANDOM
        if 0 < params.top_k < self.vocab_size:
            flags |= FeatureFlag.TOP_K
        if params.top_p < 1.0:
            flags |= FeatureFlag.TOP_P
        if params.min_p > 0.0:
            flags |= FeatureFlag.MIN_P
        return flags

    def _add_to_processors(
        self, row: int, params: SamplingParams, token_ids: np.ndarray, num_prompt_tokens: int, eos_token_id: int
    ) -> int:
        """The bits of the processors that act on the request."""
        request = RowRequest(
            params=params,
            prompt_token_ids=token_ids[:num_prompt_tokens],
            output_token_ids=token_ids[num_prompt_tokens:],
            eos_token_id=eos_token_id,
        )
        bits = 0
        for bit, processor in self._numbered(0):
            if self._guarded(processor, "add_row", lambda p=processor: p.add_row(row, request)):  # type: ignore[misc]
                bits |= bit
        return bits

    def _numbered(self, start: int, stop: int | None = None) -> Iterator[tuple[int, LogitsProcessor]]:
        """(flag bit, processor) of a range of processors, to the last when `stop` is None."""
        for number in range(start, len(self._processors) if stop is None else stop):
            yield 1 << (_FIRST_PROCESSOR_BIT + number), self._processors[number]

    def _used(self, flags: np.ndarray, start: int, stop: int) -> Iterator[tuple[int, LogitsProcessor]]:
        """(flag bit, processor) of those that some of `flags` name."""
        needs = int(np.bitwise_or.reduce(flags, initial=0))
        if needs >> (_FIRST_PROCESSOR_BIT + start):
            yield from ((bit, processor) for bit, processor in self._numbered(start, stop) if needs & bit)

    def _apply(self, logits: torch.Tensor, rows: np.ndarray, start: int, stop: int) -> torch.Tensor:
        flags = self.flags[rows]
        for bit, processor in self._used(flags, start, stop):
            lines = np.flatnonzero(flags & bit)
            if isinstance(processor, SparseProcessor):
                processor.apply_to_lines(logits, lines, rows[lines])
            elif len(lines) == len(rows):
                logits = self._apply_one(processor, logits, rows)
            else:
                changed = self._apply_one(processor, take_lines(logits, lines), rows[lines])
                logits.index_copy_(0, to_device(lines, logits.device), changed)
        return logits

    def _apply_one(self, processor: LogitsProcessor, logits: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
        changed = self._guarded(processor, "apply", lambda: processor.apply(logits, rows))
        if changed.shape != logits.shape or changed.dtype != logits.dtype:
            given = f"{tuple(changed.shape)} {changed.dtype}"
            wanted = f"{tuple(logits.shape)} {logits.dtype}"
            raise processor_failure(processor, "apply", ValueError(f"returned {given}, expected {wanted}"))
        return changed.contiguous()

    @staticmethod
    def _guarded(processor: LogitsProcessor, method: str, call: Callable[[], _T]) -> _T:
        """`call()`, with a failure named after the processor."""
        try:
            return call()
        except QuireError:
            raise
        except Exception as error:
            raise processor_failure(processor, method, error) from error
