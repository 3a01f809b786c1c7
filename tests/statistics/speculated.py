"""Continuations of a tiny model with drafts, by the engine's own sampling step, against their exact distribution."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from scipy.stats import chisquare

from quire.core.grammar_bitmask import GrammarBitmask
from quire.core.sampling_params import SamplingParams
from quire.core.scheduler_output import NewRequestData
from quire.sample.ops.interface import SamplingOps
from quire.sample.rejection_sampler import AcceptanceRule, RejectionSampler
from quire.sample.states import SamplingStates
from quire.worker.draft_acceptance import AcceptanceOptions, DraftAcceptance
from quire.worker.input_batch import InputBatch
from quire.worker.request_states import RequestStates
from quire.worker.sampling_step import SamplingStep
from tests.unit.sample import reference

VOCAB_SIZE = 5
LENGTH = 4
MAX_DRAFTS = 3
PROMPT = [1, 3]
CPU = torch.device("cpu")
_TABLES = np.random.default_rng(5).normal(0.0, 1.3, (2, VOCAB_SIZE, VOCAB_SIZE, VOCAB_SIZE)).astype(np.float32)
TARGET = _TABLES[0]  # logits by the last two tokens
DRAFTER = (0.6 * _TABLES[0] + 0.8 * _TABLES[1]).astype(np.float32)

PARAMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "top-p and penalties": {
        "temperature": 0.9,
        "top_p": 0.85,
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.4,
        "presence_penalty": -0.3,
    },
}


@dataclass(frozen=True)
class Way:
    """How drafts are made and verified."""

    is_block: bool = False
    is_drawn: bool = True
    params: dict[str, Any] = field(default_factory=dict)
    num_drafts: Callable[[np.ndarray, np.ndarray], np.ndarray] = lambda tokens, drafts: np.full(len(tokens), MAX_DRAFTS)
    rule: AcceptanceRule | None = field(default_factory=RejectionSampler)
    """None: a draft stands when it is sampled."""
    is_closed: bool = False
    """Whether rows end behind a draft that is a 2."""


def all_of_them(tokens: np.ndarray, drafts: np.ndarray) -> np.ndarray:
    return np.full(len(tokens), drafts.shape[1])


def by_the_context(tokens: np.ndarray, drafts: np.ndarray) -> np.ndarray:
    """As many as the newest token says, none included."""
    return tokens[:, -1] % (drafts.shape[1] + 1)


def up_to_an_odd_one(tokens: np.ndarray, drafts: np.ndarray) -> np.ndarray:
    """The drafts before the first that is odd, as a score or a grammar might cut them."""
    return np.cumprod(drafts % 2 == 0, axis=1).sum(axis=1)


def all_or_none(tokens: np.ndarray, drafts: np.ndarray) -> np.ndarray:
    """All if the last one is even, else none: what is left out depends on drafts behind."""
    return np.where(drafts[:, -1] % 2 == 0, drafts.shape[1], 0)


LENGTHS = {"all": all_of_them, "by context": by_the_context, "cut by the drafts": up_to_an_odd_one}


def ways() -> Iterator[tuple[str, Way]]:
    """Every combination, with its name."""
    for (length, num_drafts), (kind, params), is_block, is_drawn in itertools.product(
        LENGTHS.items(), PARAMS.items(), (False, True), (False, True)
    ):
        name = f"{'block' if is_block else 'standard'}, {'drawn' if is_drawn else 'one-hot'}, {kind}, {length}"
        yield name, Way(is_block, is_drawn, params, num_drafts)
    for kind, params in PARAMS.items():
        yield f"standard, drawn, {kind}, by the last draft", Way(params=params, num_drafts=all_or_none)
    for is_block, is_drawn in itertools.product((False, True), (False, True)):
        name = f"{'block' if is_block else 'standard'}, {'drawn' if is_drawn else 'one-hot'}, penalties, closed"
        yield name, Way(is_block, is_drawn, PARAMS["top-p and penalties"], by_the_context, is_closed=True)


class Tables:
    """The model: its hidden states are its logits."""

    def compute_logits(self, hidden_rows: torch.Tensor) -> torch.Tensor:
        return hidden_rows.clone()


class Continuations:
    """Draws `num_rows` continuations at a time."""

    def __init__(self, way: Way, ops: SamplingOps, num_rows: int) -> None:
        self._way = way
        self._rows = np.arange(num_rows, dtype=np.int32)
        self._requests = RequestStates(num_rows, len(PROMPT) + LENGTH + MAX_DRAFTS + 1, VOCAB_SIZE)
        self._states = SamplingStates(num_rows, VOCAB_SIZE, CPU, apply_penalties=ops.apply_penalties_inplace)
        acceptance = None
        if way.rule is not None:
            options = AcceptanceOptions(way.rule, way.is_block, MAX_DRAFTS if way.is_drawn else 0)
            acceptance = DraftAcceptance(options, self._requests, self._states, ops, "raw_logprobs", CPU)
        self._drawn = None if acceptance is None else acceptance.drawn
        self._step = SamplingStep(Tables(), self._requests, self._states, ops, "raw_logprobs", acceptance)
        self.num_steps = 0

    def draw(self, first_seed: int) -> np.ndarray:
        """[num_rows, LENGTH] tokens, of requests with this seed and on."""
        params = SamplingParams(max_tokens=LENGTH, **self._way.params)
        for row in self._rows.tolist():
            seed = first_seed + row
            prompt = np.array(PROMPT, dtype=np.int32)
            self._states.add_row(row, params, prompt, len(prompt), seed)
            self._requests.add_row(NewRequestData(
                row=row, request_id="", token_ids=prompt, num_prompt_tokens=len(prompt), sampling_params=params,
                seed=seed, eos_token_id=-1, block_ids=(),
            ))  # fmt: skip
        lengths = np.full(len(self._rows), len(PROMPT))
        rows = self._rows
        while len(rows):
            lengths[rows] += self._run(rows, lengths[rows])
            rows = rows[lengths[rows] < len(PROMPT) + LENGTH]
        for row in self._rows.tolist():
            self._states.remove_row(row)
        if self._drawn is not None:
            self._drawn.forget(self._rows)
        return self._requests.token_ids[:, len(PROMPT) : len(PROMPT) + LENGTH].copy()

    def _run(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """A step: draft, verify; returns how many tokens each row got."""
        tokens = self._requests.token_ids
        drafts = self._draft(rows, positions)
        counts = self._way.num_drafts(np.stack([tokens[rows, positions - 2], tokens[rows, positions - 1]], 1), drafts)
        for i in range(drafts.shape[1]):
            has = counts > i
            tokens[rows[has], positions[has] + i] = drafts[has, i]
        start_loc = np.concatenate(([0], np.cumsum(counts + 1))).astype(np.int32)
        line_rows = np.repeat(rows, counts + 1)
        at = np.arange(len(line_rows)) - np.repeat(start_loc[:-1], counts + 1) + np.repeat(positions, counts + 1)
        grammar = closed_behind_twos(start_loc, tokens[line_rows, at - 1]) if self._way.is_closed else None
        logits = logits_of(TARGET, tokens, line_rows, at)
        output = self._step.run(batch_of(rows, positions, start_loc, at), logits, grammar)
        self.num_steps += len(rows)
        assert output.sampled_start_loc is not None or not counts.any()
        if self._way.is_closed and output.sampled_start_loc is not None:
            is_last = np.isin(np.arange(len(output.sampled_token_ids)), output.sampled_start_loc[1:] - 1)
            assert not (output.sampled_token_ids[~is_last] == 2).any()
        return (
            np.ones(len(rows), dtype=np.int64)
            if output.sampled_start_loc is None
            else np.diff(output.sampled_start_loc)
        )

    def _draft(self, rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """[n, MAX_DRAFTS] tokens: drawn, or the drafter's likeliest ones."""
        tokens, drafts = self._requests.token_ids.copy(), []
        if self._drawn is not None:
            self._drawn.begin(rows, positions)
        for i in range(MAX_DRAFTS):
            logits = logits_of(DRAFTER, tokens, rows, positions + i)
            drafts.append(logits.argmax(1).numpy() if self._drawn is None else self._drawn.draw(logits, rows).token_ids)
            tokens[rows, positions + i] = drafts[-1]
        return np.stack(drafts, 1)


