"""From a configuration to a front-end: everything of an engine that needs no model in memory. Loads no torch.

Called by `engine.factory` for an engine in one process, and by `AsyncLLM` beside a core in another. Owns no state. A
bad configuration, tokenizer or template is refused here, before any weight is read.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

from quire.config import ModelConfig, QuireConfig
from quire.config.model_family import parse_config
from quire.config.overrides import NO_HF_FIELDS, generation_values, overridden, parse_object
from quire.config.resolve import Decision, UsageContext, resolve
from quire.core.sampling_params import SamplingParams
from quire.engine.generation_defaults import GenerationDefaults, read_generation_defaults
from quire.engine.input_processor import InputLimits, InputProcessor
from quire.engine.named_plugins import block_sizes
from quire.engine.parts import FrontEndParts
from quire.engine.vllm_environment import warn_of_vllm_environment, with_vllm_environment
from quire.errors import TokenizerError
from quire.kernels.native.library import tier_problems
from quire.logger import get_logger
from quire.models.hub import resolve_model_path
from quire.models.model_dir import ModelDir, read_model_dir
from quire.platforms.detect import detect_platform
from quire.platforms.interface import Platform
from quire.tokenization.chat_template import ChatTemplate, load_chat_template, read_template_argument
from quire.tokenization.tokenizer import Tokenizer, check_tokenizer_files, load_tokenizer

logger = get_logger(__name__)


def resolve_config(
    config: QuireConfig, platform: Platform | None = None, usage: UsageContext = UsageContext.LLM_CLASS
) -> tuple[QuireConfig, ModelDir]:
    """As `look_up`, and log what was chosen.

    Raises:
        QuireError: as `look_up`; or the chat template cannot be read, or the tokenizer is missing.
    """
    warn_of_vllm_environment()
    config, model_dir, decisions = look_up(config, platform, usage)
    _check_files(config, model_dir)
    for decision in decisions:
        logger.debug("%s", decision)
    settings = ", ".join(f"{one.name}={one.value}" for one in decisions)
    logger.info("automatic settings (reasons: --print-config): %s", settings)
    return config, model_dir


def look_up(
    config: QuireConfig, platform: Platform | None = None, usage: UsageContext = UsageContext.LLM_CLASS
) -> tuple[QuireConfig, ModelDir, list[Decision]]:
    """The configuration with nothing left open, the model directory it was resolved for, and what was chosen.

    Args:
        platform: the machine; None = looked at now.
        usage: who runs the engine, on which some defaults depend.

    Raises:
        QuireError: the configuration, the model directory or the machine does not allow it.
    """
    config, from_environment = with_vllm_environment(config)
    platform = platform or detect_platform(config.device.device)
    path = resolve_model_path(config.model.model, config.model.revision, config.load.download_dir)
    model_dir = read_model_dir(path)
    overrides = parse_object("hf_overrides", config.model.hf_overrides)
    unused = [
        Decision(f"hf_overrides.{name}", "unused", NO_HF_FIELDS[name]) for name in overrides if name in NO_HF_FIELDS
    ]
    arch = parse_config(overridden(model_dir.config, overrides))
    kernel_tiers = tier_problems() if platform.is_cpu else {}
    sizes = block_sizes(config.device.attention_backend)
    config, decisions = resolve(config, platform, arch, usage=usage, block_sizes=sizes, kernel_tiers=kernel_tiers)
    return dataclasses.replace(config, model_path=str(path)), model_dir, [*from_environment, *unused, *decisions]


def _check_files(config: QuireConfig, model_dir: ModelDir) -> None:
    """Find what is cheap to find wrong with the chat template and the tokenizer before anything is started."""
    model = config.model
    if model.chat_template is not None:
        ChatTemplate(read_template_argument(model.chat_template))
    if not model.skip_tokenizer_init and model.tokenizer is None:
        check_tokenizer_files(model_dir.path)


def build_front_end(
    config: QuireConfig, model_dir: ModelDir, validate_params: Callable[[SamplingParams], None] | None = None
) -> FrontEndParts:
    """What turns requests into messages and steps into text.

    Args:
        config: resolved.
        validate_params: a further check of each request's parameters, for custom logits processors.

    Raises:
        QuireError: the tokenizer, the chat template or generation_config.json is unusable.
    """
    tokenizer = _load_tokenizer(config, model_dir.path)
    chat_template = _load_template(config.model, tokenizer)
    defaults = _read_defaults(config, model_dir, tokenizer)
    return FrontEndParts(
        config=config,
        input_processor=InputProcessor(
            _limits(config), tokenizer, defaults, validate_params, config.structured_outputs
        ),
        tokenizer=tokenizer,
        chat_template=chat_template,
        defaults=defaults,
    )


def _load_tokenizer(config: QuireConfig, model_path: Path) -> Tokenizer | None:
    model = config.model
    if model.skip_tokenizer_init:
        return None
    path = model_path
    is_own = model.tokenizer is None or model.tokenizer == model.model
    if not is_own or model.tokenizer_revision is not None:
        revision = model.tokenizer_revision or (model.revision if is_own else None)
        path = resolve_model_path(model.tokenizer or model.model, revision, config.load.download_dir)
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
    model = config.model
    overrides = parse_object("override_generation_config", model.override_generation_config)
    is_neutral = model.generation_config != "auto"
    return read_generation_defaults(
        generation_values(model_dir.generation_config, overrides, is_neutral=is_neutral),
        None if tokenizer is None else tokenizer.eos_token_id,
        config.arch.eos_token_ids,
        config.arch.vocab_size,
    )


def _limits(config: QuireConfig) -> InputLimits:
    return InputLimits(
        vocab_size=_vocab_size(config),
        max_model_len=config.max_model_len,
        max_logprobs=config.model.max_logprobs,
    )


def _vocab_size(config: QuireConfig) -> int:
    assert config.arch is not None, "resolve() sets the architecture"
    return config.arch.vocab_size
