"""From a configuration to a running engine: every part built once, in order, and what is cheap checked first.

Called by `LLMEngine.from_config`. Owns no state. A bad configuration, tokenizer or template is refused before any
weight is read.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from quire.attention.selector import preferred_block_sizes
from quire.config import ModelConfig, QuireConfig
from quire.config.hf_config import parse_hf_config
from quire.config.resolve import resolve
from quire.engine.core import EngineCore
from quire.engine.core_client.inproc import InprocClient
from quire.engine.generation_defaults import GenerationDefaults, read_generation_defaults
from quire.engine.input_processor import InputLimits, InputProcessor
from quire.engine.parts import EngineParts
from quire.errors import TokenizerError
from quire.executor.base import Executor
from quire.executor.uniproc import UniProcExecutor
from quire.kernels.native.library import tier_problems
from quire.kv_cache.planning import plan_kv_cache
from quire.logger import get_logger
from quire.models.hub import resolve_model_path
from quire.models.model_dir import ModelDir, read_model_dir
from quire.platforms.detect import detect_platform
from quire.platforms.interface import Platform
from quire.sample.logits_processor import ProcessorSource, load_processors, validate_params
from quire.scheduler.scheduler import Scheduler
from quire.tokenization.chat_template import ChatTemplate, load_chat_template
from quire.tokenization.tokenizer import Tokenizer, load_tokenizer

logger = get_logger(__name__)


def build_parts(config: QuireConfig, *, logits_processors: Sequence[ProcessorSource] = ()) -> EngineParts:
    """Everything an engine is made of.

    Args:
        config: as the user gave it.
        logits_processors: custom processors, classes or "module:Class".

    Raises:
        QuireError: the configuration, the model directory or the machine does not allow it.
    """
    with _phase("configuration"):
        platform = detect_platform(config.device.device)
        config, model_dir = _resolve(config, platform)
        processors = load_processors(logits_processors)
    with _phase("tokenizer and chat template"):
        tokenizer = _load_tokenizer(config, model_dir.path)
        chat_template = _load_template(config.model, tokenizer)
        defaults = _read_defaults(config, model_dir, tokenizer)
    with _phase("model"):
        executor: Executor = UniProcExecutor(config, platform, processors)
    with _phase("KV cache"):
        scheduler = _make_scheduler(config, executor)
    inputs = InputProcessor(
        _limits(config),
        tokenizer,
        defaults,
        (lambda params: validate_params(processors, params)) if processors else None,
    )
    return EngineParts(
        config=config,
        client=InprocClient(EngineCore(executor, scheduler)),
        input_processor=inputs,
        tokenizer=tokenizer,
        chat_template=chat_template,
        defaults=defaults,
    )


def _resolve(config: QuireConfig, platform: Platform) -> tuple[QuireConfig, ModelDir]:
    path = resolve_model_path(config.model.model, config.model.revision, config.load.download_dir)
    model_dir = read_model_dir(path)
    arch = parse_hf_config(model_dir.config)
    kernel_tiers = tier_problems() if platform.is_cpu else {}
    config, decisions = resolve(config, platform, arch, block_sizes=preferred_block_sizes(), kernel_tiers=kernel_tiers)
    for decision in decisions:
        logger.info("%s", decision)
    return dataclasses.replace(config, model_path=str(path)), model_dir


def _load_tokenizer(config: QuireConfig, model_path: Path) -> Tokenizer | None:
    model = config.model
    if model.skip_tokenizer_init:
        return None
    path = model_path
    if model.tokenizer is not None and model.tokenizer != model.model:
        path = resolve_model_path(model.tokenizer, None, config.load.download_dir)
    tokenizer = load_tokenizer(path)
    vocab_size = _vocab_size(config)
    if tokenizer.vocab_size > vocab_size:
        raise TokenizerError(
            f"the tokenizer has ids up to {tokenizer.vocab_size - 1}, the model's vocabulary has {vocab_size}",
            hint="use the tokenizer that belongs to the model",
            field="tokenizer",
        )
    return tokenizer


def _load_template(model: ModelConfig, tokenizer: Tokenizer | None) -> ChatTemplate | None:
    """The chat template, tried out once."""
    if tokenizer is None:
        return None
    template = load_chat_template(tokenizer, model.chat_template)
    if template is not None:
        template.probe()
    return template


def _read_defaults(config: QuireConfig, model_dir: ModelDir, tokenizer: Tokenizer | None) -> GenerationDefaults:
    assert config.arch is not None, "resolve() sets the architecture"
    return read_generation_defaults(
        model_dir.generation_config,
        None if tokenizer is None else tokenizer.eos_token_id,
        config.arch.eos_token_ids,
        config.arch.vocab_size,
        use_sampling=config.model.generation_config == "auto",
    )


def _make_scheduler(config: QuireConfig, executor: Executor) -> Scheduler:
    """Divide the memory that is left, and start the control plane on it."""
    max_model_len = _max_model_len(config)
    specs, available_bytes = executor.kv_cache_specs(), executor.available_kv_cache_bytes()
    kv_cache_config = plan_kv_cache(specs, available_bytes, config.cache, max_model_len)
    executor.initialize_kv_cache(kv_cache_config)
    num_tokens = (kv_cache_config.num_blocks - 1) * kv_cache_config.block_size
    logger.info(
        "KV cache: %d pages of %d tokens, room for %d tokens (%.1f requests of %d)",
        kv_cache_config.num_blocks, kv_cache_config.block_size, num_tokens, num_tokens / max_model_len, max_model_len,
    )  # fmt: skip
    return Scheduler(config.scheduler, config.cache, kv_cache_config, max_model_len)


def _limits(config: QuireConfig) -> InputLimits:
    return InputLimits(
        vocab_size=_vocab_size(config),
        max_model_len=_max_model_len(config),
        max_logprobs=config.model.max_logprobs,
    )


def _vocab_size(config: QuireConfig) -> int:
    assert config.arch is not None, "resolve() sets the architecture"
    return config.arch.vocab_size


def _max_model_len(config: QuireConfig) -> int:
    assert config.model.max_model_len is not None, "resolve() sets max_model_len"
    return config.model.max_model_len


@contextmanager
def _phase(name: str) -> Iterator[None]:
    """Log how long a phase of the start took."""
    start = time.perf_counter()
    yield
    logger.info("%s ready in %.2f s", name, time.perf_counter() - start)
