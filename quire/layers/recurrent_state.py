"""States of recurrent layers in the KV cache: views of the bytes of blocks, one block per sequence.

Called by models. Stateless. The block of a request is column 0 of its group's block table. It holds whatever its last
user left there: a layer begins anew where a request's first position of a step is 0, and overwrites the block at the
end of the step.

    conv, ssm = state_tensors(context.kv_caches[layer], spec.shapes, (torch.bfloat16, torch.float32))
    before = ssm[metadata.block_table[:, 0].long()]   # [num_reqs, *shape]
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch


def state_tensors(
    kv_cache: torch.Tensor, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[torch.dtype]
) -> tuple[torch.Tensor, ...]:
    """The tensors of every block's state, which share memory with the cache.

    Args:
        kv_cache: [num_blocks, ...]; the bytes of a block lie together.
        shapes, dtypes: of the tensors of one state, in the order in which they lie in a block.

    Returns:
        For each shape: [num_blocks, *shape].
    """
    blocks = kv_cache.view(kv_cache.shape[0], -1).view(torch.uint8)
    tensors, start = [], 0
    for shape, dtype in zip(shapes, dtypes, strict=True):
        size = math.prod(shape) * dtype.itemsize
        tensors.append(blocks[:, start : start + size].view(dtype).view(len(blocks), *shape))
        start += size
    return tuple(tensors)
