"""vLLM's `version`: the release whose names these are, and the Quire that answers."""

from __future__ import annotations

from quire.version import __version__ as quire_version

__all__ = ["__version__", "__version_tuple__"]

__version_tuple__ = (0, 33, 0)
__version__ = f"0.33.0+quire.{quire_version}"
