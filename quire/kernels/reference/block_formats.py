"""Reference: the numbers that stored weights mean, for every format that checkpoints come in.

Called by `StoredWeight.dequantize`, and by tests of the native kernels. GGUF's types give the bits of the `gguf`
package: float32, each product and each difference rounded. No state.

Source: ggml-quants.c (GGUF's types); Frantar et al. 2023 (GPTQ) and Lin et al. 2024 (AWQ) for integers with zero
points; Dettmers et al. 2023 (QLoRA), appendix E, for NF4; OCP Microscaling Formats 1.0, section 5.3.3, for MXFP4.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from quire.formats.block_formats import BLOCK_FORMATS

Parts = Mapping[str, torch.Tensor]

IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""What the codes of IQ4_NL and IQ4_XS stand for."""

MXFP4_VALUES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""What the codes of MXFP4 stand for, times two: E2M1 without a negative zero."""

MXFP4_SCALES = tuple(2.0 ** (exponent - 128) for exponent in range(256))
"""What their scales stand for, divided by two. The last is GGUF's; in the standard it means NaN."""

# The 16 quantiles of a normal distribution that NF4's codes stand for.
NF4_VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip

_BYTE = 8
_MXFP4_NAN = 255


def dequantize(format_name: str, parts: Parts, group_size: int, input_size: int) -> torch.Tensor:
    """The numbers of a stored matrix.

    Args:
        format_name: a GGUF type, or one of "int4", "int8", "fp8", "nf4", "mxfp4".
        parts: GGUF: "blocks" uint8 [num_rows, row_bytes]. The others: "codes" [num_rows, input_size] or, of four bits,
            uint8 [num_rows, ceil(input_size / 2)] with the even input in the low half; "scales" [num_rows,
            num_groups], for mxfp4 uint8 (exponents of two, plus 127); "zeros" [num_rows, num_groups] for int4.
        group_size: inputs that share a scale; 0 = all of the row.
        input_size: numbers in a row.

    Returns:
        [num_rows, input_size] float32.

    Raises:
        KeyError: no such format.
    """
    if format_name in BLOCK_FORMATS:
        return dequantize_blocks(format_name, parts["blocks"])
    return _GROUPED[format_name](parts, group_size or input_size, input_size)


def dequantize_blocks(format_name: str, blocks: torch.Tensor) -> torch.Tensor:
    """The numbers of a matrix in one of GGUF's types.

    Args:
        format_name: of `BLOCK_FORMATS`.
        blocks: [num_rows, row_bytes] uint8.

    Returns:
        [num_rows, input_size] float32.
    """
    kind = BLOCK_FORMATS[format_name]
    num_rows, row_bytes = blocks.shape
    input_size = row_bytes // kind.block_bytes * kind.block_size
    values = _BLOCKS[format_name](blocks.reshape(-1, kind.block_bytes))
    return values.reshape(num_rows, input_size)


def bit_fields(x: torch.Tensor, num_bits: int) -> torch.Tensor:
    """The fields of `num_bits` bits of each byte, the lowest first: [..., width] -> [..., 8 // num_bits, width]."""
    shifts = torch.arange(0, _BYTE, num_bits, dtype=torch.uint8, device=x.device)
    return (x.unsqueeze(-2) >> shifts[:, None]) & ((1 << num_bits) - 1)


def _in_turn(fields: torch.Tensor) -> torch.Tensor:
    """Fields of one byte after those of the byte before: [..., num_fields, width] -> [..., width * num_fields]."""
    return fields.transpose(-1, -2).flatten(-2)


def _float16(blocks: torch.Tensor, first_byte: int) -> torch.Tensor:
    """A float16 of each block as float32 [num_blocks, 1]."""
    return blocks[:, first_byte : first_byte + 2].contiguous().view(torch.float16).float()


