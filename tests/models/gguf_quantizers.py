"""Simple quantizers to every type of GGUF tensors, for the tests' files; the `gguf` package has no K-quants and IQ4.

Scales are the plainest that fit (the largest magnitude, or the range), so errors are larger than llama.cpp's.
"""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from quire.formats.block_formats import BLOCK_FORMATS
from quire.kernels.reference.block_formats import IQ4_VALUES

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
ROWS_AT_ONCE = 4096


def quantize(values: Floats, name: str) -> Bytes:
    """Rows in the blocks of a type: [..., input_size] float32 -> [..., row_bytes] uint8."""
    kind = BLOCK_FORMATS[name]
    rows = np.ascontiguousarray(values, dtype=np.float32).reshape(-1, values.shape[-1])
    out = np.empty((len(rows), kind.row_bytes(values.shape[-1])), np.uint8)
    for first in range(0, len(rows), ROWS_AT_ONCE):
        part = rows[first : first + ROWS_AT_ONCE]
        if name in OWN:
            packed = OWN[name](part.reshape(-1, kind.block_size))
        else:
            packed = gguf.quants.quantize(part, gguf.GGMLQuantizationType[name]).view(np.uint8)
        out[first : first + ROWS_AT_ONCE] = packed.reshape(len(part), -1)
    return out.reshape(*values.shape[:-1], -1)


def dequantize(blocks: Bytes, name: str) -> Floats:
    """The numbers that blocks mean, by the `gguf` package."""
    found: Floats = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[name])
    return found


def pack(codes: npt.NDArray[Any], num_bits: int) -> Bytes:
    """Codes to bytes, the first in the lowest bits: [..., 8 // num_bits, width] -> [..., width]."""
    shifts = np.arange(0, 8, num_bits, dtype=np.uint8)[:, None]
    packed: Bytes = np.bitwise_or.reduce(codes.astype(np.uint8) << shifts, axis=-2)
    return packed


def _float16(scale: Floats) -> tuple[Bytes, Floats]:
    """[num_blocks, 1] -> its two bytes, and what they mean."""
    short = np.ascontiguousarray(scale, dtype=np.float16)
    return short.view(np.uint8), short.astype(np.float32)


def _nearest(values: Floats, step: Floats, low: int, high: int) -> Floats:
    """values / step, rounded and within low .. high; 0 where the step is 0."""
    quotient = np.divide(
        values, step, out=np.zeros(np.broadcast_shapes(values.shape, step.shape), np.float32), where=step != 0
    )
    clipped: Floats = np.rint(quotient).clip(low, high)
    return clipped


def _largest(values: Floats) -> Floats:
    """The number of largest magnitude along the last dimension, with its sign."""
    at = np.abs(values).argmax(axis=-1)[..., None]
    return np.take_along_axis(values, at, axis=-1)[..., 0]


def _with_minima(groups: Floats, max_code: int, max_scale: int) -> tuple[Bytes, Bytes, Bytes, Bytes, Bytes]:
    """Scale and minimum of each group, in units of the block's.

    Args:
        groups: [num_blocks, num_groups, group_size].

    Returns:
        The bytes of the units d and dmin [num_blocks, 2], scales and minima [num_blocks, num_groups], and codes.
    """
    low, high = np.minimum(groups.min(-1), 0), np.maximum(groups.max(-1), 0)
    steps = (high - low) / max_code
    d_bytes, d = _float16(steps.max(-1, keepdims=True) / max_scale)
    dmin_bytes, dmin = _float16((-low).max(-1, keepdims=True) / max_scale)
    scales, minima = _nearest(steps, d, 0, max_scale), _nearest(-low, dmin, 0, max_scale)
    codes = _nearest(groups + (dmin * minima)[..., None], (d * scales)[..., None], 0, max_code)
    return d_bytes, dmin_bytes, scales.astype(np.uint8), minima.astype(np.uint8), codes.astype(np.uint8)


def _centred(groups: Floats, lowest: int, max_scale: int) -> tuple[Bytes, npt.NDArray[np.int8], npt.NDArray[np.int8]]:
    """Signed scale of each group, in units of the block's: its largest number gets the code `lowest`.

    Returns:
        The bytes of the unit d [num_blocks, 2], scales [num_blocks, num_groups], and codes from `lowest`.
    """
    steps = _largest(groups) / lowest
    d_bytes, d = _float16(np.abs(steps).max(-1, keepdims=True) / max_scale)
    scales = _nearest(steps, d, -max_scale, max_scale)
    codes = _nearest(groups, (d * scales)[..., None], lowest, -lowest - 1)
    return d_bytes, scales.astype(np.int8), codes.astype(np.int8)


