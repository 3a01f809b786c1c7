"""States of recurrent layers in the KV cache: views of the bytes of blocks, one state in a block.

Called by models. Stateless. A recurrent layer declares a `MambaSpec` in the model's `kv_cache_specs`, and in each step
does this with the metadata of its group (`attention.metadata.StateMetadata`):

    kv_cache, metadata = context.state(layer_idx)
    conv, ssm = state_tensors(kv_cache, spec.shapes, (torch.bfloat16, torch.float32))
    for request i: begin with ssm[metadata.read_block[i]], or with zeros where that is -1 (nothing of the block counts),
                   and leave the state after its last token of the step in ssm[metadata.write_block[i]]
    for token j: where metadata.token_block is not None and token_block[j] >= 0, leave the state after it there, too

The block that is read may be another than the one that is written: it is then a checkpoint, which others find, and
must stay as it is. `tests/unit/worker/test_state_layers.py` has a model that does this and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from quire.attention.metadata import StateMetadata
from quire.core.kv_spec import STATE_ALIGNMENT
from quire.kernels.recurrent import RecurrentBatch


def recurrent_batch(metadata: StateMetadata) -> RecurrentBatch:
    """The requests of a step, as recurrent kernels take them."""
    return RecurrentBatch(metadata.query_start_loc, metadata.read_block, metadata.write_block, metadata.token_block)


def state_tensors(
    kv_cache: torch.Tensor, shapes: Sequence[tuple[int, ...]], dtypes: Sequence[torch.dtype]
) -> tuple[torch.Tensor, ...]:
    """The tensors of every block's state, which share memory with the cache.

    Args:
        kv_cache: [num_blocks, bytes of a block] uint8.
        shapes, dtypes: of the tensors of one state, in the order in which they lie in a block.

    Returns:
        For each shape: [num_blocks, *shape]; a state is contiguous and begins at a multiple of 64 bytes of its block.
    """
    tensors, start = [], 0
    for shape, dtype in zip(shapes, dtypes, strict=True):
        size = math.prod(shape) * dtype.itemsize
        tensors.append(kv_cache[:, start : start + size].view(dtype).view(len(kv_cache), *shape))
        start += -(-size // STATE_ALIGNMENT) * STATE_ALIGNMENT  # as `MambaSpec.tensor_bytes` has it
    return tuple(tensors)
