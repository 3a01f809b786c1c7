"""What to say where another engine has a name or a module that Quire has not: the name and the missing feature.

Called by the modules of `quire.compat` and by `quire` itself. No state.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from quire.errors import UnsupportedError


class AbsentFeatureError(ImportError):
    """A name was imported that stands for a feature that Quire does not have."""


class AbsentModuleError(AbsentFeatureError, ModuleNotFoundError):
    """A module was imported that Quire does not have; its message says what to use instead."""


def absent(name: str, feature: str) -> AbsentFeatureError:
    """The error for `name`, which needs `feature` (a plural or a mass noun: "pooling models")."""
    return AbsentFeatureError(f"{name}: Quire does not support {feature} yet", name=name)


def absent_class(name: str, feature: str) -> type:
    """A class that can be imported and named in annotations; making one is an `UnsupportedError` with the feature."""

    def refuse(self: object, *_: Any, **__: Any) -> None:
        raise UnsupportedError(f"{name}: Quire does not support {feature} yet", hint=f"leave out {name}", field=name)

    return type(name, (), {"__init__": refuse, "__doc__": f"Not supported: Quire does not support {feature} yet."})


def absent_method(owner: str, name: str, why: str) -> Callable[..., NoReturn]:
    """A method of class `owner` that is an `UnsupportedError` with the reason when it is called."""

    def refuse(self: object, *_: Any, **__: Any) -> NoReturn:
        raise UnsupportedError(f"{owner}.{name}: {why}", hint=f"do not call {name}", field=name)

    refuse.__name__, refuse.__doc__ = name, f"Not supported: {why}."
    return refuse


def module_getattr(
    module: str, *, absent_names: Mapping[str, str], lazy: Mapping[str, str] | None = None
) -> Callable[[str], Any]:
    """A module's `__getattr__` (PEP 562).

    Args:
        module: its name.
        absent_names: name -> the feature that it would need; importing it is an `AbsentFeatureError`.
        lazy: name -> the module that has it, imported when first asked for.
    """

    def get(name: str) -> Any:
        if lazy is not None and name in lazy:
            return getattr(importlib.import_module(lazy[name]), name)
        if name in absent_names:
            raise absent(name, absent_names[name])
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return get
