"""StepChain: recorded steps that each compute the tokens that the one before gave, replayed by one call.

So a model drafts token by token without Python between its passes. Made with the graphs of drafting models.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from quire.kernels.native.checks import check_size
from quire.kernels.native.runtime import NativeRuntime
from quire.kernels.native.sampling import check_logits
from quire.kernels.native.step_graph import StepGraph, check_fault


class StepChain:
    """The tokens of a chain of steps, for a few rows side by side.

    Args:
        runtime: its kernels and threads.
        num_steps, max_rows: sizes of the arrays.

    Attributes:
        input_ids: [num_steps, max_rows] int64; what each step but the first computes, written by `replay`.
        token_ids: [num_steps, max_rows] int32; what each step gives; -1 = none.
        logprobs: [num_steps, max_rows] float32; of token_ids.
    """

    def __init__(self, runtime: NativeRuntime, num_steps: int, max_rows: int) -> None:
        self._runtime = runtime
        self.input_ids = np.zeros((num_steps, max_rows), dtype=np.int64)
        self.token_ids = np.zeros((num_steps, max_rows), dtype=np.int32)
        self.logprobs = np.zeros((num_steps, max_rows), dtype=np.float32)
        self._most = np.zeros(max_rows, dtype=np.int32)
        self._unused = np.zeros((2, max_rows), dtype=np.int32)
        self._addresses = tuple(array.ctypes.data for array in (self.token_ids, self.logprobs, self.input_ids))

    def choose(self, step: int, logits: torch.Tensor) -> None:
        """Leave the likeliest token of each line ([n, vocab_size] float32) as what `step` gives."""
        num_lines, vocab_size = check_logits(logits)
        check_size("num_lines", num_lines, 1, self.token_ids.shape[1])
        check_size("step", step, 0, len(self.token_ids) - 1)
        runtime, lines = self._runtime, (logits.data_ptr(), logits.stride(0), num_lines, vocab_size)
        token_ids, logprobs = self.token_ids[step].ctypes.data, self.logprobs[step].ctypes.data
        no_top, ranks = (array.ctypes.data for array in self._unused)
        runtime.library.sample(runtime.tier_idx, runtime.pool, *lines, 0, 0, 0, 0, 0, token_ids, 0)
        runtime.library.logprobs(
            runtime.tier_idx, runtime.pool, *lines, token_ids, no_top, 1, False, ranks, logprobs, ranks
        )

    def pass_on(self, step: int) -> None:
        """What `step` gave is what the next one computes, as in `replay`."""
        if step + 1 < len(self.input_ids):
            np.maximum(self.token_ids[step], 0, out=self.input_ids[step + 1])

    def replay(self, graphs: Sequence[StepGraph], most: np.ndarray, least_chance: float) -> int:
        """Run the steps until all rows have ended; how many have run, whose tokens are in `token_ids`.

        Args:
            graphs: at most `num_steps`; each step ends with `choose`.
            most: [n] integers; tokens that each row wants.
            least_chance: a row ends with a token whose chance, the product of those up to it, is less.

        Raises:
            ShapeError: as of `StepGraph.replay`.
        """
        num_rows = len(most)
        check_size("num_rows", num_rows, 1, len(self._most))
        check_size("num_steps", len(graphs), 1, len(self.token_ids))
        self._most[:num_rows] = most
        num_run, fault = self._runtime.library.replay_chain(
            [graph.handle for graph in graphs], self._runtime.pool, num_rows, len(self._most), *self._addresses,
            self._most.ctypes.data, least_chance,
        )  # fmt: skip
        check_fault(fault)
        return int(num_run)
