"""Random calls of every typed wrapper, right ones and spoilt ones: each is refused, or gives the plain call's bits.

The plain call: the same numbers in fresh contiguous tensors, on the portable tier.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from quire.errors import QuireError
from quire.kernels.native.runtime import NativeRuntime
from tests.kernels.native.guards import GUARD_BYTES, Guarded

DTYPES = (torch.bfloat16, torch.float32, torch.float16, torch.int8, torch.int32, torch.int64, torch.float64, torch.bool)
WHOLE_NUMBERS = (-(1 << 70), -(1 << 63), -(1 << 31), -17, -1, 0, 1, 15, 17, 1 << 31, (1 << 63) - 1, 1 << 70)
OTHER_THINGS = (None, 2.5, "3", [1, 2], torch.zeros(2), np.zeros(2, np.float32))


@dataclass
class Call:
    """One call. `function` takes a runtime and `args`; it writes to the tensors and arrays named in `written`."""

    function: Callable[..., Any]
    args: dict[str, Any]
    written: tuple[str, ...] = ()


class Boundary:
    """Makes calls from seeds and judges them."""

    def __init__(self, tier: str, makers: dict[str, Callable[[random.Random], Call]]) -> None:
        self._runtime, self._portable = NativeRuntime(tier, num_threads=2), NativeRuntime("portable")
        self._makers = makers

    def try_one(self, seed: int) -> tuple[str, bool]:
        """(name of the wrapper, whether the call was refused); raises AssertionError for a wrong one."""
        rng = random.Random(seed)
        name = rng.choice(list(self._makers))
        call = self._makers[name](rng)
        guards = guard(call)
        for _ in range(rng.choice((0, 1, 1, 1, 2))):
            spoil(call, rng)
        plain = {key: plain_copy(value) for key, value in call.args.items()}
        read_only = [key for key in call.args if key not in call.written]
        try:
            result = call.function(self._runtime, **call.args)
        except QuireError:
            return name, True
        for band in guards:
            band.assert_bands()
        for key in read_only:
            if not is_in_place(call, key):
                assert same(call.args[key], plain[key]), f"{key} was written"
        expected = call.function(self._portable, **plain)
        assert same(result, expected), f"{name}: the result differs from that of plain memory"
        for key in call.written:
            assert same(call.args[key], plain[key]), f"{name}: {key} differs from that of plain memory"
        return name, False


def guard(call: Call) -> list[Guarded]:
    """Puts every tensor between guard bytes."""
    guards = []
    for key, value in call.args.items():
        if isinstance(value, torch.Tensor):
            band = Guarded(*value.shape, dtype=value.dtype)
            band.tensor.copy_(value)
            call.args[key] = band.tensor
            guards.append(band)
    return guards


def plain_copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.layout is torch.strided and value.device.type == "cpu":
        return value.clone(memory_format=torch.contiguous_format)
    return np.array(value, order="C") if isinstance(value, np.ndarray) else value


def same(a: Any, b: Any) -> bool:
    """Equal byte for byte, in tensors, arrays and tuples of them."""
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, torch.Tensor):
        if a.layout is not torch.strided or a.device.type != "cpu":
            return True
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        left, right = (t.reshape(-1).clone(memory_format=torch.contiguous_format) for t in (a, b))
        if a.is_floating_point() and a.itemsize > 1:  # one NaN is as good as another
            left, right = left.masked_fill(left.isnan(), 7.0), right.masked_fill(right.isnan(), 7.0)
        return torch.equal(left.view(torch.uint8), right.view(torch.uint8))
    if isinstance(a, np.ndarray):
        return bool(a.dtype == b.dtype and np.array_equal(a, b, equal_nan=a.dtype.kind == "f"))
    return a is b or bool(a == b) or (a != a and b != b)


def is_in_place(call: Call, key: str) -> bool:
    """Norms may write their result over their input, `transform` over what it adds, too."""
    out = call.args.get("out")
    given = call.args.get(key) if key in ("x", "addend") else None
    return isinstance(out, torch.Tensor) and isinstance(given, torch.Tensor) and out.data_ptr() == given.data_ptr()


def spoil(call: Call, rng: random.Random) -> None:
    """Changes one argument into something else."""
    key = rng.choice(list(call.args))
    value = call.args[key]
    if isinstance(value, torch.Tensor):
        if rng.random() < 0.2:
            share_memory(call, key, rng)
        else:
            call.args[key] = spoilt_tensor(value, rng)
    elif isinstance(value, np.ndarray):
        call.args[key] = spoilt_array(value, rng)
    elif isinstance(value, (int, float)):
        near = (value + 1, value - 1, value * 2)
        odd = rng.choice((float("nan"), float("inf"), -1.0, None, "0.1"))
        call.args[key] = rng.choice((*near, *near, *WHOLE_NUMBERS, *OTHER_THINGS) if isinstance(value, int) else (odd,))
    elif isinstance(value, torch.dtype):
        call.args[key] = rng.choice((*DTYPES, None, "float32"))
    elif value is None:
        call.args[key] = rng.choice(OTHER_THINGS)


def share_memory(call: Call, key: str, rng: random.Random) -> None:
    """Lays an argument over a part of another one."""
    tensor = call.args[key]
    others = [name for name, value in call.args.items() if name != key and isinstance(value, torch.Tensor)]
    if not others or tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        return
    name = rng.choice(others)
    other = call.args[name]
    if other.device.type != "cpu" or other.layout is not torch.strided:
        return
    bytes_each = [t.numel() * t.itemsize for t in (tensor, other)]
    shift = rng.choice((0, 0, 16, 64, max(0, bytes_each[0] - 16) // 16 * 16))
    raw = torch.zeros(2 * GUARD_BYTES + shift + sum(bytes_each), dtype=torch.uint8)
    for at, each, size, label in ((0, tensor, bytes_each[0], key), (shift, other, bytes_each[1], name)):
        view = raw[at : at + size].view(each.dtype).view(each.shape)
        view.copy_(each)
        call.args[label] = view


def spoilt_tensor(tensor: torch.Tensor, rng: random.Random) -> Any:
    dim = rng.randrange(tensor.dim()) if tensor.dim() else 0
    size = tensor.shape[dim] if tensor.dim() else 0
    kinds: list[Callable[[], Any]] = [
        lambda: None,
        lambda: tensor.to("meta"),
        lambda: tensor.to(rng.choice(DTYPES)),
        lambda: tensor.unsqueeze(dim),
        lambda: tensor.flatten(),
        lambda: tensor.transpose(0, dim),
        lambda: tensor.narrow(dim, 0, max(0, size - 1)),
        lambda: tensor.narrow(dim, size // 2, size - size // 2),
        lambda: tensor.narrow(dim, 0, 0),
        lambda: torch.cat([tensor, tensor], dim),
        lambda: torch.cat([tensor, tensor], dim).narrow(dim, 0, size),  # strided
        lambda: torch.repeat_interleave(tensor, 2, dim).index_select(dim, torch.arange(0, 2 * size, 2)),
        lambda: torch.repeat_interleave(tensor, 2, dim)[(slice(None),) * dim + (slice(None, None, 2),)],
        lambda: tensor.narrow(dim, 0, min(1, size)).expand(tensor.shape),
        lambda: misaligned(tensor, rng.randrange(1, 8)),
        lambda: tensor.to_sparse(),
        lambda: tensor.numpy() if tensor.dtype is not torch.bfloat16 else tensor.tolist(),
        lambda: torch.zeros(rng.choice((0, 1, 7)), dtype=tensor.dtype),
        lambda: tensor[0] if size and dim == 0 else tensor,
    ]
    if not tensor.is_floating_point():
        kinds += [lambda: with_extremes(tensor, rng)] * 15
    else:
        kinds += [lambda: with_special_values(tensor, rng)] * 3
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided:
        return tensor
    try:
        return rng.choice(kinds)()
    except (RuntimeError, IndexError, TypeError):
        return None


def misaligned(tensor: torch.Tensor, shift: int) -> torch.Tensor:
    raw = bytearray(tensor.numel() * tensor.itemsize + 8)
    if not tensor.numel():
        return tensor
    moved = torch.frombuffer(raw, dtype=tensor.dtype, offset=shift, count=tensor.numel()).view(tensor.shape)
    return moved.copy_(tensor)


def with_extremes(tensor: torch.Tensor, rng: random.Random) -> torch.Tensor:
    limits = torch.iinfo(tensor.dtype) if tensor.dtype is not torch.bool else torch.iinfo(torch.int8)
    changed = tensor.clone()
    if changed.numel():
        number = rng.choice(
            (limits.min, limits.max, -1, 0, 1, 2, 1000, limits.max - 1, limits.min + 1, limits.max // 2)
        )
        changed.view(-1)[rng.randrange(changed.numel())] = max(limits.min, min(limits.max, number, (1 << 63) - 1))
    return changed


def with_special_values(tensor: torch.Tensor, rng: random.Random) -> torch.Tensor:
    changed = tensor.clone()
    if changed.numel():
        number = rng.choice((float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 1e-40, 3e38))
        changed.view(-1)[rng.randrange(changed.numel())] = number
    return changed


def spoilt_array(array: np.ndarray, rng: random.Random) -> Any:
    if array.ndim == 0 or array.dtype == object:  # spoilt before
        return None
    kinds: list[Callable[[], Any]] = [
        lambda: None,
        lambda: array.tolist(),
        lambda: torch.from_numpy(array.copy()),
        lambda: array.astype(rng.choice((np.float32, np.float64, np.int32, np.int64, np.uint8, ">f4", object))),
        lambda: array[:-1],
        lambda: np.concatenate([array, array]),
        lambda: np.repeat(array, 2, axis=0)[::2],
        lambda: array[::-1],
        lambda: array[..., None],
        lambda: array[:0],
        lambda: np.array(5),
        lambda: np.frombuffer(b"\0" + array.tobytes() + b"\0" * 8, array.dtype, array.size, 1).reshape(array.shape),
    ]
    kinds += [lambda: array_with_extremes(array, rng)] * 12
    with np.errstate(invalid="ignore"):
        return rng.choice(kinds)()


def array_with_extremes(array: np.ndarray, rng: random.Random) -> np.ndarray:
    changed = array.copy()
    if not changed.size or changed.dtype == object:
        return changed
    for _ in range(rng.choice((1, 1, 2, 3))):
        at = rng.randrange(changed.size)
        if changed.dtype.kind == "f":
            changed.reshape(-1)[at] = rng.choice((np.nan, np.inf, -np.inf, -1.0, 0.0, 1.0, 2.0, 1e-30, 1e30))
        else:
            limits = np.iinfo(changed.dtype)
            near = (limits.min, limits.max, limits.max - 9, limits.min + 9, 0, 1, 3, 1000)
            changed.reshape(-1)[at] = min(rng.choice(near), limits.max)
    return changed


def run(boundary: Boundary, seeds: Iterable[int]) -> dict[str, tuple[int, int]]:
    """Wrapper -> (calls computed, calls refused); raises AssertionError that names the seed of a wrong one."""
    counts: dict[str, tuple[int, int]] = {}
    for seed in seeds:
        try:
            name, is_refused = boundary.try_one(seed)
        except Exception as cause:
            raise AssertionError(f"seed {seed}: {type(cause).__name__}: {cause}") from cause
        computed, refused = counts.get(name, (0, 0))
        counts[name] = (computed + (not is_refused), refused + is_refused)
    return counts
