"""NativeChooser: tokens by native kernels; one call for a whole step, whatever its rows want.

The same distribution and rules as `TorchChooser`. A draw gives the same token but where the random number falls so
close to the edge between two tokens that float sums of another order disagree.
"""

from __future__ import annotations

import numpy as np
import torch

from quire.kernels.native import sampling as native
from quire.kernels.native.runtime import NativeRuntime
from quire.sample.ragged import take_lines, to_device
from quire.sample.rng import STREAM_SAMPLE
from quire.sample.states import Need, SamplingStates
from quire.sample.topk_topp import drop_below_inplace

_RANDOM = int(Need.RANDOM)


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
        """Choose a token for each line; see `Chooser`."""
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
