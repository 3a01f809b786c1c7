"""Engines that write given texts, and an oracle that drafts them; used by `bench_speculation`.

Random weights write no texts. So the logit of the token that is next in a request's given text is raised before it is
sampled, by position: the model, its products and the sampler do all their work, drafts are verified at once as ever,
and what is decoded is a text of its kind. It costs a few microseconds a step, in every arm alike.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch

from quire.core.drafts import DraftRows, Proposals, make_proposals
from quire.core.engine_messages import EngineCoreRequest
from quire.core.sampling_params import SamplingParams
from quire.engine import core_factory
from quire.sample.sampler import Sampler, SamplerOutput, as_lines
from quire.sample.states import SamplingStates
from quire.scheduler.setup import SchedulerSetup
from quire.spec_decode.controller import SpeculationController

HUGE_LOGIT = 1e9
_NONE = np.empty(0, dtype=np.int32)
_given: dict[bytes, np.ndarray] = {}


def give_texts(pairs: Iterable[tuple[list[int], list[int]]]) -> None:
    """From now on these prompts are answered by these texts, and all others by what the model writes."""
    _given.clear()
    _given.update((_key(np.array(prompt)), np.array(text, dtype=np.int32)) for prompt, text in pairs)


def _key(prompt_token_ids: np.ndarray) -> bytes:
    return prompt_token_ids.astype(np.int32).tobytes()


@contextmanager
def writing_given_texts(max_num_seqs: int, max_len: int) -> Iterator[None]:
    """Engines in this process write given texts meanwhile."""
    add_row, sample = SamplingStates.add_row, Sampler.sample
    texts: dict[int, np.ndarray] = {}

    def add_row_with_text(
        states: SamplingStates, row: int, params: SamplingParams, token_ids: np.ndarray, num_prompt_tokens: int,
        *args: Any, **kwargs: Any,
    ) -> None:  # fmt: skip
        add_row(states, row, params, token_ids, num_prompt_tokens, *args, **kwargs)
        of_engine = texts.setdefault(id(states), np.full((max_num_seqs, max_len), -1, dtype=np.int32))
        of_engine[row] = -1
        text = _given.get(_key(token_ids[:num_prompt_tokens]), _NONE)
        of_engine[row, num_prompt_tokens : num_prompt_tokens + len(text)] = text

    def sample_with_text(
        sampler: Sampler, logits: torch.Tensor, rows: np.ndarray, positions: np.ndarray, *args: Any
    ) -> SamplerOutput:
        logits = as_lines(logits)
        wanted = texts[id(sampler._states)][rows, positions]
        lines = np.flatnonzero(wanted >= 0)
        logits.numpy()[lines, wanted[lines]] = HUGE_LOGIT
        return sample(sampler, logits, rows, positions, *args)

    with (
        mock.patch.object(SamplingStates, "add_row", add_row_with_text),
        mock.patch.object(Sampler, "sample", sample_with_text),
    ):
        yield


class Oracle:
    """A `DraftProposer` that has read the given texts; each of its drafts is wrong with a given probability."""

    name = "oracle"

    def __init__(self, chance: float) -> None:
        self._chance = chance
        self._rng = np.random.default_rng(0)
        self._texts: dict[int, tuple[int, np.ndarray]] = {}

    def begin(self, request: EngineCoreRequest) -> None:
        """Read the text."""
        text = _given.get(_key(np.asarray(request.prompt_token_ids)), _NONE)
        self._texts[request.handle] = len(request.prompt_token_ids), text

    def propose(self, rows: DraftRows) -> Proposals:
        """What follows."""
        drafts = []
        for handle, num_tokens, most in zip(rows.handles, rows.num_tokens, rows.max_tokens, strict=True):
            num_prompt, text = self._texts[int(handle)]
            right = text[num_tokens - num_prompt :][:most]
            drafts.append(right + (self._rng.random(len(right)) >= self._chance).astype(np.int32))
        return make_proposals(drafts, self._chance)

    def end(self, handle: int, token_ids: np.ndarray, num_prompt_tokens: int) -> None:
        """Forget it."""
        del self._texts[handle]


@contextmanager
def proposing(method: str) -> Iterator[None]:
    """Engines that are made meanwhile draft by this oracle, if it is one, under a controller."""
    if not method.startswith("oracle:"):
        yield
        return
    make = core_factory.make_scheduler

    def make_drafting(setup: SchedulerSetup, **options: Any) -> Any:
        proposer = Oracle(float(method.removeprefix("oracle:")))
        drafting = dataclasses.replace(setup, has_proposer=True)
        return make(drafting, **{**options, "proposer": proposer, "controller": SpeculationController()})

    with mock.patch.object(core_factory, "make_scheduler", make_drafting):
        yield