def _pack_scales_and_minima(scales: Bytes, minima: Bytes) -> Bytes:
    """Eight of each, of six bits -> 12 bytes."""
    first = scales[:, :4] | (scales[:, 4:] >> 4 << 6)
    second = minima[:, :4] | (minima[:, 4:] >> 4 << 6)
    return np.concatenate([first, second, (scales[:, 4:] & 15) | (minima[:, 4:] << 4)], axis=1)


def _q2_k(x: Floats) -> Bytes:
    d, dmin, scales, minima, codes = _with_minima(x.reshape(-1, 16, 16), 3, 15)
    packed = pack(codes.reshape(-1, 2, 4, 32), 2).reshape(-1, 64)
    return np.concatenate([scales | (minima << 4), packed, d, dmin], axis=1)


def _q3_k(x: Floats) -> Bytes:
    d, scales, codes = _centred(x.reshape(-1, 16, 16), -4, 31)
    shifted, scale_codes = (codes + 4).astype(np.uint8), (scales + 32).astype(np.uint8)
    mask = pack((shifted >> 2).reshape(-1, 8, 32), 1)
    low = pack((shifted & 3).reshape(-1, 2, 4, 32), 2).reshape(-1, 64)
    low_scales = pack((scale_codes & 15).reshape(-1, 2, 8), 4)
    high_scales = pack((scale_codes >> 4).reshape(-1, 4, 4), 2)
    return np.concatenate([mask, low, low_scales, high_scales, d], axis=1)


def _q4_k(x: Floats) -> Bytes:
    d, dmin, scales, minima, codes = _with_minima(x.reshape(-1, 8, 32), 15, 63)
    packed = pack(codes.reshape(-1, 4, 2, 32), 4).reshape(-1, 128)
    return np.concatenate([d, dmin, _pack_scales_and_minima(scales, minima), packed], axis=1)


def _q5_k(x: Floats) -> Bytes:
    d, dmin, scales, minima, codes = _with_minima(x.reshape(-1, 8, 32), 31, 63)
    packed = pack((codes & 15).reshape(-1, 4, 2, 32), 4).reshape(-1, 128)
    return np.concatenate([d, dmin, _pack_scales_and_minima(scales, minima), pack(codes >> 4, 1), packed], axis=1)


def _q6_k(x: Floats) -> Bytes:
    d, scales, codes = _centred(x.reshape(-1, 16, 16), -32, 127)
    shifted = (codes + 32).astype(np.uint8)
    low = pack((shifted & 15).reshape(-1, 2, 2, 64), 4).reshape(-1, 128)
    high = pack((shifted >> 4).reshape(-1, 2, 4, 32), 2).reshape(-1, 64)
    return np.concatenate([low, high, scales.view(np.uint8), d], axis=1)


def _iq4_codes(values: Floats, step: Floats) -> Bytes:
    """The nearest of IQ4's values to each of values / step."""
    table = np.array(IQ4_VALUES, np.float32)
    scaled = np.divide(values, step, out=np.zeros(values.shape, np.float32), where=step != 0)
    upper = np.searchsorted(table, scaled).clip(1, len(table) - 1)
    is_upper = table[upper] - scaled < scaled - table[upper - 1]
    codes: Bytes = np.where(is_upper, upper, upper - 1).astype(np.uint8)
    return codes


def _iq4_nl(x: Floats) -> Bytes:
    d_bytes, d = _float16(_largest(x)[:, None] / IQ4_VALUES[0])
    return np.concatenate([d_bytes, pack(_iq4_codes(x, d).reshape(-1, 2, 16), 4)], axis=1)


def _iq4_xs(x: Floats) -> Bytes:
    groups = x.reshape(-1, 8, 32)
    steps = _largest(groups) / IQ4_VALUES[0]
    d_bytes, d = _float16(np.abs(steps).max(-1, keepdims=True) / 31)
    scales = _nearest(steps, d, -31, 31)
    codes = _iq4_codes(groups, np.broadcast_to((d * scales)[..., None], groups.shape))
    scale_codes = (scales + 32).astype(np.uint8)
    high = pack((scale_codes >> 4).reshape(-1, 2, 4, 1), 2).reshape(-1, 2)
    low = pack((scale_codes & 15).reshape(-1, 4, 2, 1), 4).reshape(-1, 4)
    return np.concatenate([d_bytes, high, low, pack(codes.reshape(-1, 8, 2, 16), 4).reshape(-1, 128)], axis=1)


OWN = {
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
}
