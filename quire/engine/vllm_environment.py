"""What becomes of vLLM's environment variables: used where Quire has the thing, named in the log where it has not.

Called when a configuration is resolved, by every start of an engine. No state; `envs` reads the environment.
"""

from __future__ import annotations

import dataclasses

from quire import envs
from quire.config import QuireConfig
from quire.config.resolve import Decision
from quire.errors import ConfigError
from quire.logger import get_logger
from quire.utils.checks import shown

logger = get_logger(__name__)

GIB = 1 << 30
USED = ("VLLM_API_KEY", "VLLM_LOGGING_LEVEL", "VLLM_CPU_KVCACHE_SPACE")
INSTEAD: dict[str, str] = {
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "longer sequences need rope_parameters: --hf-overrides",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "LoRA adapters are not supported",
    "VLLM_ATTENTION_BACKEND": "use --attention-backend",
    "VLLM_BATCH_INVARIANT": "results are always batch-invariant",
    "VLLM_CACHE_ROOT": "use QUIRE_CACHE_DIR",
    "VLLM_CONFIGURE_LOGGING": "use --log-level and --log-format",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "use --num-threads",
    "VLLM_CPU_OMP_THREADS_BIND": "use --num-threads, and taskset to choose the cores",
    "VLLM_DP_MASTER_IP": "use --data-parallel-size",
    "VLLM_DP_MASTER_PORT": "use --data-parallel-size",
    "VLLM_DP_RANK": "use --data-parallel-size",
    "VLLM_DP_SIZE": "use --data-parallel-size",
    "VLLM_DO_NOT_TRACK": "Quire does not collect usage statistics",
    "VLLM_ENABLE_RESPONSES_API_STORE": "use --response-store",
    "VLLM_ENGINE_READY_TIMEOUT_S": "startup without progress is aborted by --hang-timeout-s",
    "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "use --hang-timeout-s",
    "VLLM_HOST_IP": "use --host",
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "use --timeout-keep-alive",
    "VLLM_KEEP_ALIVE_ON_ENGINE_DEATH": "a crashed engine core is restarted: --max-restarts",
    "VLLM_LOG_STATS_INTERVAL": "use --disable-log-stats, or /metrics",
    "VLLM_LOGGING_CONFIG_PATH": "use --log-level and --log-format",
    "VLLM_MAX_N_SEQUENCES": "use --max-answers",
    "VLLM_MAX_STOP_STRINGS": "use --max-stop-strings",
    "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": "use lease_s in --kv-transfer-config, see docs/how-to/prefill-decode.md",
    "VLLM_MOONCAKE_BOOTSTRAP_PORT": "use kv_port in --kv-transfer-config",
    "VLLM_NIXL_ABORT_REQUEST_TIMEOUT": "use lease_s in --kv-transfer-config, see docs/how-to/prefill-decode.md",
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "use kv_ip in --kv-transfer-config",
    "VLLM_NIXL_SIDE_CHANNEL_PORT": "use kv_port in --kv-transfer-config",
    "VLLM_NO_USAGE_STATS": "Quire does not collect usage statistics",
    "VLLM_PP_LAYER_PARTITION": "use --pipeline-layer-partition",
    "VLLM_PLUGINS": "use QUIRE_PLUGINS, names of packages; a plugin is loaded when a setting names it",
    "VLLM_PORT": "use --port",
    "VLLM_SERVER_DEV_MODE": "/sleep needs --enable-sleep-mode, the other routes need --api-key-file",
    "VLLM_SLEEP_WHEN_IDLE": "an idle engine core sleeps",
    "VLLM_TARGET_DEVICE": "use --device",
    "VLLM_TORCH_PROFILER_DIR": "use --profile",
    "VLLM_USE_MODELSCOPE": "pass a directory or an id of the Hugging Face hub",
}


def warn_of_vllm_environment() -> None:
    """Log those of vLLM's variables that are set and change nothing."""
    given = envs.vllm_variables()
    for name in (name for name in given if name in INSTEAD):
        logger.warning("%s has no effect: %s", name, INSTEAD[name])
    others = [name for name in given if name not in INSTEAD and name not in USED]
    if others:
        logger.warning("no effect in Quire: %s", ", ".join(others))


def with_vllm_environment(config: QuireConfig) -> tuple[QuireConfig, list[Decision]]:
    """`config` with what vLLM's variables say where it leaves a setting open, and what they decided.

    Raises:
        ConfigError: VLLM_CPU_KVCACHE_SPACE is not a number of GiB.
    """
    name, cache = "VLLM_CPU_KVCACHE_SPACE", config.cache
    space = envs.vllm_variables().get(name)
    if not space or cache.kv_cache_memory_bytes is not None or cache.num_blocks is not None:
        return config, []
    num_bytes = _bytes_of_gib(name, space)
    if not num_bytes or config.device.device == "cuda":  # 0 asks for the default
        return config, []
    given = dataclasses.replace(cache, kv_cache_memory_bytes=num_bytes)
    return dataclasses.replace(config, cache=given), [Decision("kv_cache_memory_bytes", num_bytes, name)]


def _bytes_of_gib(name: str, text: str) -> int:
    try:
        num_bytes = int(float(text) * GIB)
    except (ValueError, OverflowError):
        num_bytes = -1
    if num_bytes < 0:
        raise ConfigError(f"{name}={shown(text)} is not a number of GiB", hint="write one such as 4", field=name)
    return num_bytes
