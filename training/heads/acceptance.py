"""How many drafts of a head stand: measured on held-out answers of the target, greedy and at temperature 1.

A step that begins with a known newest token drafts `DEPTH` more; draft j stands if it and those before it are the
target's tokens. That is what sampled verification accepts, whatever the temperature. Every place of an answer is
taken as the beginning of a step once, and a second figure walks through the answers as decoding does. Called by
heads/export.py; no state.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from training.data import Corpus
from training.heads.distill import hidden_batch, read_hidden
from training.heads.eagle import EagleHead
from training.heads.medusa import MedusaHeads
from training.model import Leaf

GROUPS: dict[str, tuple[str, ...]] = {
    "stories": ("tales", "story_questions"),
    "chat": ("chat", "refusals"),
    "JSON": ("extraction",),
    "tool calls": ("tool_calls", "two_tool_calls"),
    "all tasks": (),
}
# (ids [batch, time], hidden [batch, time, hidden], depth) -> drafts [batch, depth, time]: at [:, j, a] the token
# drafted for place a + 2 + j by a step whose newest hidden state is a's, given the true tokens before that place
Drafts = Callable[[Tensor, Tensor, int], Tensor]


def eagle_drafts(head: EagleHead, embedding: Tensor) -> Drafts:
    """Drafts of an EAGLE head."""

    def drafts(ids: Tensor, hidden: Tensor, depth: int) -> Tensor:
        following = F.pad(ids[:, 1:], (0, 1))
        passes = head.passes(F.embedding(following, embedding), hidden, depth)
        tokens = [F.linear(x, embedding).argmax(-1) for x in passes]
        return torch.stack([F.pad(x[:, p:], (0, p), value=-1) for p, x in enumerate(tokens)], 1)

    return drafts


def medusa_drafts(heads: MedusaHeads, embedding: Tensor) -> Drafts:
    """Drafts of Medusa heads; `depth` is at most their number."""

    def drafts(ids: Tensor, hidden: Tensor, depth: int) -> Tensor:
        return F.linear(heads(hidden)[:depth], embedding).argmax(-1).transpose(0, 1)

    return drafts


def model_drafts(model: Leaf) -> Drafts:
    """Drafts of a draft model."""

    def drafts(ids: Tensor, hidden: Tensor, depth: int) -> Tensor:
        tokens = model.logits(model.hidden(ids)).argmax(-1)
        return torch.stack([F.pad(tokens[:, 1 + j :], (0, 1 + j), value=-1) for j in range(depth)], 1)

    return drafts


@torch.inference_mode()
def standing(folder: Path, drafts: Drafts, depth: int) -> list[tuple[str, np.ndarray]]:
    """For each document its task and how many drafts stand at each place of its last answer but the final token.

    The number at a place is at most that of the tokens that follow, and at most `depth`.
    """
    corpus, stored = Corpus(folder), read_hidden(folder)
    found: list[tuple[str, np.ndarray]] = []
    for docs in corpus.plan(0, 0, 4096):
        ids, _, _ = corpus.batch(docs, "cpu", whole=True)
        proposed = drafts(ids, hidden_batch(stored, corpus, docs, ids.shape[1]).float(), depth).numpy()
        for row, doc in enumerate(docs):
            begin, end = int(corpus.starts[doc]), int(corpus.starts[doc + 1])
            tokens = np.asarray(corpus.tokens[begin:end], np.int64)
            flags = np.asarray(corpus.answer[begin:end])
            first = len(flags) - int(np.argmin(flags[::-1])) if not flags.all() else 0
            anchors = np.arange(first - 1, len(tokens) - 2)  # token a + 1 is known, a + 2 is there to be drafted
            alive = np.ones(len(anchors), bool)
            counts = np.zeros(len(anchors), np.int64)
            for j in range(depth):
                place = anchors + 2 + j
                inside = place < len(tokens)
                alive &= inside & (proposed[row, j, anchors] == tokens[np.minimum(place, len(tokens) - 1)])
                counts += alive
            found.append((corpus.names[corpus.tasks[doc]], counts))
    return found


def _figures(answers: list[np.ndarray], depth: int) -> dict[str, Any]:
    stands, there = np.zeros(depth), np.zeros(depth)
    tokens = steps = 0
    for counts in answers:
        left = np.arange(len(counts), 0, -1)  # tokens that follow each place
        for j in range(depth):
            stands[j] += (counts > j).sum()
            there[j] += (left > j).sum()
        place = 0
        while place < len(counts):
            place += int(counts[place]) + 1
            steps += 1
        tokens += len(counts)
    return {
        "stand_by_position": [round(float(x), 4) for x in stands / np.maximum(there, 1)],
        "tokens_per_step": round(tokens / max(steps, 1), 3),
    }


def acceptance(folder: Path, drafts: Drafts, depth: int) -> dict[str, Any]:
    """Figures of each group of tasks: shares of drafts that stand, by position, and tokens per step.

    Args:
        folder: A set of heads/distill.py.
        drafts: The head.
        depth: Drafts of a step.
    """
    found = standing(folder, drafts, depth)
    return {
        group: _figures([counts for task, counts in found if len(counts) and (not tasks or task in tasks)], depth)
        for group, tasks in GROUPS.items()
    }
