"""What a call of a native kernel computes and moves, from its arguments. Pure; used while a profile is taken.

Products of every weight format, of experts and of heads; attention, whose lengths are read behind the pointers that the
kernel was given; recurrences. Weights count as they are stored, without the padding of panels; a kernel that is not
here (norms, activations, copies) has no count.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from quire.kernels.native.block_quant import BLOCK_KERNELS
from quire.kernels.native.coded import CODES
from quire.kernels.native.quant import PANEL_SIZE

Args = tuple[Any, ...]
"""Of a call, as csrc/bindings takes them."""

NUMBER_BYTES = (2, 4, 1, 4, 1, 1)
"""By the number of a dtype (`checks.DTYPE_CODES`)."""
STATE_FLOPS = 6
"""For each element of a recurrent state and token: decay, update, and the product that is read."""
LANES = 16
"""To a multiple of which the states of Mamba 1 are padded."""
_CODES = {code.number: code for code in CODES.values()}
_BLOCKS = {kernel.number: kernel for kernel in BLOCK_KERNELS.values()}


class KernelWork(NamedTuple):
    """Operations and bytes of one call; `sizes`: rows, inputs and outputs of a product."""

    flops: float
    num_bytes: float
    sizes: tuple[int, int, int] | None = None


class Product(NamedTuple):
    """Where the arguments of a product are.

    Attributes:
        weight_bytes: of (arguments, inputs, outputs).
        starts: [num_groups + 1] int32, the number of groups behind it; 0 = there is one weight, and `rows`.
    """

    outputs: int
    inputs: int
    is_gated: int
    weight_bytes: Callable[[Args, int, int], float]
    rows: int = 0
    starts: int = 0


def _plain(dtype: int) -> Callable[[Args, int, int], float]:
    return lambda args, inputs, outputs: float(NUMBER_BYTES[args[dtype]] * inputs * outputs)


def _int8(args: Args, inputs: int, outputs: int) -> float:
    return outputs * (inputs + 4.0)


def _int4(group_size: int) -> Callable[[Args, int, int], float]:
    return lambda args, inputs, outputs: outputs * (inputs / 2 + 2 * _num_groups(inputs, args[group_size]))


def _coded(group_size: int, number: int) -> Callable[[Args, int, int], float]:
    def num_bytes(args: Args, inputs: int, outputs: int) -> float:
        code = _CODES[args[number]]
        return outputs * (inputs * code.num_bits / 8 + _num_groups(inputs, args[group_size]) * (4 + code.has_zeros))

    return num_bytes


def _blocks(args: Args, inputs: int, outputs: int) -> float:
    kernel = _BLOCKS[args[2]]
    return outputs * inputs * kernel.record_bytes / (kernel.record_size * PANEL_SIZE)


def _num_groups(inputs: int, group_size: int) -> int:
    return -(-inputs // group_size) if group_size else 1


PRODUCTS: Mapping[str, Product] = {
    "linear": Product(10, 9, 14, _plain(11), rows=8),
    "linear_int8": Product(10, 11, 16, _int8, rows=9),
    "linear_int4": Product(10, 11, 16, _int4(12), rows=9),
    "linear_coded": Product(12, 13, 18, _coded(14, 15), rows=11),
    "block_linear": Product(10, 11, 15, _blocks, rows=9),
    "grouped_linear": Product(12, 13, 17, _plain(14), starts=6),
    "grouped_int8": Product(13, 14, 19, _int8, starts=6),
    "grouped_int4": Product(13, 14, 19, _int4(15), starts=6),
    "grouped_coded": Product(15, 16, 21, _coded(17, 18), starts=6),
    "block_grouped": Product(13, 14, 18, _blocks, starts=7),
}


def work_of(name: str, args: Args, made: Callable[[Any], Args]) -> KernelWork | None:
    """Of a call of the kernel `name`; None = not known.

    Args:
        made: the arguments that a cache or a batch among `args` was made from.
    """
    product = PRODUCTS.get(name)
    if product is not None:
        return _product(product, args)
    count = _OTHERS.get(name)
    return None if count is None else count(args, made)


def _product(product: Product, args: Args) -> KernelWork:
    inputs, outputs = args[product.inputs], args[product.outputs] * (2 if args[product.is_gated] else 1)
    num_weights = 1
    if product.starts:
        of_groups = np.diff(_int32(args[product.starts], args[product.starts + 1] + 1))
        rows, num_weights = int(of_groups.sum()), int((of_groups > 0).sum())
    else:
        rows = args[product.rows]
    weights = num_weights * product.weight_bytes(args, inputs, outputs)
    return KernelWork(2.0 * rows * inputs * outputs, weights + 2.0 * rows * (inputs + outputs), (rows, inputs, outputs))


def _heads(args: Args, made: Callable[[Any], Args]) -> KernelWork:
    rows, num_heads, inputs, outputs, dtype = args[9:14]
    num_bytes = NUMBER_BYTES[dtype] * num_heads * (inputs * outputs + rows * (inputs + outputs))
    return KernelWork(2.0 * rows * num_heads * inputs * outputs, float(num_bytes), (rows, inputs, num_heads * outputs))


def _attention(args: Args, made: Callable[[Any], Args]) -> KernelWork:
    _, _, num_kv_heads, _, head_size, dtype = made(args[5])
    num_reqs, num_tokens, num_heads = args[10:13]
    pairs, keys = seen_pairs(_int32(args[8], num_reqs + 1), _int32(args[9], num_reqs), args[14], args[18])
    of_cache = 2.0 * num_kv_heads * head_size * NUMBER_BYTES[dtype] * keys
    return KernelWork(4.0 * num_heads * head_size * pairs, of_cache + 4.0 * num_tokens * num_heads * head_size)


def _latent(args: Args, made: Callable[[Any], Args]) -> KernelWork:
    _, _, _, latent_size, rope_size, dtype = made(args[4])
    num_reqs, num_tokens, num_heads = args[9:12]
    pairs, keys = seen_pairs(_int32(args[7], num_reqs + 1), _int32(args[8], num_reqs))
    width = latent_size + rope_size
    of_queries = 2.0 * num_tokens * num_heads * (width + latent_size)
    num_bytes = NUMBER_BYTES[dtype] * width * keys + of_queries
    return KernelWork(2.0 * num_heads * (width + latent_size) * pairs, num_bytes)


def _recurrence(
    batch: int, num_elements: Callable[[Args], int], flops: int = STATE_FLOPS
) -> Callable[[Args, Callable[[Any], Args]], KernelWork]:
    """Of a state of so many float32 numbers, which each request's tokens read and write once."""

    def count(args: Args, made: Callable[[Any], Args]) -> KernelWork:
        num_reqs, num_tokens = made(args[batch])[3:5]
        elements = num_elements(args)
        return KernelWork(float(flops * num_tokens * elements), 8.0 * num_reqs * elements)

    return count


