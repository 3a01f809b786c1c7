"""Batches for the trainer: documents of similar length, padded, shuffled within their phase.

`Corpus` reads the files of prepare.py (and of heads/distill.py). The order of batches depends only on
(seed, epoch), so a resumed run sees exactly the batches it would have seen.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

PROMPT_WEIGHT = 0.1  # loss weight of tokens that the user or system wrote


class Corpus:
    """Memory-mapped tokenized documents.

    Args:
        folder: Folder with the files that prepare.py wrote.
    """

    def __init__(self, folder: Path) -> None:
        self.tokens = np.load(folder / "tokens.npy", mmap_mode="r")
        self.answer = np.load(folder / "answer.npy", mmap_mode="r")
        self.starts = np.load(folder / "starts.npy")
        self.tasks = np.load(folder / "tasks.npy")
        phases = folder / "phases.npy"
        self.phases = np.load(phases) if phases.exists() else np.zeros(len(self.tasks), np.uint8)
        self.names: list[str] = json.loads((folder / "tasks.json").read_text())

    def plan(self, seed: int, epoch: int, batch_tokens: int) -> list[np.ndarray]:
        """Groups all documents into batches of about `batch_tokens` padded tokens, phase after phase.

        Returns:
            Document numbers of each batch, in training order.
        """
        rng = np.random.default_rng([seed, epoch])
        return [
            batch
            for phase in np.unique(self.phases)
            for batch in self._plan_phase(np.flatnonzero(self.phases == phase), rng, batch_tokens)
        ]

    def _plan_phase(self, docs: np.ndarray, rng: np.random.Generator, batch_tokens: int) -> list[np.ndarray]:
        lengths = np.diff(self.starts)
        # Sorting by a slightly noisy length mixes the company of a document between epochs.
        order = docs[np.argsort(lengths[docs] * rng.uniform(0.95, 1.05, len(docs)), kind="stable")]
        batches, begin, longest = [], 0, 0
        for i, doc in enumerate(order):
            longest_now = max(longest, int(lengths[doc]))
            if i > begin and longest_now * (i - begin + 1) > batch_tokens:
                batches.append(order[begin:i])
                begin, longest_now = i, int(lengths[doc])
            longest = longest_now
        batches.append(order[begin:])
        return [batches[i] for i in rng.permutation(len(batches))]

    def padded_tokens(self, plan: list[np.ndarray]) -> int:
        """Tokens that training on all batches of `plan` computes."""
        lengths = np.diff(self.starts)
        return sum(int(lengths[docs].max() - 1) * len(docs) for docs in plan)

    def batch(self, docs: np.ndarray, device: str, whole: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """Loads documents as (inputs, targets, loss weights), each [batch, time].

        Padding has weight 0; it is at the right, where causal attention ignores it. With `whole` the inputs are all
        tokens and the weights theirs, [batch, time + 1]; without, inputs lack the last and targets the first.
        """
        longest = int((self.starts[docs + 1] - self.starts[docs]).max())
        ids = np.zeros((len(docs), longest), np.int64)
        weights = np.zeros((len(docs), longest), np.float32)
        for row, doc in enumerate(docs):
            a, b = int(self.starts[doc]), int(self.starts[doc + 1])
            ids[row, : b - a] = self.tokens[a:b]
            weights[row, : b - a] = np.where(self.answer[a:b], 1.0, PROMPT_WEIGHT)
        x, w = torch.from_numpy(ids), torch.from_numpy(weights)
        if whole:
            return x.to(device), x[:, 1:].to(device), w.to(device)
        return x[:, :-1].to(device), x[:, 1:].to(device), w[:, 1:].to(device)
