"""OperationWatch: which operations of torch a step computes beside the kernels that are recorded."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Operations of torch whose results no kernel reads: checks of ids.
_CHECKS = ("aten::aminmax", "aten::item", "aten::_local_scalar_dense")


class OperationWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the operations of torch, other than views, that a recorded step would leave out.

    Attributes:
        names: of these operations.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Asked by torch: whether to keep its compiler out, for which it would import that in the first step."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # `reshape` counts as a view, and copies where it cannot be one.
        is_view = func.is_view and _memory_of(result) in [_memory_of(arg) for arg in args]
        if not is_view and func.name() not in _CHECKS:
            self.names.add(func.name())
        return result


def _memory_of(value: Any) -> int | None:
    """Where the memory of a tensor, or of the first of several, begins."""
    first = value[0] if isinstance(value, (list, tuple)) and value else value
    return first.untyped_storage().data_ptr() if isinstance(first, torch.Tensor) else None
