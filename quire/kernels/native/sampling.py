"""Kernels that choose tokens from lines of logits. Called by quire.sample; stateless.

A line's result is the same bits whatever the other lines, the tier and the number of threads. Arrays by line are
numpy: a step's parameters are gathered on the host, and its tokens are wanted there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from quire.errors import ShapeError
from quire.kernels.native.checks import check_apart, check_size, check_tensor
from quire.kernels.native.runtime import NativeRuntime

MAX_VOCAB_SIZE = 1 << 20  # sums of weights over more tokens may overflow


@dataclass(frozen=True, slots=True)
class DrawParams:
    """How each of n lines wants its token chosen; arrays are [n] and contiguous.

    Attributes:
        temperature: float32; 0 = the likeliest token, and the rest is unused.
        top_k: int32; 0 = off.
        top_p: float64; 1 = off.
        log_min_p: float32, natural logarithm; -inf = off.
        uniforms: float64 in [0, 1), multiples of 2**-53.
    """

    temperature: np.ndarray
    top_k: np.ndarray
    top_p: np.ndarray
    log_min_p: np.ndarray
    uniforms: np.ndarray


def argmax(runtime: NativeRuntime, logits: torch.Tensor) -> np.ndarray:
    """The likeliest id of each line, the lowest of equals.

    Args:
        logits: [n, vocab_size] float32; rows may be strided.

    Returns:
        [n] int32; -1 where the line holds NaN or +inf, or nothing finite.

    Raises:
        ShapeError: a size, dtype, device or stride differs from the above.

    Cost: one read of the logits; bandwidth bound.
    Reference: kernels/reference/sampling.py
    """
    num_lines, vocab_size = check_logits(logits)
    token_ids = np.empty(num_lines, dtype=np.int32)
    runtime.library.sample(
        runtime.tier_idx, runtime.pool, logits.data_ptr(), logits.stride(0), num_lines, vocab_size,
        0, 0, 0, 0, 0, token_ids.ctypes.data, 0,
    )  # fmt: skip
    return token_ids


def uniforms(runtime: NativeRuntime, seeds: np.ndarray, positions: np.ndarray, stream: int = 0) -> np.ndarray:
    """One uniform number per (seed, position).

    Args:
        seeds, positions: [n] uint64.
        stream: which of the independent numbers of (seed, position), in [0, 2**32).

    Returns:
        [n] float64 in [0, 1), multiples of 2**-53.

    Raises:
        ShapeError: a size or dtype differs from the above.

    Reference: sample/rng.py
    """
    check_size("stream", stream, 0, (1 << 32) - 1)
    count = _length("seeds", seeds)
    out = np.empty(count, dtype=np.float64)
    runtime.library.uniforms(
        runtime.tier_idx,
        _check_array("seeds", seeds, np.uint64, (count,)),
        _check_array("positions", positions, np.uint64, (count,)),
        count, stream, out.ctypes.data,
    )  # fmt: skip
    return out


def sample(runtime: NativeRuntime, logits: torch.Tensor, params: DrawParams) -> tuple[np.ndarray, np.ndarray]:
    """The likeliest id of each line, or one drawn from its softmax after temperature, min-p, top-k and top-p.

    A filter keeps tokens that tie with the last one kept: min-p a token of probability >= min_p * (largest); top-k
    one that fewer than k others beat; top-p one whose strictly likelier tokens hold less than p of the mass. The draw
    inverts the distribution function over rising ids. Weights are e ** (score - largest), rounded down to multiples
    of 2 ** -42, hence summed exactly; tokens below that are never drawn.

    Args:
        logits: [n, vocab_size] float32; rows may be strided.

    Returns:
        ([n] int32 ids as `argmax` gives them, [n] float32 smallest logit / temperature that was kept, -inf = all).

    Raises:
        ShapeError: a size, dtype, device or stride differs from the above.

    Cost: one read of the logits; a second one, with an exponential each, of lines without min-p and top-k.
    Reference: kernels/reference/sampling.py
    """
    num_lines, vocab_size = check_logits(logits)
    columns = (
        _check_array("temperature", params.temperature, np.float32, (num_lines,)),
        _check_array("top_k", params.top_k, np.int32, (num_lines,)),
        _check_array("top_p", params.top_p, np.float64, (num_lines,)),
        _check_array("log_min_p", params.log_min_p, np.float32, (num_lines,)),
        _check_array("uniforms", params.uniforms, np.float64, (num_lines,)),
    )
    smallest, largest = params.uniforms.min(initial=0.0), params.uniforms.max(initial=0.0)
    if not (smallest >= 0.0 and largest < 1.0):  # NaN is neither
        raise ShapeError(f"uniforms are {smallest} to {largest}, expected 0 to less than 1", field="uniforms")
    token_ids, thresholds = np.empty(num_lines, dtype=np.int32), np.empty(num_lines, dtype=np.float32)
    runtime.library.sample(
        runtime.tier_idx, runtime.pool, logits.data_ptr(), logits.stride(0), num_lines, vocab_size,
        *columns, token_ids.ctypes.data, thresholds.ctypes.data,
    )  # fmt: skip
    return token_ids, thresholds


def apply_penalties_inplace(
    runtime: NativeRuntime,
    logits: torch.Tensor,
    lines: np.ndarray,
    starts: np.ndarray,
    token_ids: np.ndarray,
    counts: np.ndarray,
    strengths: np.ndarray,
) -> None:
    """Make seen tokens less likely: logit / or * repetition, then - frequency * count - presence * (count > 0).

    Args:
        logits: [num_lines, vocab_size] float32; rows may be strided; mutated.
        lines: [n] int32, distinct; entry i is about line lines[i].
        starts: [n + 1] int64, rising; entry i has the ids and counts [starts[i], starts[i + 1]).
        token_ids: [starts[n]] int64, distinct within an entry; ids outside the vocabulary are skipped.
        counts: [starts[n]] float32; occurrences in the output.
        strengths: [n, 3] float32: repetition, frequency, presence.

    Raises:
        ShapeError: a size, dtype, device or stride differs from the above.

    Reference: kernels/reference/sampling.py
    """
    num_lines, vocab_size = check_logits(logits)
    num_entries = _length("lines", lines)
    lines_ptr = _check_array("lines", lines, np.int32, (num_entries,))
    starts_ptr = _check_array("starts", starts, np.int64, (num_entries + 1,))
    num_ids = int(starts[-1])
    if starts[0] != 0 or (starts[1:] < starts[:-1]).any():
        raise ShapeError(f"starts is {starts.tolist()}, expected 0 and then rising", field="starts")
    pointers = (
        _check_array("token_ids", token_ids, np.int64, (num_ids,)),
        _check_array("counts", counts, np.float32, (num_ids,)),
        _check_array("strengths", strengths, np.float32, (num_entries, 3)),
    )
    check_apart("logits", logits, lines=lines, starts=starts, token_ids=token_ids, counts=counts, strengths=strengths)
    runtime.library.apply_penalties(
        runtime.tier_idx, runtime.pool, logits.data_ptr(), logits.stride(0), num_lines, vocab_size,
        lines_ptr, num_entries, starts_ptr, *pointers,
    )  # fmt: skip


def apply_bitmask_inplace(
    runtime: NativeRuntime, logits: torch.Tensor, bitmask: torch.Tensor, lines: np.ndarray | None = None
) -> None:
    """Make tokens impossible whose bit is 0.

    Args:
        logits: [num_lines, vocab_size] float32; rows may be strided; mutated.
        bitmask: [n, ceil(vocab_size / 32)] int32; bit j of word i is id 32 * i + j.
        lines: [n] int32, distinct; mask i is for line lines[i]. None = mask i is for line i, n = num_lines.

    Raises:
        ShapeError: a size, dtype, device or stride differs from the above.

    Cost: one read and write of the logits, where a mask forbids anything.
    Reference: kernels/reference/sampling.py
    """
    num_lines, vocab_size = check_logits(logits)
    num_masks = num_lines if lines is None else _length("lines", lines)
    check_tensor("bitmask", bitmask, (torch.int32,), (num_masks, -(-vocab_size // 32)))
    lines_ptr = 0 if lines is None else _check_array("lines", lines, np.int32, (num_masks,))
    check_apart("logits", logits, bitmask=bitmask, lines=lines)
    runtime.library.apply_bitmask(
        runtime.tier_idx, runtime.pool, logits.data_ptr(), logits.stride(0), num_lines, vocab_size,
        lines_ptr, num_masks, bitmask.data_ptr(),
    )  # fmt: skip


def logprobs(
    runtime: NativeRuntime,
    logits: torch.Tensor,
    token_ids: np.ndarray,
    num_top: np.ndarray,
    *,
    is_logits: bool = False,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scores of given tokens and of the likeliest ones: the log-softmax, or the logits themselves.

    Args:
        logits: [n, vocab_size] float32; rows may be strided.
        token_ids: [n] int32; column 0 of the result. One outside the vocabulary has score NaN and rank 0.
        num_top: [n] int32 in [0, vocab_size]; the next columns, by falling score and rising id.
        is_logits: scores are the logits.

    Returns:
        ([n, 1 + max(num_top)] int32 ids, float32 scores beside them, [n] int32 ranks of the given tokens: how many
        scores reach theirs). Columns that a line did not ask for hold -1 and NaN. A line that holds NaN or +inf, or
        nothing finite, has NaN scores and rank 0.

    Raises:
        ShapeError: a size, dtype, device or stride differs from the above.

    Cost: one read of the logits, and one with an exponential each unless `is_logits`.
    Reference: kernels/reference/sampling.py
    """
    if not isinstance(is_logits, bool):
        raise ShapeError(f"is_logits is {is_logits!r}, expected True or False", field="is_logits")
    num_lines, vocab_size = check_logits(logits)
    num_top_ptr = _check_array("num_top", num_top, np.int32, (num_lines,))
    fewest, most = int(num_top.min(initial=0)), int(num_top.max(initial=0))
    if fewest < 0 or most > vocab_size:
        raise ShapeError(f"num_top is {fewest} to {most}, expected 0 to {vocab_size}", field="num_top")
    width = 1 + most
    shape = (num_lines, width)
    ids, scores = np.full(shape, -1, dtype=np.int32), np.full(shape, np.nan, dtype=np.float32)
    ranks = np.empty(num_lines, dtype=np.int32)
    runtime.library.logprobs(
        runtime.tier_idx, runtime.pool, logits.data_ptr(), logits.stride(0), num_lines, vocab_size,
        _check_array("token_ids", token_ids, np.int32, (num_lines,)),
        num_top_ptr,
        width, is_logits, ids.ctypes.data, scores.ctypes.data, ranks.ctypes.data,
    )  # fmt: skip
    return ids, scores, ranks


