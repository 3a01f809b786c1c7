"""Continuations of a whole engine whose drafts a model draws, against their exact distribution.

Both models are tiny random checkpoints of a vocabulary of five tokens; `transformers` says what the exact one is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from transformers import PreTrainedModel

from quire import LLM, SamplingParams
from quire.core.drafts import Proposals, SpeculatedStep, StepLoad
from quire.engine import core_factory
from quire.spec_decode.controller import SpeculationController
from tests.models.checkpoints import make_checkpoint
from tests.statistics.speculated import LENGTH, MAX_DRAFTS, PARAMS, PROMPT, VOCAB_SIZE, exact_probs, p_value

SETTINGS: dict[str, Any] = {
    "max_model_len": 32, "num_threads": 1, "max_num_seqs": 250, "block_size": 16, "num_gpu_blocks_override": 300,
    "dtype": "float32", "skip_tokenizer_init": True,
}  # fmt: skip
WAYS: dict[str, dict[str, Any]] = {
    f"{method}, {kind}": {"way": {"acceptance": "rejection", "rejection_sample_method": method}, "kind": kind}
    for method in ("standard", "block")
    for kind in PARAMS
}


class CutsByScores(SpeculationController):
    """A controller whose choice depends on scores, and that counts drafts."""

    def __init__(self) -> None:
        super().__init__()
        self.num_verified = self.num_accepted = 0

    def most_tokens(self, num_rows: int, num_other_tokens: int, max_seq_len: int) -> int:
        return MAX_DRAFTS

    def num_skipped(self) -> int:
        return 0

    def record_skipped(self, num_steps: int, seconds: float) -> None:
        raise AssertionError("none is")

    def choose(self, load: StepLoad, proposals: Proposals) -> np.ndarray:
        ends = np.cumsum(proposals.counts)
        sums = np.append(0.0, np.cumsum(proposals.scores * 1e4))
        sums = sums[ends] - sums[ends - proposals.counts]
        counts: np.ndarray = (sums.astype(np.int64) % 4).astype(np.int32)
        return np.minimum(counts, proposals.counts)

    def record(self, step: SpeculatedStep) -> None:
        self.num_verified += int(step.kept.sum())
        self.num_accepted += int(step.accepted.sum())


class DraftingEngine:
    """A target and a model that drafts for it, in a directory."""

    def __init__(self, directory: Path) -> None:
        self._target, self._draft = directory / "target", directory / "draft"
        fields = {"vocab_size": VOCAB_SIZE, "num_hidden_layers": 2}
        self._model: PreTrainedModel = make_checkpoint("llama", self._target, std=0.15, rms_norm_eps=1e-6, **fields)
        make_checkpoint("llama", self._draft, std=0.15, seed=1, rms_norm_eps=1e-6, **fields)

    def try_out(
        self, way: dict[str, Any], kind: str, count: int, *, first_seed: int = 0, by_itself: bool = False
    ) -> tuple[float, float]:
        """(p of chi-square, share of verified drafts that stood) of `count` continuations.

        Args:
            way: keys of `speculative_config`.
            kind: one of `PARAMS`.
            first_seed: of the requests; the others have those behind it.
            by_itself: the target drafts.
        """
        drafting = {"method": "draft_model", "model": str(self._target if by_itself else self._draft), **way}
        controller = CutsByScores()
        params = [
            SamplingParams(max_tokens=LENGTH, ignore_eos=True, detokenize=False, seed=first_seed + i, **PARAMS[kind])
            for i in range(count)
        ]
        with mock.patch.object(core_factory, "make_controller", lambda config, clock: controller):
            llm = LLM(str(self._target), speculative_config={**drafting, "num_speculative_tokens": 3}, **SETTINGS)
        with llm:
            outputs = llm.generate([{"prompt_token_ids": PROMPT}] * count, params, use_tqdm=False)
        tokens = np.array([output.outputs[0].token_ids for output in outputs])
        exact = exact_probs(SamplingParams(**PARAMS[kind]), self._logits_of)
        return p_value(tokens, exact), controller.num_accepted / controller.num_verified

    def _logits_of(self, context: list[int]) -> np.ndarray:
        with torch.no_grad():
            found: np.ndarray = self._model(torch.tensor([context])).logits[0, -1].numpy()
        return found
