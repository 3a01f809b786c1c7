"""Random weights in the block formats of GGUF."""

from __future__ import annotations

import torch

from quire.kernels.native.block_quant import BlockKernel

# The first bytes of the half-precision numbers in a block.
HALVES = {
    "Q8_0": (0,), "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q2_K": (80, 82), "Q3_K": (108,),
    "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,), "MXFP4": (),
}  # fmt: skip


def random_blocks(kernel: BlockKernel, num_rows: int, input_size: int, seed: int = 0) -> torch.Tensor:
    """[num_rows, row_bytes] uint8: any codes and small scales, with finite scales of any sign."""
    generator = torch.Generator().manual_seed(seed + 100 * num_rows + input_size)
    num_blocks = num_rows * input_size // kernel.block_size
    blocks = torch.randint(0, 256, (num_blocks, kernel.block_bytes), dtype=torch.uint8, generator=generator)
    for place in HALVES[kernel.name]:
        scales = (torch.randn(num_blocks, 1, generator=generator) * 0.01).half()
        blocks[:, place : place + 2] = scales.view(torch.uint8)
    if kernel.name == "MXFP4":
        blocks[:, 0] = 118 + blocks[:, 0] % 8
    return blocks.view(num_rows, -1)
