"""vLLM's Python API over Quire: replace `vllm` by `quire.compat.vllm` in a program's imports.

Names and module paths are those of vLLM 0.33. What exists is Quire's own class, or a thin one over it; what cannot be
there yet says which feature it needs, or what to use instead, when it is imported or called. Names load on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.compat.absent import module_getattr
from quire.compat.vllm.features import TOP_LEVEL
from quire.compat.vllm.missing import install
from quire.compat.vllm.version import __version__, __version_tuple__

if TYPE_CHECKING:
    from quire.compat.vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
    from quire.compat.vllm.engine.async_llm_engine import AsyncLLMEngine
    from quire.compat.vllm.engine.llm_engine import LLMEngine
    from quire.compat.vllm.inputs import PromptType, TextPrompt, TokensPrompt
    from quire.core.outputs import CompletionOutput, RequestOutput
    from quire.core.sampling_params import SamplingParams
    from quire.entrypoints.llm import LLM

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLMEngine",
    "CompletionOutput",
    "EngineArgs",
    "LLMEngine",
    "PromptType",
    "RequestOutput",
    "SamplingParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
    "__version_tuple__",
]

_LAZY = {
    "LLM": "quire.entrypoints.llm",
    "LLMEngine": "quire.compat.vllm.engine.llm_engine",
    "AsyncLLMEngine": "quire.compat.vllm.engine.async_llm_engine",
    "EngineArgs": "quire.compat.vllm.engine.arg_utils",
    "AsyncEngineArgs": "quire.compat.vllm.engine.arg_utils",
    "PromptType": "quire.compat.vllm.inputs",
    "TextPrompt": "quire.compat.vllm.inputs",
    "TokensPrompt": "quire.compat.vllm.inputs",
    "SamplingParams": "quire.core.sampling_params",
    "RequestOutput": "quire.core.outputs",
    "CompletionOutput": "quire.core.outputs",
}

install()
__getattr__ = module_getattr(__name__, absent_names=TOP_LEVEL, lazy=_LAZY)
