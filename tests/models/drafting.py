"""Runs an engine whose worker drafts, and notes every draft: what was known, what was drafted, what stood."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from quire import LLM, RequestOutput, SamplingParams
from quire.core.model_drafts import DraftRequest, RowDrafts
from quire.core.scheduler_output import SchedulerOutput
from quire.engine import core_factory
from quire.executor.drafting import DraftingExecutor, ModelProposer
from quire.scheduler.setup import SchedulerSetup, make_scheduler
from quire.worker.drafting import loading
from quire.worker.drafting.draft_step import DraftStep
from quire.worker.drafting.loading import DrafterSettings

SETTINGS: dict[str, Any] = {
    "max_model_len": 256, "num_threads": 1, "max_num_seqs": 8, "block_size": 16, "num_gpu_blocks_override": 96,
    "dtype": "float32", "speculative_config": {"method": "off", "enable_adaptive_verification": False},
}  # fmt: skip


@dataclass
class Drafted:
    """What a drafting model gave for one row: all tokens up to the newest, the drafts, and their scores."""

    tokens: tuple[int, ...]
    drafts: tuple[int, ...]
    scores: tuple[float, ...]


@dataclass
class Run:
    """Answers of some prompts, every draft on the way, and the steps that it took."""

    outputs: list[RequestOutput]
    drafted: list[Drafted] = field(default_factory=list)
    num_steps: int = 0

    @property
    def answers(self) -> list[tuple[Any, ...]]:
        """What must not depend on drafts: ids, ends and the bits of log-probabilities."""
        return [
            (tuple(one.token_ids), one.finish_reason, repr(one.logprobs))
            for one in (output.outputs[0] for output in self.outputs)
        ]

    def shares(self) -> tuple[int, int]:
        """Drafts that are the tokens of the answer in their places, and all that are within an answer."""
        sequences = [(*one.prompt_token_ids, *one.outputs[0].token_ids) for one in self.outputs]
        right = total = 0
        for drafted in self.drafted:
            sequence = next((one for one in sequences if one[: len(drafted.tokens)] == drafted.tokens), ())
            following = sequence[len(drafted.tokens) :]
            pairs = list(zip(drafted.drafts, following, strict=False))
            total += len(pairs)
            right += next((i for i, (draft, token) in enumerate(pairs) if draft != token), len(pairs))
        return right, total


def run(
    model: Path | str,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
    monkeypatch: Any,
    *,
    rounds: int = 1,
    verifies: bool = True,
    **settings: Any,
) -> Run:
    """Answers of all prompts, of the last of several rounds; drafts may be noted and not `verified`."""
    drafted: list[Drafted] = []
    asked = settings.pop("speculative_config", None)
    if asked is not None:
        ask_always(monkeypatch, asked, drafted, verifies=verifies)
    with LLM(str(model), **{**SETTINGS, **settings}) as llm:
        requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        for _ in range(rounds):
            drafted.clear()
            before = llm.llm_engine.last_stats.step
            outputs = llm.generate(requests, params, use_tqdm=False)  # type: ignore[arg-type]
        num_steps = llm.llm_engine.last_stats.step - before
    monkeypatch.undo()
    return Run(outputs, drafted, num_steps)


def ask_always(monkeypatch: Any, asked: dict[str, Any], drafted: list[Drafted], *, verifies: bool) -> None:
    """Load the drafting model, and let its drafts be verified; no controller says how many."""
    settings = DrafterSettings(
        method=asked["method"], num_tokens=asked["num_speculative_tokens"], model=asked["model"],
        max_model_len=asked.get("max_model_len"),
    )  # fmt: skip
    monkeypatch.setattr(loading, "drafter_settings", lambda config: settings)
    proposer = ModelProposer(settings.method, settings.num_tokens)
    original = DraftStep.run

    def noting(self: DraftStep, *args: Any) -> RowDrafts:
        drafts = original(self, *args)
        note(drafted, self._requests.token_ids, drafts)
        return drafts

    executor_class = core_factory.executor_class

    def drafting_class(name: str) -> Any:
        return lambda *args: DraftingExecutor(executor_class(name)(*args), proposer)

    def make(setup: SchedulerSetup, **options: Any) -> Any:
        return make_scheduler(dataclasses.replace(setup, has_proposer=True), **{**options, "proposer": proposer})

    monkeypatch.setattr(DraftStep, "run", noting)
    monkeypatch.setattr(core_factory, "executor_class", drafting_class)
    if verifies:
        monkeypatch.setattr(core_factory, "make_scheduler", make)
    else:
        monkeypatch.setattr(proposer, "request", lambda scheduled: all_rows(scheduled, settings.num_tokens))


def all_rows(scheduled: SchedulerOutput, num_tokens: int) -> DraftRequest:
    """Drafts for whatever samples."""
    rows = scheduled.rows[scheduled.is_sampling]
    return DraftRequest(rows, np.full(len(rows), num_tokens, dtype=np.int32))


def note(drafted: list[Drafted], token_ids: np.ndarray, drafts: RowDrafts) -> None:
    """Keep what was drafted."""
    first = 0
    for row, length, count in zip(
        drafts.rows.tolist(), drafts.num_tokens.tolist(), drafts.counts.tolist(), strict=True
    ):
        end = first + count
        tokens, ids, scores = token_ids[row, :length], drafts.token_ids[first:end], drafts.scores[first:end]
        drafted.append(Drafted(tuple(tokens.tolist()), tuple(ids.tolist()), tuple(scores.tolist())))
        first = end
