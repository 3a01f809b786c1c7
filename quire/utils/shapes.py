"""Checks the shape comments of public functions: `"num_tokens num_heads 64"` against a tensor. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from quire.errors import ShapeError


class HasShape(Protocol):
    """A torch tensor or a numpy array."""

    @property
    def shape(self) -> Sequence[int]:
        """Its sizes."""


def check_shapes(**tensors: tuple[HasShape, str]) -> dict[str, int]:
    """Compare each tensor with its shape comment and return the sizes by name.

    A comment lists one word per dimension: a number is that size, a name is one size wherever it appears, and "*" is
    any size. `check_shapes(query=(query, "num_tokens num_heads 64"), key=(key, "num_tokens num_kv_heads 64"))`.

    Raises:
        ShapeError: names the tensor, its shape and what was expected.
    """
    sizes: dict[str, int] = {}
    for name, (tensor, comment) in tensors.items():
        words, shape = comment.split(), tuple(tensor.shape)
        matches = len(words) == len(shape) and all(
            word == "*" or size == (int(word) if word.isdigit() else sizes.setdefault(word, size))
            for word, size in zip(words, shape, strict=True)
        )
        if not matches:
            known = ", ".join(f"{word} = {sizes[word]}" for word in words if word in sizes)
            hint = f"the other tensors give {known}" if known else None
            raise ShapeError(f"{name} has shape {list(shape)}, expected [{', '.join(words)}]", hint=hint, field=name)
    return sizes
