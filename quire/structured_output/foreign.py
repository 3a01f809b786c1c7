"""Imports of libraries that import more than they need.

xgrammar imports transformers (minutes on a slow disk, and nothing of it is used here), and its foreign-function layer
builds a C++ extension when it finds torch. Both are kept out while it is imported. lm-format-enforcer asks for torch,
which a compile worker does not load.
"""

from __future__ import annotations

import importlib
import os
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_NO_EXTENSION = "TVM_FFI_DISABLE_TORCH_C_DLPACK"


class _Anything:
    """An empty class that takes whatever it is made of."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass


class _StubModule(types.ModuleType):
    """A module in which every name is an empty class."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = type(name, (_Anything,), {})
        setattr(self, name, found)
        return found


@contextmanager
def stub_modules(*names: str) -> Iterator[None]:
    """While this holds, modules of these names that are not loaded yet are empty ones."""
    missing = [name for name in names if name not in sys.modules]
    for name in missing:
        sys.modules[name] = _StubModule(name)
    try:
        yield
    finally:
        for name in missing:
            del sys.modules[name]


def import_xgrammar() -> Any:
    """The module `xgrammar`, its masks being numpy arrays; loads neither torch nor transformers."""
    if "xgrammar" in sys.modules:
        return sys.modules["xgrammar"]
    before = os.environ.get(_NO_EXTENSION)
    os.environ[_NO_EXTENSION] = "1"
    try:
        with _absent("torch"):
            importlib.import_module("tvm_ffi")
        with stub_modules("torch", "transformers"):
            return importlib.import_module("xgrammar")
    finally:
        if before is None:
            del os.environ[_NO_EXTENSION]
        else:
            os.environ[_NO_EXTENSION] = before


def import_lm_format_enforcer() -> Any:
    """The module `lmformatenforcer`; does not load torch."""
    if "lmformatenforcer" in sys.modules:
        return sys.modules["lmformatenforcer"]
    with _absent("torch"):
        return importlib.import_module("lmformatenforcer")


@contextmanager
def _absent(name: str) -> Iterator[None]:
    """While this holds, importing `name` fails, unless it is loaded already."""
    if name in sys.modules:
        yield
        return
    sys.modules[name] = None  # type: ignore[assignment]
    try:
        yield
    finally:
        del sys.modules[name]
