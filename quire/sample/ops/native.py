"""NativeSamplingOps: sampling by native kernels; one call for a whole step, whatever its rows want.

The same distribution and rules as `torch_ops`. A draw gives the same token but where the random number falls so close
to the edge between two tokens that float sums of another order disagree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from quire.core.grammar_bitmask import GrammarBitmask
from quire.core.logprobs import LogprobsArrays
from quire.kernels.native import sampling as native
from quire.kernels.native.reusable_output import ReusableOutput
from quire.kernels.native.runtime import NativeRuntime
from quire.sample.ops.interface import SamplingOps
from quire.sample.ops.topk_topp import drop_below_inplace
from quire.sample.ragged import take_lines, to_device
from quire.sample.rng import STREAM_SAMPLE
from quire.sample.states import FeatureFlag, SamplingStates

_RANDOM = int(FeatureFlag.RANDOM)


class NativeSamplingOps(SamplingOps):
    """Kernels for vocabularies of at most `native.MAX_VOCAB_SIZE` tokens.

    Args:
        runtime: the kernels and their threads.
    """

    def __init__(self, runtime: NativeRuntime) -> None:
        self._runtime = runtime
        self._kept_logits = ReusableOutput()

    def compute_logits(
        self, compute: Callable[[torch.Tensor], torch.Tensor], hidden_rows: torch.Tensor
    ) -> torch.Tensor:
        """`compute(hidden_rows)`, in memory that is kept for the next step's."""
        with self._kept_logits.lent_to(self._runtime):
            return compute(hidden_rows)

    def mask_by_grammar(self, logits: torch.Tensor, grammar: GrammarBitmask) -> torch.Tensor:
        """As `SamplingOps.mask_by_grammar`."""
        logits = logits.float()
        if logits.stride(1) != 1:
            logits = logits.contiguous()
        native.apply_bitmask_inplace(self._runtime, logits, torch.from_numpy(grammar.bitmask), grammar.lines)
        return logits

    def apply_penalties_inplace(
        self,
        logits: torch.Tensor,
        lines: np.ndarray,
        token_ids: Sequence[np.ndarray],
        counts: np.ndarray,
        strengths: np.ndarray,
    ) -> None:
        """As `SamplingOps.apply_penalties_inplace`, with the bits of torch's."""
        starts = np.cumsum([0, *map(len, token_ids)])
        ids = np.concatenate(token_ids)
        native.apply_penalties_inplace(self._runtime, logits, lines.astype(np.int32), starts, ids, counts, strengths)

    def make_chooser(self, states: SamplingStates) -> NativeChooser:
        """As `SamplingOps.make_chooser`."""
        return NativeChooser(states, self._runtime)

    def gather_logprobs(
        self, logits: torch.Tensor, token_ids: np.ndarray, num_top: np.ndarray, index: np.ndarray, logprobs_mode: str
    ) -> LogprobsArrays:
        """As `SamplingOps.gather_logprobs`."""
        ids, scores, chosen_ranks = native.logprobs(
            self._runtime,
            logits,
            np.ascontiguousarray(token_ids, dtype=np.int32),
            num_top.astype(np.int32),
            is_logits=logprobs_mode.endswith("_logits"),
        )
        ranks = np.where(ids >= 0, np.arange(ids.shape[1], dtype=np.int32), 0).astype(np.int32, copy=False)
        ranks[:, 0] = chosen_ranks
        return LogprobsArrays(index=index.astype(np.int32), token_ids=ids, logprobs=scores, ranks=ranks)

    def likeliest(self, logits: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
        """As `SamplingOps.likeliest`."""
        one = np.ones(len(logits), dtype=np.int32)
        ids, scores, _ = native.logprobs(self._runtime, logits, np.zeros_like(one), one)
        return ids[:, 1], scores[:, 1]


class NativeChooser:
    """Chooses tokens.

    Args:
        states: per-row parameters.
        runtime: the kernels and their threads.
    """

    changes_logits = False

    def __init__(self, states: SamplingStates, runtime: NativeRuntime) -> None:
        self._states = states
        self._runtime = runtime

    def choose(
        self, logits: torch.Tensor, rows: np.ndarray, positions: np.ndarray, flags: np.ndarray, shown: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Choose a token for each line; see `TokenSampler`."""
        if (flags & _RANDOM).any():
            token_ids = self._draw(logits, rows, positions, flags, shown)
        else:
            token_ids = native.argmax(self._runtime, logits)
        is_invalid = token_ids < 0
        if is_invalid.any():
            token_ids[is_invalid] = 0
        return token_ids, is_invalid

    def _draw(
        self, logits: torch.Tensor, rows: np.ndarray, positions: np.ndarray, flags: np.ndarray, shown: np.ndarray
    ) -> np.ndarray:
        states = self._states
        temperature = states.temperature[rows]
        custom = np.flatnonzero(((flags & _RANDOM) != 0) & states.has_argmax_invariant(flags))
        if len(custom):
            part = take_lines(logits, custom).div_(torch.from_numpy(temperature[custom])[:, None])
            part = states.apply_argmax_invariant(part, rows[custom])
            logits.index_copy_(0, to_device(custom, logits.device), part)
            temperature[custom] = 1.0
        params = native.DrawParams(
            temperature=temperature,
            top_k=states.top_k[rows],
            top_p=states.top_p[rows],
            log_min_p=states.log_min_p[rows],
            uniforms=native.uniforms(self._runtime, states.seeds[rows], positions.astype(np.uint64), STREAM_SAMPLE),
        )
        token_ids, thresholds = native.sample(self._runtime, logits, params)
        shown = shown[temperature[shown] > 0]
        if len(shown):
            part = take_lines(logits, shown).div_(torch.from_numpy(temperature[shown])[:, None])
            drop_below_inplace(part, part, torch.from_numpy(thresholds[shown]))
            logits.index_copy_(0, to_device(shown, logits.device), part)
        return token_ids