def logits_of(table: np.ndarray, tokens: np.ndarray, rows: np.ndarray, positions: np.ndarray) -> torch.Tensor:
    """[n, VOCAB_SIZE]: of the tokens at `positions`."""
    return torch.from_numpy(table[tokens[rows, positions - 2], tokens[rows, positions - 1]])


def closed_behind_twos(start_loc: np.ndarray, newest: np.ndarray) -> GrammarBitmask:
    """A grammar that masks nothing and takes no draft behind a 2; `newest`: [num_lines], the token before each line."""
    behind = newest == 2
    behind[start_loc[:-1]] = False
    return GrammarBitmask(np.empty(0, np.int32), np.empty((0, 1), np.int32), np.flatnonzero(behind).astype(np.int32))


def batch_of(rows: np.ndarray, positions: np.ndarray, start_loc: np.ndarray, at: np.ndarray) -> InputBatch:
    """What the sampling step reads of a batch."""
    return InputBatch(
        rows=rows, num_computed_tokens=positions - 1, query_start_loc=start_loc, seq_lens=positions,
        input_ids=torch.zeros(len(at)), positions=torch.from_numpy(at - 1), token_rows=np.zeros(len(at)),
        token_positions=at - 1, sampling_rows=rows, sampling_positions=positions,
        logits_indices=np.arange(len(at)), logits_start_loc=start_loc if len(at) > len(rows) else None,
    )  # fmt: skip


