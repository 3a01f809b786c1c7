"""From a resolved configuration to a front-end: everything of an engine that needs no model in memory. Loads no torch.

Called by `engine.factory` for an engine in one process, and by `AsyncLLM` beside a core in another. Owns no state.
"""

from __future__ import annotations

from collections.abc import Callable

from quire.config import ModelConfig, QuireConfig
from quire.config.json_object import parse_object
from quire.config.overrides import generation_values
from quire.core.sampling_params import SamplingParams
from quire.engine.generation_defaults import GenerationDefaults, read_generation_defaults
from quire.engine.input_processor import InputLimits, InputProcessor
from quire.engine.parts import FrontEndParts
from quire.errors import TokenizerError
from quire.models.hub import resolve_model_path
from quire.models.model_dir import ModelDir
from quire.tokenization.chat_template import ChatTemplate, load_chat_template
from quire.tokenization.tokenizer import Tokenizer, load_tokenizer, tokenizer_of_file


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
    tokenizer = _load_tokenizer(config, model_dir)
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


def _load_tokenizer(config: QuireConfig, model_dir: ModelDir) -> Tokenizer | None:
    model = config.model
    if model.skip_tokenizer_init:
        return None
    is_own = model.tokenizer is None or model.tokenizer == model.model
    if not is_own or model.tokenizer_revision is not None:
        revision = model.tokenizer_revision or (model.revision if is_own else None)
        tokenizer = load_tokenizer(
            resolve_model_path(model.tokenizer or model.model, revision, config.load.download_dir)
        )
    elif model_dir.gguf is not None:
        tokenizer = tokenizer_of_file(model_dir.gguf)  # its header is read already
    else:
        tokenizer = load_tokenizer(model_dir.path)
    vocab_size = _vocab_size(config)
    if tokenizer.vocab_size > vocab_size:
        raise TokenizerError(
            f"the tokenizer has ids up to {tokenizer.vocab_size - 1}, the model's vocabulary has {vocab_size}",
            hint="use the tokenizer that belongs to the model",
            field="tokenizer",
        )
    return tokenizer


def _load_template(model: ModelConfig, tokenizer: Tokenizer | None) -> ChatTemplate | None:
    """The chat template, tried out once. So is the one for tools."""
    if tokenizer is None:
        return None
    template = load_chat_template(tokenizer, model.chat_template)
    if template is not None:
        for one in {template, template.with_tools}:
            one.probe()
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
        () if tokenizer is None else tokenizer.turn_end_ids,
    )


def _limits(config: QuireConfig) -> InputLimits:
    return InputLimits(
        vocab_size=_vocab_size(config),
        max_model_len=config.max_model_len,
        max_logprobs=config.model.max_logprobs,
        has_connector=config.kv_transfer is not None,
    )


def _vocab_size(config: QuireConfig) -> int:
    assert config.arch is not None, "resolve() sets the architecture"
    return config.arch.vocab_size
