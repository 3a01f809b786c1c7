"""vLLM's `inputs`: prompts as dicts with checked keys, which every method of Quire takes as they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

from quire.compat.absent import module_getattr
from quire.compat.vllm.features import MULTIMODAL, PROMPT_EMBEDS

__all__ = ["PromptType", "TextPrompt", "TokensPrompt"]


__path__: list[str] = []  # a package, so that modules below it are looked for


class _Salted(TypedDict, total=False):
    cache_salt: str


class TextPrompt(_Salted):
    """A prompt as text."""

    prompt: str


class _WithText(_Salted, total=False):
    prompt: str


class TokensPrompt(_WithText):
    """A prompt as token ids."""

    prompt_token_ids: list[int]


PromptType = str | list[int] | TextPrompt | TokensPrompt | Mapping[str, Any]

__getattr__ = module_getattr(
    __name__,
    absent_names={
        "EmbedsPrompt": PROMPT_EMBEDS,
        "ExplicitEncoderDecoderPrompt": "encoder-decoder models",
        "DataPrompt": MULTIMODAL,
        "MultiModalDataDict": MULTIMODAL,
    },
)
