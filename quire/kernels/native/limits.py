"""What this machine does at most, measured with the kernels' own threads: products and reads from memory.

Called by the worker when an engine starts that is to say how much of it a step reaches. Takes half a second.
"""

from __future__ import annotations

import time

import torch

from quire.kernels.native.memory import huge_zeros
from quire.kernels.native.runtime import NativeRuntime

# Numbers of `Ceiling` in csrc/include/quire/gemm.h.
READ, FLOAT32, BF16 = 0, 1, 2
READ_BYTES = 1 << 28
PRODUCT_STEPS = 20_000
# Ways to read: which is fastest differs from one kind of processor to the next.
STREAMS = (1, 2, 4, 8)
ROUNDS = 3


def measure_limits(runtime: NativeRuntime, dtype: torch.dtype, read_bytes: int = READ_BYTES) -> tuple[float, float]:
    """Operations a second in products of this type, and bytes a second that are read: the best of a few tries.

    A multiplication with its addition counts as two operations.
    """
    buffer = huge_zeros((read_bytes,), torch.uint8)
    buffer.fill_(1)

    def rate(kind: int, steps: int) -> float:
        best = 0.0
        for _ in range(ROUNDS):
            start = time.perf_counter()
            done = runtime.library.run_ceiling(
                runtime.tier_idx, runtime.pool, kind, buffer.data_ptr(), read_bytes, steps
            )
            best = max(best, done / (time.perf_counter() - start))
        return best

    kinds = (FLOAT32, BF16) if dtype == torch.bfloat16 else (FLOAT32,)
    return 2 * max(rate(kind, PRODUCT_STEPS) for kind in kinds), max(rate(READ, streams) for streams in STREAMS)
