"""Paths of vLLM's modules that have no file here: some are other paths of one, the others say what to use instead.

`install` puts a finder behind Python's own, which is asked for paths below `quire.compat.vllm` that do not exist. The
paths are those of vLLM 0.33 and of earlier versions that programs still import. No state besides `sys.meta_path`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from quire.compat.absent import AbsentModuleError
from quire.compat.vllm.features import LORA, MULTIMODAL, PARALLEL, POOLING, PROMPT_EMBEDS, WORKERS

PACKAGE = __name__.rpartition(".")[0] + "."


def _not_yet(feature: str) -> str:
    return f"Quire does not support {feature} yet"


_INTERNAL = "internal to vLLM; programs use Quire through LLM, LLMEngine and AsyncLLM (ARCHITECTURE.md has its modules)"
_SERVER = (
    "Quire's server has parts of its own: start it with quire serve, or with "
    "quire.compat.vllm.entrypoints.openai.api_server.main([...])"
)
_PROTOCOL = (
    "requests and responses are checked by Quire's own classes: send JSON to quire serve, or use the types of the "
    "openai package"
)
_PARSERS = (
    "Quire has parsers of its own: choose one with --tool-call-parser and --reasoning-parser, or add one as a plugin "
    "(docs/how-to/plugins.md, quire.parsers.base)"
)
_ENGINE = "import LLMEngine, AsyncLLMEngine, EngineArgs or AsyncEngineArgs from quire.compat.vllm"
_STRUCTURED = "use StructuredOutputsParams of quire.compat.vllm.sampling_params"
_PLUGINS = "plugins of Quire are entry points of packages (docs/how-to/plugins.md)"
_KERNELS = "Quire has kernels of its own"
_OFFLOADING = "use --kv-offloading-size, --kv-disk or a connector (docs/how-to/connectors.md)"
_SPECULATION = "use speculative_config (docs/how-to/speculative-decoding.md)"

ALIASES = {
    "config.compilation": "config",
    "config.kv_events": "config",
    "config.lora": "config",
    "config.pooler": "config",
    "config.profiler": "config",
    "config.speculative": "config",
    "config.structured_outputs": "config",
    "config.vllm": "config",
    "inputs.data": "inputs",
    "inputs.llm": "inputs",
    "tokenizers.protocol": "tokenizers",
    "tokenizers.registry": "tokenizers",
    "transformers_utils.tokenizer": "tokenizers",
}
"""Path -> the module whose names it has."""

INSTEAD = {
    "_C": _KERNELS,
    "_custom_ops": _KERNELS,
    "_ipex_ops": _KERNELS,
    "adapter_commons": _INTERNAL,
    "attention": _INTERNAL,
    "block": _INTERNAL,
    "config": "import settings from quire.compat.vllm.config, or pass them to LLM and EngineArgs",
    "connections": _INTERNAL,
    "core": _INTERNAL,
    "distributed": _not_yet(PARALLEL),
    "engine": _ENGINE,
    "engine.metrics": "use LLM.get_metrics, or quire.compat.vllm.v1.metrics.reader",
    "entrypoints": _SERVER,
    "entrypoints.openai.chat_completion": _PROTOCOL,
    "entrypoints.openai.completion": _PROTOCOL,
    "entrypoints.openai.engine": _PROTOCOL,
    "entrypoints.openai.models": _PROTOCOL,
    "entrypoints.openai.protocol": _PROTOCOL,
    "entrypoints.openai.reasoning_parsers": _PARSERS,
    "entrypoints.openai.responses": _PROTOCOL,
    "entrypoints.openai.serving_embedding": _not_yet(POOLING),
    "entrypoints.openai.serving_pooling": _not_yet(POOLING),
    "entrypoints.openai.serving_score": _not_yet(POOLING),
    "entrypoints.openai.speech_to_text": _not_yet(MULTIMODAL),
    "entrypoints.openai.tool_parsers": _PARSERS,
    "entrypoints.renderer": _INTERNAL,
    "entrypoints.score_utils": _not_yet(POOLING),
    "executor": _not_yet(WORKERS),
    "grpc": _SERVER,
    "inputs": _INTERNAL,
    "ir": _KERNELS,
    "kernels": _KERNELS,
    "logging_utils": "use quire.compat.vllm.logger.init_logger",
    "lora": _not_yet(LORA),
    "model_executor": _INTERNAL,
    "model_executor.guided_decoding": _STRUCTURED,
    "model_inspection": "use quire inspect",
    "parser": _PARSERS,
    "platforms": _INTERNAL,
    "plugins": _PLUGINS,
    "prompt_adapter": _INTERNAL,
    "reasoning": _PARSERS,
    "renderers": _INTERNAL,
    "scalar_type": _KERNELS,
    "scripts": "use the quire command (quire.compat.vllm.entrypoints.cli.main)",
    "sequence": "import Logprob from quire.compat.vllm.logprobs, outputs from quire.compat.vllm.outputs",
    "spec_decode": _SPECULATION,
    "tasks": _INTERNAL,
    "third_party": _INTERNAL,
    "tokenizers": "use get_tokenizer of quire.compat.vllm.tokenizers",
    "tool_parsers": _PARSERS,
    "tracing": "use --otlp-traces-endpoint (docs/how-to/observe.md)",
    "transformers_utils": _INTERNAL,
    "triton_utils": _KERNELS,
    "usage": _INTERNAL,
    "utils": _INTERNAL,
    "v1": _INTERNAL,
    "v1.kv_offload": _OFFLOADING,
    "v1.metrics": "use LLM.get_metrics, or quire.compat.vllm.v1.metrics.reader",
    "v1.pool": _not_yet(POOLING),
    "v1.spec_decode": _SPECULATION,
    "v1.structured_output": _STRUCTURED,
    "vllm_flash_attn": _KERNELS,
    "worker": _not_yet(WORKERS),
    "utils.embeds_utils": _not_yet(PROMPT_EMBEDS),
}
"""Module, which stands for those below it, too -> what to use instead, or the feature that it belongs to."""


class _AliasLoader(Loader):
    """Gives a module the names of another one."""

    def __init__(self, target: str) -> None:
        self._target = target

    def exec_module(self, module: ModuleType) -> None:
        target = importlib.import_module(self._target)
        vars(module).update({name: getattr(target, name) for name in target.__all__})
        module.__doc__ = f"Another path of `{self._target}`."


class MissingModules(MetaPathFinder):
    """Finds other paths of modules; refuses those of vLLM that Quire does not have, with the reason."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """None for modules of others and for names that vLLM does not have.

        Raises:
            AbsentModuleError: the module is known.
        """
        if not fullname.startswith(PACKAGE):
            return None
        name = fullname.removeprefix(PACKAGE)
        if name in ALIASES:
            return ModuleSpec(fullname, _AliasLoader(PACKAGE + ALIASES[name]))
        prefix = name
        while prefix and prefix not in INSTEAD:
            prefix = prefix.rpartition(".")[0]
        if prefix:
            raise AbsentModuleError(f"vllm.{name}: {INSTEAD[prefix]}", name=fullname)
        return None


def install() -> None:
    """Ask `MissingModules` for what no other finder finds."""
    if not any(isinstance(finder, MissingModules) for finder in sys.meta_path):
        sys.meta_path.append(MissingModules())
