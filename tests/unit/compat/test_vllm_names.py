"""vLLM's names and module paths: those that exist are Quire's, the others name the feature they need."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from quire.compat.absent import AbsentFeatureError
from quire.errors import ChatTemplateError

PRESENT = {
    "": "LLM LLMEngine AsyncLLMEngine EngineArgs AsyncEngineArgs SamplingParams RequestOutput CompletionOutput "
    "TextPrompt TokensPrompt PromptType __version__",
    "beam_search": "BeamSearchOutput BeamSearchSequence",
    "collect_env": "main",
    "config": "VllmConfig StructuredOutputsConfig KVEventsConfig",
    "config.vllm": "VllmConfig",
    "distributed": "cleanup_dist_env_and_memory",
    "distributed.kv_events": "BlockStored BlockRemoved AllBlocksCleared KVEventBatch",
    "engine.arg_utils": "EngineArgs AsyncEngineArgs",
    "engine.async_llm_engine": "AsyncLLMEngine",
    "engine.llm_engine": "LLMEngine",
    "engine.protocol": "EngineClient",
    "entrypoints.chat_utils": "load_chat_template ChatCompletionMessageParam",
    "entrypoints.cli.main": "main",
    "entrypoints.llm": "LLM",
    "entrypoints.openai.api_server": "main",
    "entrypoints.openai.run_batch": "main",
    "entrypoints.launchers.launcher": "serve_http",
    "entrypoints.serve.utils.api_utils": "with_cancellation",
    "envs": "VLLM_HTTP_TIMEOUT_KEEP_ALIVE",
    "exceptions": "VLLMValidationError",
    "inputs": "TextPrompt TokensPrompt PromptType",
    "inputs.data": "TextPrompt TokensPrompt PromptType",
    "logger": "init_logger",
    "logprobs": "Logprob",
    "outputs": "RequestOutput CompletionOutput",
    "platforms": "current_platform",
    "sampling_params": "SamplingParams RequestOutputKind SamplingType StructuredOutputsParams BeamSearchParams",
    "tokenizers": "get_tokenizer",
    "transformers_utils.tokenizer": "get_tokenizer AnyTokenizer",
    "usage.usage_lib": "UsageContext",
    "utils": "FlexibleArgumentParser random_uuid get_open_port",
    "utils.argparse_utils": "FlexibleArgumentParser",
    "utils.network_utils": "get_ip get_open_port",
    "utils.system_utils": "set_ulimit",
    "v1.core.kv_cache_utils": "ExternalBlockHash",
    "v1.engine.async_llm": "AsyncLLM",
    "v1.engine.llm_engine": "LLMEngine",
    "v1.metrics.reader": "Counter Gauge Histogram Vector",
    "version": "__version__",
}
ABSENT = {
    "PoolingParams": "pooling models",
    "EmbeddingRequestOutput": "pooling models",
    "ModelRegistry": "model classes",
    "initialize_ray_cluster": "Ray",
    "outputs.ScoringOutput": "pooling models",
    "logprobs.FlatLogprobs": "flat log-probabilities",
    "inputs.EmbedsPrompt": "embeddings",
    "pooling_params.PoolingParams": "pooling models",
    "assets.image.ImageAsset": "image",
    "multimodal.utils.fetch_image": "image",
    "distributed.parallel_state.get_world_group": "groups of processes",
    "distributed.weight_transfer.nccl_engine.NCCLTrainerInitInfo": "weight updates",
    "model_executor.models.ModelRegistry": "model classes",
    "v1.core.kv_cache_manager.KVCacheManager": "internal module",
    "v1.core.kv_cache_utils.BlockHash": "internal module",
    "sampling_params.GuidedDecodingParams": "StructuredOutputsParams",
    "entrypoints.chat_utils.parse_chat_messages": "LLM.chat takes messages",
    "entrypoints.openai.api_server.run_server": "quire serve",
}
MODULES_ELSEWHERE = {
    "entrypoints.openai.protocol": "types of the openai package",
    "entrypoints.openai.chat_completion.protocol": "types of the openai package",
    "entrypoints.openai.serving_chat": "quire serve",
    "entrypoints.openai.tool_parsers.abstract_tool_parser": "--tool-call-parser",
    "entrypoints.utils": "quire serve",
    "reasoning": "--reasoning-parser",
    "config.model": "quire.compat.vllm.config",
    "engine.metrics": "get_metrics",
    "platforms.interface": "internal to vLLM",
    "tokenizers.mistral": "get_tokenizer",
    "transformers_utils.config": "internal to vLLM",
    "v1.outputs": "internal to vLLM",
    "worker.worker": "collective_rpc",
    "plugins": "docs/how-to/plugins.md",
    "_custom_ops": "kernels of its own",
    "lora.models": "LoRA adapters",
}


@pytest.mark.parametrize("module", PRESENT)
def test_a_name_that_exists_is_found_where_vllm_has_it(module):
    found = importlib.import_module(".".join(filter(None, ("quire.compat.vllm", module))))
    for name in PRESENT[module].split():
        assert getattr(found, name) is not None


@pytest.mark.parametrize("path", ABSENT)
def test_a_name_that_is_missing_names_the_feature(path):
    module, _, name = path.rpartition(".")
    with pytest.raises(ImportError, match=ABSENT[path]) as caught:
        __import__(".".join(filter(None, ("quire.compat.vllm", module))), fromlist=[name])
        getattr(importlib.import_module(".".join(filter(None, ("quire.compat.vllm", module)))), name)
    assert isinstance(caught.value, AbsentFeatureError)


@pytest.mark.parametrize("module", MODULES_ELSEWHERE)
def test_a_module_that_is_missing_says_what_to_use(module):
    with pytest.raises(ModuleNotFoundError, match=MODULES_ELSEWHERE[module]) as caught:
        importlib.import_module(f"quire.compat.vllm.{module}")
    assert isinstance(caught.value, AbsentFeatureError) and str(caught.value).startswith("vllm.")


def test_a_module_that_no_vllm_has_is_plainly_not_found():
    with pytest.raises(ModuleNotFoundError) as caught:
        importlib.import_module("quire.compat.vllm.no_such_module")
    assert not isinstance(caught.value, AbsentFeatureError)


def test_a_chat_template_is_loaded_from_a_path_or_taken_as_it_is(tmp_path: Path):
    from quire.compat.vllm.entrypoints.chat_utils import load_chat_template

    (tmp_path / "chat.jinja").write_text("{{ messages }}")
    assert load_chat_template(tmp_path / "chat.jinja") == load_chat_template("{{ messages }}") == "{{ messages }}"
    assert load_chat_template(None) is None and load_chat_template("plain", is_literal=True) == "plain"
    with pytest.raises(ChatTemplateError):
        load_chat_template("plain")


def test_an_unknown_name_is_an_attribute_error():
    import quire.compat.vllm

    assert not hasattr(quire.compat.vllm, "no_such_name")


def test_quire_itself_has_the_names_that_users_import_from_vllm():
    import quire

    for name in ("AsyncLLM", "AsyncLLMEngine", "EngineArgs", "AsyncEngineArgs", "TextPrompt", "TokensPrompt"):
        assert getattr(quire, name) is not None
    with pytest.raises(ImportError, match="PoolingParams: Quire does not support pooling models"):
        from quire import PoolingParams  # noqa: F401


def test_importing_the_package_loads_no_heavy_library():
    code = (
        "import sys, quire.compat.vllm\n"
        "heavy = {'torch', 'numpy', 'tokenizers', 'starlette', 'zmq'} & set(sys.modules)\n"
        "from quire.compat.vllm import EngineArgs, SamplingParams; print(sorted(heavy | {'torch'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
