"""Quire: an LLM inference and serving engine.

Importing the package is cheap: no torch, no device query. Public names load on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quire.version import __version__

if TYPE_CHECKING:
    from quire.compat.vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
    from quire.compat.vllm.engine.async_llm_engine import AsyncLLMEngine
    from quire.compat.vllm.inputs import PromptType
    from quire.core.beam_search import BeamSearchOutput, BeamSearchParams, BeamSearchSequence
    from quire.core.inputs import TextPrompt, TokensPrompt
    from quire.core.outputs import CompletionOutput, Logprob, RequestOutput
    from quire.core.sampling_params import RequestOutputKind, SamplingParams
    from quire.core.structured_outputs import StructuredOutputsParams
    from quire.core.tenancy import TenantShare
    from quire.engine.async_llm import AsyncLLM
    from quire.engine.llm_engine import LLMEngine
    from quire.entrypoints.llm import LLM

_LAZY = {
    "LLM": "quire.entrypoints.llm",
    "AsyncLLM": "quire.engine.async_llm",
    "AsyncEngineArgs": "quire.compat.vllm.engine.arg_utils",
    "AsyncLLMEngine": "quire.compat.vllm.engine.async_llm_engine",
    "EngineArgs": "quire.compat.vllm.engine.arg_utils",
    "PromptType": "quire.compat.vllm.inputs",
    "StructuredOutputsParams": "quire.core.structured_outputs",
    "TextPrompt": "quire.core.inputs",
    "TokensPrompt": "quire.core.inputs",
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
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "BeamSearchOutput",
    "BeamSearchParams",
    "BeamSearchSequence",
    "CompletionOutput",
    "EngineArgs",
    "LLMEngine",
    "Logprob",
    "PromptType",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "StructuredOutputsParams",
    "TenantShare",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
]


def __getattr__(name: str) -> Any:
    """Load a public name on first use (PEP 562)."""
    import importlib

    if name not in _LAZY:
        # Late: names that users of vLLM import and Quire does not have say which feature they need.
        from quire.compat.absent import absent
        from quire.compat.vllm.features import TOP_LEVEL

        if name in TOP_LEVEL:
            raise absent(name, TOP_LEVEL[name])
        raise AttributeError(f"module 'quire' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)