def _conv(args: Args, made: Callable[[Any], Args]) -> KernelWork:
    num_reqs, num_tokens = made(args[8])[3:5]
    channels, conv_size, _, dtype = args[9:13]
    numbers = 2 * num_tokens * channels + 2 * num_reqs * (conv_size - 1) * channels
    return KernelWork(2.0 * num_tokens * channels * conv_size, float(NUMBER_BYTES[dtype] * numbers))


_OTHERS: Mapping[str, Callable[[Args, Callable[[Any], Args]], KernelWork]] = {
    "head_linear": _heads,
    "paged_attention": _attention,
    "latent_attention": _latent,
    "gated_delta_rule": _recurrence(8, lambda args: args[10] * args[11] * args[12]),
    "mamba_scan": _recurrence(18, lambda args: -(-args[15] // LANES) * LANES * args[16]),
    "mamba2_scan": _recurrence(23, lambda args: args[18] * args[19] * args[21]),
    "causal_conv": _conv,
}


def seen_pairs(query_start_loc: np.ndarray, seq_lens: np.ndarray, window: int = 0, chunk: int = 0) -> tuple[int, int]:
    """(query, key) pairs of causal attention, and keys that some query sees.

    Args:
        query_start_loc: [num_reqs + 1]; the last tokens of each request are its queries.
        seq_lens: [num_reqs].
        window, chunk: as of `attention.paged_attention`; 0 = all is seen.
    """
    num_queries = np.diff(query_start_loc).astype(np.int64)
    ends = np.where(num_queries > 0, seq_lens, 0).astype(np.int64)
    begins = ends - num_queries
    if chunk:
        pairs = _in_chunks(ends, chunk) - _in_chunks(begins, chunk)
        keys = ends - begins // chunk * chunk
    elif window:
        pairs = _in_window(ends, window) - _in_window(begins, window)
        keys = np.where(num_queries > 0, np.minimum(ends, num_queries + window - 1), 0)
    else:
        pairs, keys = _triangle(ends) - _triangle(begins), ends
    return int(pairs.sum()), int(keys.sum())


def _triangle(count: np.ndarray) -> np.ndarray:
    sums: np.ndarray = count * (count + 1) // 2
    return sums


def _in_window(count: np.ndarray, window: int) -> np.ndarray:
    sums: np.ndarray = _triangle(np.minimum(count, window)) + window * np.maximum(count - window, 0)
    return sums


def _in_chunks(count: np.ndarray, chunk: int) -> np.ndarray:
    sums: np.ndarray = count // chunk * (chunk * (chunk + 1) // 2) + _triangle(count % chunk)
    return sums


def _int32(address: int, count: int) -> np.ndarray:
    """What lies at a pointer that a kernel was given."""
    return np.ctypeslib.as_array((ctypes.c_int32 * count).from_address(address)) if count else np.zeros(0, np.int32)