def _plain(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda blocks: blocks.contiguous().view(dtype).float()


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return blocks[:, 2:].view(torch.int8).float() * _float16(blocks, 0)


def _nibbles(blocks: torch.Tensor, first_byte: int) -> torch.Tensor:
    """[num_blocks, 32]: the low halves of 16 bytes, then the high ones."""
    return bit_fields(blocks[:, first_byte : first_byte + 16], 4).flatten(1)


def _five_bits(blocks: torch.Tensor, first_byte: int) -> torch.Tensor:
    """[num_blocks, 32]: four bytes with the highest bits, one after the other, and 16 with the others."""
    highest = _in_turn(bit_fields(blocks[:, first_byte : first_byte + 4], 1))
    return _nibbles(blocks, first_byte + 4) | (highest << 4)


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return _float16(blocks, 0) * (_nibbles(blocks, 2).float() - 8)


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    return _float16(blocks, 0) * _nibbles(blocks, 4).float() + _float16(blocks, 2)


def _q5_0(blocks: torch.Tensor) -> torch.Tensor:
    return _float16(blocks, 0) * (_five_bits(blocks, 2).float() - 16)


def _q5_1(blocks: torch.Tensor) -> torch.Tensor:
    return _float16(blocks, 0) * _five_bits(blocks, 4).float() + _float16(blocks, 2)


def _q2_k(blocks: torch.Tensor) -> torch.Tensor:
    """16 groups of 16; each byte has a scale and a minimum of four bits; two times 32 bytes with four numbers each."""
    scales, minima = bit_fields(blocks[:, :16], 4).float().unbind(1)
    codes = bit_fields(blocks[:, 16:80].reshape(-1, 2, 32), 2).reshape(-1, 16, 16).float()
    scales, minima = _float16(blocks, 80) * scales, _float16(blocks, 82) * minima
    return scales[..., None] * codes - minima[..., None]


def _q3_k(blocks: torch.Tensor) -> torch.Tensor:
    """16 groups of 16; a number without its bit in the mask is four less; scales of six bits less 32."""
    mask = bit_fields(blocks[:, :32], 1).reshape(-1, 16, 16)
    low = bit_fields(blocks[:, 32:96].reshape(-1, 2, 32), 2).reshape(-1, 16, 16)
    codes = low.float() - 4 * (1 - mask.float())
    scales = bit_fields(blocks[:, 96:104], 4).flatten(1) | (bit_fields(blocks[:, 104:108], 2).flatten(1) << 4)
    return (_float16(blocks, 108) * (scales.float() - 32))[..., None] * codes


def _scales_and_minima(packed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Eight of each, of six bits, in 12 bytes: those of the last four groups are in two pieces.

    Args:
        packed: [num_blocks, 12] uint8.

    Returns:
        Two of [num_blocks, 8] float32.
    """
    first, second, rest = packed.reshape(-1, 3, 4).unbind(1)
    scales = torch.cat([first & 63, (rest & 15) | ((first >> 6) << 4)], dim=1)
    minima = torch.cat([second & 63, (rest >> 4) | ((second >> 6) << 4)], dim=1)
    return scales.float(), minima.float()


def _groups_with_minima(blocks: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Eight groups of 32, as Q4_K and Q5_K have them; `codes` [num_blocks, 8, 32]."""
    scales, minima = _scales_and_minima(blocks[:, 4:16])
    scales, minima = _float16(blocks, 0) * scales, _float16(blocks, 2) * minima
    return scales[..., None] * codes.float() - minima[..., None]


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    return _groups_with_minima(blocks, bit_fields(blocks[:, 16:].reshape(-1, 4, 32), 4).reshape(-1, 8, 32))


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    highest = bit_fields(blocks[:, 16:48], 1)
    low = bit_fields(blocks[:, 48:].reshape(-1, 4, 32), 4).reshape(-1, 8, 32)
    return _groups_with_minima(blocks, low | (highest << 4))


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    """16 groups of 16 with scales of eight bits; numbers of six bits less 32."""
    low = bit_fields(blocks[:, :128].reshape(-1, 2, 64), 4).reshape(-1, 16, 16)
    high = bit_fields(blocks[:, 128:192].reshape(-1, 2, 32), 2).reshape(-1, 16, 16)
    scales = _float16(blocks, 208) * blocks[:, 192:208].view(torch.int8).float()
    return scales[..., None] * ((low | (high << 4)).float() - 32)


def _look_up(values: Sequence[float], codes: torch.Tensor) -> torch.Tensor:
    """Codes -> what they stand for, as float32."""
    return torch.tensor(values, dtype=torch.float32, device=codes.device)[codes.int()]


def _iq4_nl(blocks: torch.Tensor) -> torch.Tensor:
    return _float16(blocks, 0) * _look_up(IQ4_VALUES, _nibbles(blocks, 2))


def _iq4_xs(blocks: torch.Tensor) -> torch.Tensor:
    """Eight groups of 32; scales of six bits less 32, the high two bits of all of them first."""
    high, low = _in_turn(bit_fields(blocks[:, 2:4], 2)), _in_turn(bit_fields(blocks[:, 4:8], 4))
    scales = _float16(blocks, 0) * ((low | (high << 4)).float() - 32)
    codes = bit_fields(blocks[:, 8:].reshape(-1, 8, 16), 4).flatten(2)
    return scales[..., None] * _look_up(IQ4_VALUES, codes)


def _mxfp4_blocks(blocks: torch.Tensor) -> torch.Tensor:
    return _look_up(MXFP4_SCALES, blocks[:, :1]) * _look_up(MXFP4_VALUES, _nibbles(blocks, 1))


def _spread(per_group: torch.Tensor, group_size: int, input_size: int) -> torch.Tensor:
    """Each group's number for each of its inputs: [num_rows, num_groups] -> [num_rows, input_size]."""
    return per_group.repeat_interleave(group_size, dim=1)[:, :input_size]


def _four_bits(codes: torch.Tensor, input_size: int) -> torch.Tensor:
    """[num_rows, ceil(input_size / 2)] -> [num_rows, input_size]: low halves are the even inputs."""
    return _in_turn(bit_fields(codes, 4))[:, :input_size]


def _int4(parts: Parts, group_size: int, input_size: int) -> torch.Tensor:
    codes = _four_bits(parts["codes"], input_size).float()
    zeros = _spread(parts["zeros"].float(), group_size, input_size)
    return (codes - zeros) * _spread(parts["scales"].float(), group_size, input_size)


def _scaled_codes(parts: Parts, group_size: int, input_size: int) -> torch.Tensor:
    return parts["codes"].float() * _spread(parts["scales"].float(), group_size, input_size)


def _nf4(parts: Parts, group_size: int, input_size: int) -> torch.Tensor:
    values = _look_up(NF4_VALUES, _four_bits(parts["codes"], input_size))
    return values * _spread(parts["scales"].float(), group_size, input_size)


def _mxfp4(parts: Parts, group_size: int, input_size: int) -> torch.Tensor:
    values = _look_up(MXFP4_VALUES, _four_bits(parts["codes"], input_size))
    scales = _look_up(MXFP4_SCALES, parts["scales"]).masked_fill(parts["scales"] == _MXFP4_NAN, torch.nan)
    return values * _spread(scales, group_size, input_size)


_BLOCKS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "F32": _plain(torch.float32),
    "F16": _plain(torch.float16),
    "BF16": _plain(torch.bfloat16),
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
    "MXFP4": _mxfp4_blocks,
}

_GROUPED: Mapping[str, Callable[[Parts, int, int], torch.Tensor]] = {
    "int4": _int4,
    "int8": _scaled_codes,
    "fp8": _scaled_codes,
    "nf4": _nf4,
    "mxfp4": _mxfp4,
}
