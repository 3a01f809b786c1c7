"""Quire: an LLM inference and serving engine.

Importing the package is cheap: no torch, no device query. Public names load on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quire.version import __version__

if TYPE_CHECKING:
    from quire.core.beam_search import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
    from quire.core.outputs import CompletionOutput, Logprob, RequestOutput
    from quire.core.sampling_params import RequestOutputKind, SamplingParams
    from quire.core.tenancy import TenantShare
    from quire.engine.llm_engine import LLMEngine
    from quire.entrypoints.llm import LLM

_LAZY = {
    "LLM": "quire.entrypoints.llm",
    "LLMEngine": "quire.engine.llm_engine",
    "SamplingParams": "quire.core.sampling_params",
    "BeamSearchOutput": "quire.core.beam_search",
    "BeamSearchParams": "quire.core.beam_search",
    "BeamSearchSequence": "quire.core.beam_search",
    "RequestOutputKind": "quire.core.sampling_params",
    "TenantShare": "quire.core.tenancy",
    "RequestOutput": "quire.core.outputs",
    "CompletionOutput": "quire.core.outputs",
    "Logprob": "quire.core.outputs",
}

__all__ = [
    "LLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CompletionOutput",
    "LLMEngine",
    "Logprob",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "TenantShare",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """Load a public name on first use (PEP 562)."""
    if name not in _LAZY:
        raise AttributeError(f"module 'quire' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)
