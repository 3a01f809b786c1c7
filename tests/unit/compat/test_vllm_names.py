"""vLLM's names and module paths: those that exist are Quire's, the others name the feature they need."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from quire.compat.absent import AbsentFeatureError

PRESENT = {
    "": "LLM LLMEngine AsyncLLMEngine EngineArgs AsyncEngineArgs SamplingParams RequestOutput CompletionOutput "
    "TextPrompt TokensPrompt PromptType __version__",
    "beam_search": "BeamSearchOutput BeamSearchSequence",
    "config": "VllmConfig StructuredOutputsConfig KVEventsConfig",
    "distributed": "cleanup_dist_env_and_memory",
    "engine.arg_utils": "EngineArgs AsyncEngineArgs",
    "engine.async_llm_engine": "AsyncLLMEngine",
    "engine.llm_engine": "LLMEngine",
    "engine.protocol": "EngineClient",
    "entrypoints.llm": "LLM",
    "entrypoints.openai.api_server": "main",
    "entrypoints.launchers.launcher": "serve_http",
    "entrypoints.serve.utils.api_utils": "with_cancellation",
    "envs": "VLLM_HTTP_TIMEOUT_KEEP_ALIVE",
    "exceptions": "VLLMValidationError",
    "inputs": "TextPrompt TokensPrompt PromptType",
    "logger": "init_logger",
    "logprobs": "Logprob",
    "outputs": "RequestOutput CompletionOutput",
    "platforms": "current_platform",
    "sampling_params": "SamplingParams RequestOutputKind SamplingType StructuredOutputsParams BeamSearchParams",
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
