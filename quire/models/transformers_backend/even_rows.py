"""Torch's vectorized functions, with the same bits for a row whatever rows are beside it.

Some functions have one formula for whole vectors and another for what is left at the end of a tensor. Where rows do not
fill vectors, an element's bits then depend on how many rows there are. Here such rows are padded.
Used by `probe`, which finds the models that need it, and by `model`. No state but what was noted.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

ROW_UNIT = 64
"""Elements that fill vectors in every type and on every processor."""
ACTIVATIONS = frozenset({
    functional.silu, functional.gelu, functional.mish, functional.elu, functional.selu, functional.celu,
    functional.softplus, functional.sigmoid, torch.sigmoid, torch.Tensor.sigmoid, torch.exp2, torch.Tensor.exp2,
})  # fmt: skip
POWERS = frozenset({torch.pow, torch.Tensor.pow, torch.Tensor.__pow__})
EVEN_EXPONENTS = (2, 3)
ROOTS = frozenset({torch.rsqrt, torch.Tensor.rsqrt})
"""Uneven in bfloat16 alone, which norms rarely take roots in."""


def is_uneven(func: Any, args: tuple[Any, ...]) -> bool:
    """True for a call whose result may depend on what is beside a row."""
    if not args or not isinstance(args[0], torch.Tensor) or not args[0].dim() or args[0].shape[-1] % ROW_UNIT == 0:
        return False
    if func in POWERS:
        return len(args) > 1 and isinstance(args[1], int | float) and args[1] not in EVEN_EXPONENTS
    return func in ACTIVATIONS or (func in ROOTS and args[0].dtype is torch.bfloat16)


class NoteUneven(TorchFunctionMode):
    """Notes whether a model makes such calls.

    Attributes:
        found: it does.
    """

    found = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """As without."""
        self.found = self.found or is_uneven(func, args)
        return func(*args, **(kwargs or {}))


class EvenRows(TorchFunctionMode):
    """Pads the rows of such calls."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The function, on rows that fill vectors."""
        if not is_uneven(func, args):
            return func(*args, **(kwargs or {}))
        x, options = args[0], {name: value for name, value in (kwargs or {}).items() if name != "inplace"}
        padded = functional.pad(x, (0, -x.shape[-1] % ROW_UNIT))
        return func(padded, *args[1:], **options)[..., : x.shape[-1]].contiguous()
