"""Runs an engine whose worker drafts, and notes every draft: what was known, what was drafted, what stood."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quire import LLM, RequestOutput, SamplingParams
from quire.core.runner_output import ModelRunnerOutput
from quire.core.scheduler_output import SchedulerOutput
from quire.engine import core_factory
from quire.scheduler.setup import SchedulerSetup, make_scheduler
from quire.worker.drafting import loading
from quire.worker.drafting.inputs import DraftInputs, ModelDrafts, gather_inputs
from quire.worker.drafting.loading import DrafterSettings
from quire.worker.worker import Worker
from tests.row_proposer import RowProposer

SETTINGS: dict[str, Any] = {
    "max_model_len": 256, "num_threads": 1, "max_num_seqs": 8, "block_size": 16, "num_gpu_blocks_override": 96,
    "dtype": "float32",
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


KNOWN: dict[tuple[int, ...], np.ndarray] = {}


def reply(token_ids: np.ndarray, max_tokens: int) -> np.ndarray:
    """The scheduler's half: what the worker has drafted behind these very tokens."""
    return KNOWN.get(tuple(token_ids.tolist()), np.empty(0, np.int32))[:max_tokens]


def ask_always(monkeypatch: Any, asked: dict[str, Any], drafted: list[Drafted], *, verifies: bool) -> None:
    """Load the drafting model, and ask it in every step for all rows that sample: what the scheduler is to do."""
    KNOWN.clear()
    num_tokens = asked["num_speculative_tokens"]
    settings = DrafterSettings(
        method=asked["method"], num_tokens=num_tokens, model=asked["model"], max_model_len=asked.get("max_model_len")
    )
    monkeypatch.setattr(loading, "drafter_settings", lambda config: settings)
    execute, sample = Worker.execute_model, Worker.sample_tokens

    def executing(self: Worker, scheduled: SchedulerOutput) -> Any:
        assert self.draft_model is not None, "it was loaded"
        computed = execute(self, scheduled)
        self.draft_model.apply(scheduled)
        return computed

    def sampling(self: Worker, computed: Any, grammar: Any = None) -> ModelRunnerOutput:
        output = sample(self, computed, grammar)
        runner = self._ready_runner()
        rows = output.rows
        if len(rows) and self.draft_model is not None:
            with torch.inference_mode():
                most = np.full(len(rows), num_tokens, dtype=np.int32)
                inputs = gather_inputs(computed.batch, computed.hidden, output, runner._requests, rows, most, 16)
                note(drafted, inputs, self.draft_model.propose(inputs))
        return output

    monkeypatch.setattr(Worker, "execute_model", executing)
    monkeypatch.setattr(Worker, "sample_tokens", sampling)

    def make(setup: SchedulerSetup, **options: Any) -> Any:
        return make_scheduler(dataclasses.replace(setup, has_proposer=True), proposer=RowProposer(reply), **options)

    if verifies:
        monkeypatch.setattr(core_factory, "make_scheduler", make)


def note(drafted: list[Drafted], inputs: DraftInputs, drafts: ModelDrafts) -> None:
    """Keep what was drafted, for the comparison and for the next step."""
    first = 0
    for row, length, count in zip(
        inputs.rows.tolist(), inputs.num_tokens.tolist(), drafts.counts.tolist(), strict=True
    ):
        end = first + count
        one = Drafted(
            tuple(inputs.token_ids[row, :length].tolist()),
            tuple(drafts.token_ids[first:end].tolist()),
            tuple(drafts.scores[first:end].tolist()),
        )
        KNOWN[one.tokens] = np.array(one.drafts, dtype=np.int32)
        drafted.append(one)
        first = end
