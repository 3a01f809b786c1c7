"""Kernels around other kernels: operations that they do not change are those within. Called when a class is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quire.layers.kernels import LayerKernels


def delegate_operations(kind: type[LayerKernels]) -> None:
    """Give a class that keeps other kernels as `_kernels` the operations that it does not define.

    Operations with a default of their own would hide those of the kernels within.
    """
    for name in vars(LayerKernels).keys() - vars(kind).keys():
        if not name.startswith("_") and name != "shards":
            setattr(kind, name, _of_kernels_within(name))


def _of_kernels_within(name: str) -> Callable[..., Any] | property:
    if not callable(getattr(LayerKernels, name)):
        return property(lambda self: getattr(self._kernels, name))

    def operation(self: Any, *args: Any, **options: Any) -> Any:
        return getattr(self._kernels, name)(*args, **options)

    return operation