def check_logits(logits: torch.Tensor) -> tuple[int, int]:
    """(lines, size of the vocabulary) of [n, vocab_size] float32; rows may be strided."""
    check_tensor("logits", logits, (torch.float32,), (-1, -1), strided_rows=True)
    num_lines, vocab_size = logits.shape
    if not 1 <= vocab_size <= MAX_VOCAB_SIZE:
        raise ShapeError(f"vocab_size is {vocab_size}, expected 1 to {MAX_VOCAB_SIZE}", field="logits")
    return num_lines, vocab_size


def _length(name: str, array: np.ndarray) -> int:
    """The first size of an array."""
    if not isinstance(array, np.ndarray) or array.ndim == 0:
        raise ShapeError(f"{name} is {type(array).__name__}, expected an array", field=name)
    return len(array)


def _check_array(name: str, array: np.ndarray, dtype: type[np.generic], shape: tuple[int, ...]) -> int:
    """The address of `array`, which is what is expected."""
    _length(name, array)
    if array.shape != shape or array.dtype != dtype or not (array.flags.c_contiguous and array.flags.aligned):
        raise ShapeError(
            f"{name} is {array.dtype} {list(array.shape)} with strides {array.strides}, "
            f"expected aligned, contiguous {np.dtype(dtype)} {list(shape)}",
            field=name,
        )
    return array.ctypes.data
