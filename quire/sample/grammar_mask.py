"""Grammars' masks on logits: one operation for all lines of a step. Called by the worker's sampling step. No state."""

from __future__ import annotations

import numpy as np
import torch

from quire.core.grammar_bitmask import GrammarBitmask, unpack_mask
from quire.kernels.native.runtime import NativeRuntime
from quire.kernels.native.sampling import apply_bitmask_inplace
from quire.sample.ragged import to_device
from quire.sample.token_masks import IMPOSSIBLE


def mask_by_grammar(logits: torch.Tensor, grammar: GrammarBitmask, runtime: NativeRuntime | None) -> torch.Tensor:
    """Logits in which tokens that grammars forbid are impossible, before anything else looks at them.

    Args:
        logits: [n, vocab_size]; may be changed.
        runtime: native kernels for logits on a CPU; None = torch operations.

    Returns:
        [n, vocab_size] float32.
    """
    logits = logits.float()
    if runtime is not None:
        if logits.stride(1) != 1:
            logits = logits.contiguous()
        apply_bitmask_inplace(runtime, logits, torch.from_numpy(grammar.bitmask), grammar.lines)
        return logits
    allowed = unpack_mask(grammar.bitmask, logits.shape[1])
    lines = to_device(grammar.lines.astype(np.int64), logits.device)
    masked = logits[lines].masked_fill_(to_device(~allowed, logits.device), IMPOSSIBLE)
    return logits.index_copy_(0, lines, masked)
