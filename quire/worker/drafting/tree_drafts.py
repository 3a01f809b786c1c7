"""What models that draft trees have in common: the paths as arrays, likely tokens, and drafts by their chances. Pure.

A chance is the product of the model's probabilities along a path. Likely paths come first, so a row that may have
fewer drafts has the best of them, and each behind its parent.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from quire.config.token_tree import Tree
from quire.sample.ops.interface import SamplingOps
from quire.worker.drafting.choice import ComputeLogits
from quire.worker.drafting.inputs import ModelDrafts

MAX_LINES = 256
"""Most rows of logits at once, which bounds their memory."""


@dataclass(frozen=True, slots=True)
class TreePaths:
    """The paths of a tree as nodes, short ones first.

    Attributes:
        parents: [num_nodes] int32; -1 = the newest token.
        depths: [num_nodes]; from 1.
        ranks: [num_nodes]; among the tokens behind the same parent; 0 = the likeliest.
    """

    parents: np.ndarray
    depths: np.ndarray
    ranks: np.ndarray

    @property
    def depth(self) -> int:
        """Of the longest path."""
        return int(self.depths.max())

    @property
    def num_ranks(self) -> int:
        """Tokens of a place that are looked at."""
        return int(self.ranks.max()) + 1


def paths_of(tree: Tree, longest: int) -> TreePaths:
    """The paths of at most `longest` ranks."""
    paths = [path for path in tree if len(path) <= longest]
    number = {path: i for i, path in enumerate(paths)}
    return TreePaths(
        parents=np.array([number.get(path[:-1], -1) for path in paths], dtype=np.int32),
        depths=np.array([len(path) for path in paths], dtype=np.int32),
        ranks=np.array([path[-1] for path in paths], dtype=np.intp),
    )


def likely_tokens(
    ops: SamplingOps, compute_logits: ComputeLogits, hidden: torch.Tensor, count: int, num_places: int = 1
) -> tuple[np.ndarray, np.ndarray]:
    """The likeliest tokens and their probabilities; of probability 0 there is none.

    Args:
        compute_logits: [n, ...] -> [n * num_places, vocabulary], of one line's places, then of the next one's.
        hidden: [n, ...].

    Returns:
        [n * num_places, count] int32 of the model's vocabulary, and float32, falling.
    """
    parts = [
        _likely(ops, ops.compute_logits(compute_logits, lines), count)
        for lines in torch.split(hidden, max(1, MAX_LINES // num_places))
    ]
    token_ids, probabilities = (np.concatenate(part) for part in zip(*parts, strict=True))
    return token_ids, probabilities


def _likely(ops: SamplingOps, logits: torch.Tensor, count: int) -> tuple[np.ndarray, np.ndarray]:
    n, found = len(logits), min(count, logits.shape[1])
    none, index = np.zeros(n, dtype=np.int32), np.arange(n, dtype=np.int32)
    lines = ops.gather_logprobs(logits, none, np.full_like(none, found), index, "raw_logprobs")
    ids, logprobs = lines.token_ids[:, 1:], lines.logprobs[:, 1:]
    is_token = np.isfinite(logprobs) & (ids >= 0)
    token_ids, probabilities = np.zeros((n, count), dtype=np.int32), np.zeros((n, count), dtype=np.float32)
    token_ids[:, :found][is_token] = ids[is_token]
    probabilities[:, :found][is_token] = np.minimum(np.exp(logprobs[is_token]), np.float32(1.0))
    return token_ids, probabilities


def likeliest_paths(
    token_ids: np.ndarray, chances: np.ndarray, parents: np.ndarray, max_tokens: np.ndarray
) -> ModelDrafts:
    """The paths of each row that have a chance, the likeliest `max_tokens` ([n]) of them.

    Args:
        token_ids, chances: [n, num_nodes]; chances are those of paths.
        parents: [num_nodes]; nodes come behind their parents.
    """
    n, width = chances.shape
    order = np.argsort(-chances, axis=1, kind="stable")  # as likely as its parent: behind it
    number = np.empty((n, width + 1), dtype=np.int32)
    np.put_along_axis(number, order, np.arange(width, dtype=np.int32)[None], axis=1)
    number[:, -1] = -1
    in_order = np.take_along_axis(number, parents[order], axis=1)
    chances, token_ids = (np.take_along_axis(of, order, axis=1) for of in (chances, token_ids))
    counts = np.minimum(np.count_nonzero(chances > 0, axis=1), max_tokens).astype(np.int32)
    is_draft = np.arange(width) < counts[:, None]
    scores = chances.copy()
    np.divide(chances[:, 1:], chances[:, :-1], out=scores[:, 1:], where=chances[:, :-1] > 0)
    return ModelDrafts(counts, token_ids[is_draft], scores[is_draft].astype(np.float32), in_order[is_draft])
