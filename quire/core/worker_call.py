"""A call of a method or function on every rank: what crosses between processes, and how each rank answers it.

A function crosses by its import name: no code is sent. Called by the front ends and by the workers. No state.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from quire.errors import UnsupportedError, ValidationError
from quire.utils.checks import shown

METHODS = (
    "communication_s", "kv_cache_identity", "kv_cache_specs", "measure_limits", "memory_parts", "weight_bytes",
)  # fmt: skip
"""Methods of the worker that a rank can run by itself; others lead the ranks, or follow."""


class WorkerCall(msgspec.Struct, frozen=True, tag="worker_call"):
    """What every rank is to run.

    Attributes:
        function: name of a method of the worker, or "module:function", which gets the worker first.
        of_model: the function gets the worker's model in place of the worker.
        args, kwargs: further arguments, plain values.
    """

    function: str
    of_model: bool = False
    args: list[Any] = []
    kwargs: dict[str, Any] = {}


def make_call(
    method: str | Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None, *, of_model: bool = False
) -> WorkerCall:
    """The call of a method, or of a function of a module.

    Raises:
        UnsupportedError: the function cannot be imported by its name, or the method is not for every rank.
        ValidationError: an argument is not a plain value, or there is no such method.
    """
    name = method if isinstance(method, str) else _import_name(method)
    if ":" not in name and name not in METHODS:
        raise ValidationError(
            f"method {shown(name)} cannot be called on every rank", field="method",
            hint=f"use one of {', '.join(METHODS)}, or a function of a module that takes the worker",
        )  # fmt: skip
    return WorkerCall(name, of_model, *(_plain(value, "an argument") for value in (list(args), dict(kwargs or {}))))


def answer_call(worker: Any, call: WorkerCall) -> Any:
    """What a worker answers, as a plain value.

    Raises:
        ValidationError: there is no such function, or it returned something that cannot be sent.
        Exception: whatever the function raised.
    """
    module, _, path = call.function.rpartition(":")
    if not module:
        found = getattr(worker, path) if path in METHODS else None
        arguments = call.args
    else:
        try:
            found = importlib.import_module(module)
            for part in path.split("."):
                found = getattr(found, part)
        except (ImportError, AttributeError) as error:
            raise ValidationError(
                f"{call.function} cannot be imported: {error}", hint="put it where every process finds it",
                field="method",
            ) from None  # fmt: skip
        arguments = [worker.model if call.of_model else worker, *call.args]
    if not callable(found):
        raise ValidationError(f"{call.function} is not a function", field="method")
    return _plain(found(*arguments, **call.kwargs), "the result")


def _import_name(function: Callable[..., Any]) -> str:
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "<")
    if not module or module == "__main__" or "<" in name:
        raise UnsupportedError(
            f"{name if '<' not in name else 'this function'} cannot be called on the ranks in other processes: it "
            "crosses by its import name, and no code is sent",
            hint="define it at the top level of a module that can be imported, and give what it needs in args",
            field="method",
        )  # fmt: skip
    return f"{module}:{name}"


def _plain(value: Any, what: str) -> Any:
    try:
        return msgspec.to_builtins(value, builtin_types=(bytes,), str_keys=False)
    except (TypeError, ValueError, RecursionError):
        raise ValidationError(
            f"{what} of collective_rpc has the type {type(value).__name__}, which cannot be sent between processes",
            hint="use numbers, strings, bytes, lists and dicts (of a tensor: .tolist())", field="method",
        ) from None  # fmt: skip
