"""POST /v1/completions: its fields. No state."""

from __future__ import annotations

from typing import Any

from quire.config.server import LimitsConfig
from quire.core.sampling_params import SamplingParams
from quire.errors import ValidationError
from quire.server.chat.protocol.generation import (
    NO_EFFECT,
    NOT_YET,
    GenerationFields,
    check_common,
    sampling_params,
)
from quire.server.chat.protocol.reading import RequestFields
from quire.utils.checks import check_int, wrong_type

DEFAULT_MAX_TOKENS = 16


class CompletionRequest(GenerationFields, kw_only=True):
    """A completion; `prompt` is a text, token ids, or a list of either."""

    prompt: str | list[Any] | None = None
    logprobs: int | None = None


COMPLETION_FIELDS = RequestFields(
    CompletionRequest, {**NOT_YET, "suffix": (), "thinking_token_budget": (-1,)}, NO_EFFECT
)


def completion_prompts(request: CompletionRequest, limits: LimitsConfig) -> list[str | list[int]]:
    """The prompts, one or many; ids are checked where they are used.

    Raises:
        ValidationError: there is none, too many, or one is neither text nor ids.
    """
    prompt = request.prompt
    if prompt is None or prompt in ("", []):
        raise ValidationError(
            "prompt is missing or empty", hint="send at least one character or token id", field="prompt"
        )
    if isinstance(prompt, str):
        return [prompt]
    if type(prompt[0]) is int:
        return [prompt]
    if len(prompt) > limits.max_completion_prompts:
        raise ValidationError(
            f"prompt has {len(prompt)} entries, at most {limits.max_completion_prompts} are allowed", field="prompt"
        )
    for index, one in enumerate(prompt):
        if not isinstance(one, (str, list)) or type(one) is not type(prompt[0]):
            raise wrong_type(f"prompt[{index}]", one, "a string or a list of token ids, like the first prompt")
        if not one:
            raise ValidationError(f"prompt[{index}] is empty", field="prompt")
    return prompt


def completion_params(
    request: CompletionRequest, defaults: dict[str, Any], limits: LimitsConfig, num_prompts: int
) -> SamplingParams:
    """How tokens are chosen; `max_tokens` 0 (only with echo) is asked of the engine as 1 and left out of the answer."""
    check_common(request, limits, num_prompts)
    max_tokens = request.max_tokens
    if max_tokens is None:
        max_tokens = defaults.get("max_tokens", DEFAULT_MAX_TOKENS)
    if max_tokens == 0 and request.echo:
        max_tokens = 1
    check_int("max_tokens", max_tokens, 1)
    if request.logprobs is not None:
        check_int("logprobs", request.logprobs, -1)
    prompt_logprobs = request.prompt_logprobs
    if prompt_logprobs is None and request.echo:
        prompt_logprobs = request.logprobs
    return sampling_params(
        request, defaults, max_tokens=max_tokens, logprobs=request.logprobs, prompt_logprobs=prompt_logprobs
    )