def of_table(context: list[int]) -> np.ndarray:
    """[VOCAB_SIZE] logits of the target."""
    found: np.ndarray = TARGET[context[-2], context[-1]]
    return found


def exact_probs(params: SamplingParams, logits_of: Callable[[list[int]], np.ndarray] = of_table) -> np.ndarray:
    """[VOCAB_SIZE ** LENGTH] float64; of every continuation, the first token counting most."""
    probs = {(): 1.0}
    for _ in range(LENGTH):
        grown = {}
        for output, prob in probs.items():
            logits = logits_of([*PROMPT, *output])
            logits = reference.constrained_logits(logits, params, PROMPT, list(output))
            for token, chance in enumerate(reference.distribution(logits, params)):
                grown[(*output, token)] = prob * chance
        probs = grown
    return np.array([probs[output] for output in itertools.product(range(VOCAB_SIZE), repeat=LENGTH)])


def p_value(tokens: np.ndarray, exact: np.ndarray) -> float:
    """Of chi-square over continuations [n, LENGTH]; what is expected fewer than ten times is one cell."""
    cells = tokens @ VOCAB_SIZE ** np.arange(LENGTH)[::-1]
    counts, expected = np.bincount(cells, minlength=len(exact)), exact * len(tokens)
    if counts[exact == 0].any():
        return 0.0
    is_rare = expected < 10
    observed = np.append(counts[~is_rare], counts[is_rare].sum())
    wanted = np.append(expected[~is_rare], expected[is_rare].sum())
    if wanted[-1] < 10:
        observed = np.append(observed[:-2], observed[-2:].sum())
        wanted = np.append(wanted[:-2], wanted[-2:].sum())
    return float(chisquare(observed, wanted).pvalue)


def try_out(way: Way, ops: SamplingOps, count: int, num_rows: int = 1000) -> tuple[float, float]:
    """(p of chi-square, tokens per step) of `count` continuations."""
    drawn = Continuations(way, ops, min(num_rows, count))
    tokens = np.concatenate([drawn.draw(seed) for seed in range(0, count, min(num_rows, count))])
    return p_value(tokens, exact_probs(SamplingParams(**way.params))), tokens.size / drawn.num_steps
