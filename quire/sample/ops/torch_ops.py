"""TorchSamplingOps: sampling by torch operations, on any device. The definition of what native kernels do."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from quire.core.grammar_bitmask import GrammarBitmask, unpack_mask
from quire.core.logprobs import LogprobsArrays
from quire.sample.logprobs import gather_logprobs, scores_of
from quire.sample.ops.interface import SamplingOps
from quire.sample.ops.topk_topp import drop_below_inplace, min_p_threshold, top_k_threshold, top_p_threshold
from quire.sample.penalties import apply_penalties_inplace
from quire.sample.ragged import line_blocks, take_lines, to_device
from quire.sample.rng import uniform
from quire.sample.states import FeatureFlag, SamplingStates
from quire.sample.token_masks import IMPOSSIBLE


class TorchSamplingOps(SamplingOps):
    """Plain torch operations, on the device of the logits."""

    def mask_by_grammar(self, logits: torch.Tensor, grammar: GrammarBitmask) -> torch.Tensor:
        """As `SamplingOps.mask_by_grammar`."""
        logits = logits.float()
        allowed = unpack_mask(grammar.bitmask, logits.shape[1])
        lines = to_device(grammar.lines.astype(np.int64), logits.device)
        masked = logits[lines].masked_fill_(to_device(~allowed, logits.device), IMPOSSIBLE)
        return logits.index_copy_(0, lines, masked)

    def apply_penalties_inplace(
        self,
        logits: torch.Tensor,
        lines: np.ndarray,
        token_ids: Sequence[np.ndarray],
        counts: np.ndarray,
        strengths: np.ndarray,
    ) -> None:
        """As `SamplingOps.apply_penalties_inplace`."""
        apply_penalties_inplace(logits, lines, token_ids, counts, strengths)

    def make_chooser(self, states: SamplingStates) -> TorchChooser:
        """As `SamplingOps.make_chooser`."""
        return TorchChooser(states)

    def gather_logprobs(
        self, logits: torch.Tensor, token_ids: np.ndarray, num_top: np.ndarray, index: np.ndarray, logprobs_mode: str
    ) -> LogprobsArrays:
        """As `SamplingOps.gather_logprobs`."""
        return gather_logprobs(scores_of(logits, logprobs_mode), token_ids, num_top, index)


class TorchChooser:
    """Chooses tokens.

    Args:
        states: per-row parameters.
    """

    changes_logits = True

    def __init__(self, states: SamplingStates) -> None:
        self._states = states

    def choose(
        self, logits: torch.Tensor, rows: np.ndarray, positions: np.ndarray, flags: np.ndarray, shown: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Choose a token for each line; see `TokenSampler`."""
        token_ids, is_invalid = argmax(logits)
        random = np.flatnonzero(flags & FeatureFlag.RANDOM)
        if len(random):
            filtered, drawn = self._draw_rows(logits, rows, positions, random)
            token_ids[random] = np.where(is_invalid[random], token_ids[random], drawn)
            if len(shown):
                logits.index_copy_(0, to_device(random, logits.device), torch.cat(filtered))
        return token_ids, is_invalid

    def _draw_rows(
        self, logits: torch.Tensor, rows: np.ndarray, positions: np.ndarray, random: np.ndarray
    ) -> tuple[list[torch.Tensor], np.ndarray]:
        """Filter and draw the `random` lines, some at a time; when these are all lines, `logits` is changed.

        Returns:
            (filtered logits of the lines, in runs; [num_random] int32 tokens).
        """
        rows, positions = rows[random], positions[random]
        uniforms = uniform(self._states.seeds[rows], positions)
        filtered, drawn = [], []
        start = 0
        for block in line_blocks(logits if len(random) == len(logits) else take_lines(logits, random)):
            end = start + len(block)
            filtered.append(self._filtered(block, rows[start:end]))
            drawn.append(draw(filtered[-1], uniforms[start:end]))
            start = end
        return filtered, np.concatenate(drawn)

    def _filtered(self, logits: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
        """[n, vocab_size] logits after temperature and filters, from those of random rows; the argument is changed."""
        logits.div_(self._column(self._states.temperature, rows, logits)[:, None])
        logits = self._states.apply_argmax_invariant(logits, rows)
        flags = self._states.flags[rows]
        filters = (
            (FeatureFlag.MIN_P, self._keep_min_p_inplace),
            (FeatureFlag.TOP_K, self._keep_top_k_inplace),
            (FeatureFlag.TOP_P, self._keep_top_p_inplace),
        )
        for need, keep_inplace in filters:
            lines = np.flatnonzero(flags & need)
            if len(lines) == len(rows):
                keep_inplace(logits, rows)
            elif len(lines):
                part = take_lines(logits, lines)
                keep_inplace(part, rows[lines])
                logits.index_copy_(0, to_device(lines, logits.device), part)
        return logits

    def _keep_min_p_inplace(self, logits: torch.Tensor, rows: np.ndarray) -> None:
        log_min_p = self._column(self._states.log_min_p, rows, logits)
        drop_below_inplace(logits, logits, min_p_threshold(logits, log_min_p))

    def _keep_top_k_inplace(self, logits: torch.Tensor, rows: np.ndarray) -> None:
        top_k = self._column(self._states.top_k, rows, logits)
        drop_below_inplace(logits, logits, top_k_threshold(logits, top_k))

    def _keep_top_p_inplace(self, logits: torch.Tensor, rows: np.ndarray) -> None:
        probs = torch.softmax(logits, dim=-1)
        top_p = self._column(self._states.top_p, rows, logits)
        drop_below_inplace(logits, probs, top_p_threshold(probs, top_p))

    @staticmethod
    def _column(column: np.ndarray, rows: np.ndarray, logits: torch.Tensor) -> torch.Tensor:
        """The entries of `rows`, beside the logits."""
        return to_device(column[rows], logits.device)


def argmax(logits: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """The likeliest id of each line of [n, vocab_size], the lowest of equals; and whether its logit is not finite.

    Returns:
        ([n] int32, [n] bool). A NaN counts as the largest.
    """
    if logits.device.type == "cpu":
        host = logits.numpy()
        token_ids = host.argmax(axis=1)  # an order of magnitude faster than torch's on a CPU
        largest = host[np.arange(len(host)), token_ids]
    else:
        ids = logits.argmax(dim=1)
        token_ids, largest = ids.cpu().numpy(), logits.gather(1, ids[:, None])[:, 0].cpu().numpy()
    return token_ids.astype(np.int32), ~np.isfinite(largest)


def draw(logits: torch.Tensor, uniforms: np.ndarray) -> np.ndarray:
    """Draw an id from the softmax of each line, by inverting the distribution function over rising ids.

    Args:
        logits: [n, vocab_size] float32; -inf is never drawn.
        uniforms: [n] float64 in [0, 1).

    Returns:
        [n] int32. A line of NaN gives some id inside the vocabulary.

    Cost: one softmax, and one float64 running sum per line; a single random number per line.
    """
    return draw_by_weight(torch.softmax(logits, dim=-1), uniforms)


def draw_by_weight(weights: torch.Tensor, uniforms: np.ndarray) -> np.ndarray:
    """As `draw`, from [n, vocab_size] weights >= 0 that need not sum to 1; an id of weight 0 is never drawn."""
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    total = cumulative[:, -1]
    target = torch.minimum(total * to_device(uniforms, weights.device), torch.nextafter(total, torch.zeros_like(total)))
    ids = torch.searchsorted(cumulative, target[:, None], right=True)[:, 0]
    return ids.clamp_(max=weights.shape[1] - 1).cpu().numpy().astype(np.int32)
