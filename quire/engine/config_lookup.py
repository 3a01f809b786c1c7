"""From what the user gave to a resolved configuration: the machine and the model directory are looked at.

Called before an engine core is started, which waits for it: imports little, and neither torch nor what a front-end is
made of. A bad configuration, model directory or template is refused here, before any weight is read. Owns no state.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path

from quire.config import QuireConfig
from quire.config.json_object import parse_object
from quire.config.model import LONGEST
from quire.config.overrides import NO_HF_FIELDS
from quire.config.resolve import Decision, UsageContext, resolve
from quire.engine.named_plugins import block_sizes
from quire.engine.shipped_drafters import with_shipped_drafter
from quire.engine.vllm_environment import warn_of_vllm_environment, with_vllm_environment
from quire.kernels.native.library import tier_problems
from quire.logger import get_logger
from quire.models.hub import EMBEDDED_MODEL, resolve_model_path
from quire.models.model_dir import ModelDir, read_model_dir
from quire.platforms.detect import detect_platform
from quire.platforms.interface import Platform
from quire.tokenization.files import check_tokenizer_files

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
    if config.model.model_impl == "transformers" and config.arch is not None:
        logger.warning("%s is computed by its class in transformers: slower than Quire's own", config.arch.architecture)
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
    config = with_shipped_drafter(config, path)
    model_dir = read_model_dir(path)
    overrides = parse_object("hf_overrides", config.model.hf_overrides)
    unused = [
        Decision(f"hf_overrides.{name}", "unused", NO_HF_FIELDS[name]) for name in overrides if name in NO_HF_FIELDS
    ]
    arch = model_dir.arch(overrides, config.model.model_impl)
    kernel_tiers = tier_problems() if platform.is_cpu else {}
    sizes = block_sizes(config.device.attention_backend)
    rules = partial(resolve, platform=platform, arch=arch, usage=usage, block_sizes=sizes, kernel_tiers=kernel_tiers)
    if config.model.max_model_len == LONGEST:
        from quire.engine.memory_estimate import resolve_longest  # late: few need it

        config, decisions = resolve_longest(config, path, platform, rules)
    else:
        config, decisions = rules(config)
    chosen = [*from_environment, *unused, *decisions]
    reasons = tuple((one.name, one.reason) for one in chosen)
    return dataclasses.replace(config, model_path=str(path), reasons=reasons), model_dir, chosen


def _check_files(config: QuireConfig, model_dir: ModelDir) -> None:
    """Find what is cheap to find wrong with the chat template and the tokenizer before anything is started."""
    model = config.model
    if config.supervision.crash_reports not in ("auto", "none"):
        from quire.engine.crash_reports import check_reports_directory  # late: for a setting that is rarely given

        check_reports_directory(config)
    if model.model == EMBEDDED_MODEL or Path(model.model).expanduser().exists():
        for name, value in (("revision", model.revision), ("download_dir", config.load.download_dir)):
            if value is not None:
                logger.warning("%s has no effect: the model is not downloaded from the hub; leave it out", name)
    if model.chat_template is not None:
        from quire.tokenization.chat_template import ChatTemplate, read_template_argument  # late: loads Jinja

        ChatTemplate(read_template_argument(model.chat_template))
    if not model.skip_tokenizer_init and model.tokenizer is None:
        check_tokenizer_files(model_dir.path)
