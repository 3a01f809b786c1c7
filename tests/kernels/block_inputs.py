"""Random rows in GGUF's block formats: every code, and scales that are ordinary, tiny, huge, negative and zero."""

from __future__ import annotations

import torch

from quire.formats.block_formats import BLOCK_FORMATS

# First bytes of the float16 numbers of a block; the other bytes may have any value.
FLOAT16_AT = {
    "Q8_0": (0,),
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
}
QUANTIZED = (*FLOAT16_AT, "MXFP4")
EXTREME_SCALES = (0.0, -0.0, 2.0**-24, -(2.0**-24), 1023 * 2.0**-24, 2.0**-14, 65504.0, -65504.0, 1.0, -0.333)
EXTREME_EXPONENTS = (0, 1, 2, 127, 253, 254, 255)


def random_blocks(name: str, num_rows: int, input_size: int, seed: int = 0, *, scale: float = 0.01) -> torch.Tensor:
    """Rows with finite numbers of either sign: [num_rows, row_bytes] uint8.

    Args:
        scale: of the float16 scales; the numbers are larger by the codes.
    """
    generator = torch.Generator().manual_seed(seed)
    kind = BLOCK_FORMATS[name]
    shape = (num_rows, kind.row_bytes(input_size))
    if name in ("F32", "F16", "BF16"):
        dtype = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[name]
        return (torch.randn(num_rows, input_size, generator=generator) * scale).to(dtype).view(torch.uint8)
    blocks = torch.randint(256, shape, generator=generator, dtype=torch.uint8).reshape(-1, kind.block_bytes)
    for first in FLOAT16_AT.get(name, ()):
        scales = (torch.randn(len(blocks), 1, generator=generator) * scale).half()
        blocks[:, first : first + 2] = scales.view(torch.uint8)
    if name == "MXFP4":
        blocks[:, 0] = torch.randint(115, 125, (len(blocks),), generator=generator, dtype=torch.uint8)
    return blocks.reshape(shape)


def extreme_blocks(name: str, seed: int = 0) -> torch.Tensor:
    """One row that has a block with each extreme scale (each pair of them where a block has two)."""
    kind, first_bytes = BLOCK_FORMATS[name], FLOAT16_AT.get(name, ())
    if name == "MXFP4":
        blocks = random_blocks(name, len(EXTREME_EXPONENTS), kind.block_size, seed)
        blocks[:, 0] = torch.tensor(EXTREME_EXPONENTS, dtype=torch.uint8)
        return blocks.reshape(1, -1)
    values = torch.tensor(EXTREME_SCALES).half()
    scales = torch.cartesian_prod(*[values] * len(first_bytes)).reshape(-1, len(first_bytes))
    blocks = random_blocks(name, len(scales), kind.block_size, seed)
    for column, first in enumerate(first_bytes):
        blocks[:, first : first + 2] = scales[:, column : column + 1].contiguous().view(torch.uint8)
    return blocks.reshape(1, -1)
