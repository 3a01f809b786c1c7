"""InputProcessor: whatever the user passed, validated and tokenized into a form the engine core takes.

Called by `LLMEngine.add_request`. Owns nothing that changes. Everything that can be wrong with a request is found
here, before it is sent to the engine core.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from quire.config.structured_outputs import StructuredOutputsConfig
from quire.core.beam_search import num_top_tokens
from quire.core.inputs import TextPrompt, TokensPrompt, parse_prompt, with_cache_salt
from quire.core.request_options import DEFAULT_OPTIONS, RequestOptions
from quire.core.sampling_params import KV_TRANSFER_PARAMS, SamplingParams
from quire.core.structured_outputs import StructuredOutputsParams
from quire.engine.generation_defaults import GenerationDefaults
from quire.errors import ContextLengthError, UnsupportedError, ValidationError
from quire.parsers.reasoning_format import TAIL_TOKENS, ReasoningFormat
from quire.parsers.registry import reasoning_parser
from quire.structured_output.choose import resolve_structured_outputs
from quire.structured_output.restrictions import check_ends
from quire.tokenization.tokenizer import Tokenizer

ResolveForm = Callable[[StructuredOutputsParams, str], StructuredOutputsParams]
"""`resolve_structured_outputs`, given the form and the salt of the request's blocks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputLimits:
    """What the model and the settings allow.

    Attributes:
        vocab_size: of the model; token ids are below it.
        max_model_len: prompt and output together, in tokens.
        max_logprobs: most log-probabilities per token; -1 = no limit.
        has_connector: requests may have `kv_transfer_params`.
    """

    vocab_size: int
    max_model_len: int
    max_logprobs: int = 20
    has_connector: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRequest:
    """A request that can run.

    Attributes:
        prompt: its text; None when it came as ids.
        prompt_token_ids: [num_prompt_tokens] int32.
        params: normalised: `max_tokens` is a number, -1 of logprobs is the vocabulary, bad words are ids; `n` as asked.
        eos_token_id: -1 = none.
    """

    prompt: str | None
    prompt_token_ids: np.ndarray
    params: SamplingParams
    eos_token_id: int
    cache_salt: str | None
    num_shared_tokens: int = 0
    template_id: int = 0


class InputProcessor:
    """Validates and tokenizes.

    Args:
        limits: of the model and settings.
        tokenizer: None when the engine works with ids alone.
        defaults: ends of a turn.
        validate_params: a further check of the parameters, for custom logits processors; None = there are none.
        structured: how grammars are made.

    Raises:
        ConfigError: its reasoning parser is unknown.
    """

    def __init__(
        self,
        limits: InputLimits,
        tokenizer: Tokenizer | None,
        defaults: GenerationDefaults,
        validate_params: Callable[[SamplingParams], None] | None = None,
        structured: StructuredOutputsConfig | None = None,
    ) -> None:
        self._limits = limits
        self._tokenizer = tokenizer
        self._defaults = defaults
        self._validate_params = validate_params
        self._structured = structured or StructuredOutputsConfig()
        self._resolve_form: ResolveForm = lambda form, salt: resolve_structured_outputs(form, self._structured)
        name = self._structured.thinking_parser
        kind = reasoning_parser(name) if name else None
        self._reasoning = None if kind is None or tokenizer is None else ReasoningFormat(kind, tokenizer)

    def check_forms_with(self, resolve: ResolveForm) -> None:
        """Have something else choose the library of structured outputs than this thread."""
        self._resolve_form = resolve

    def prepare(
        self, prompt: Any, params: SamplingParams, options: RequestOptions = DEFAULT_OPTIONS
    ) -> PreparedRequest:
        """Make a request of `prompt` (any form that `core.inputs.parse_prompt` takes) and `params`.

        Raises:
            ValidationError: something about it is wrong; the message names the field, the value and the limit.
        """
        if not isinstance(params, SamplingParams):
            raise ValidationError(
                f"sampling_params must be a SamplingParams, not {type(params).__name__}", field="sampling_params"
            )
        parsed = parse_prompt(prompt)
        if options.cache_salt is not None:
            parsed = with_cache_salt(parsed, options.cache_salt)
        token_ids = self._token_ids(parsed, options.add_special_tokens)
        self._check_prompt(token_ids)
        return PreparedRequest(
            prompt=parsed.prompt,
            prompt_token_ids=token_ids,
            params=self._normalize(params, token_ids, parsed.cache_salt or ""),
            eos_token_id=self._defaults.eos_token_id,
            cache_salt=parsed.cache_salt,
            num_shared_tokens=parsed.num_shared_tokens if isinstance(parsed, TokensPrompt) else 0,
            template_id=parsed.template_id,
        )

    def _token_ids(self, prompt: TextPrompt | TokensPrompt, add_special_tokens: bool) -> np.ndarray:
        if isinstance(prompt, TokensPrompt):
            return np.asarray(prompt.prompt_token_ids, dtype=np.int32)
        if self._tokenizer is None:
            raise ValidationError(
                "string prompts need a tokenizer, but this engine runs with skip_tokenizer_init",
                hint="pass {'prompt_token_ids': [...]}",
                field="prompt",
            )
        return np.asarray(self._tokenizer.encode(prompt.prompt, add_special_tokens), dtype=np.int32)

    def _check_prompt(self, token_ids: np.ndarray) -> None:
        max_model_len, vocab_size = self._limits.max_model_len, self._limits.vocab_size
        if len(token_ids) == 0:
            raise ValidationError("the prompt has no tokens", hint="pass at least one token", field="prompt")
        if len(token_ids) >= max_model_len:
            raise ContextLengthError(max_model_len, len(token_ids))
        outside = np.flatnonzero((token_ids < 0) | (token_ids >= vocab_size))
        if len(outside):
            raise ValidationError(
                f"prompt_token_ids[{outside[0]}] is {token_ids[outside[0]]}, but the vocabulary has ids 0 to "
                f"{vocab_size - 1}",
                hint="tokenize the prompt with this model's own tokenizer",
                field="prompt_token_ids",
            )

    def _normalize(self, params: SamplingParams, prompt_token_ids: np.ndarray, salt: str) -> SamplingParams:
        params.validate_for_model(
            vocab_size=self._limits.vocab_size,
            max_logprobs=self._limits.max_logprobs,
            has_tokenizer=self._tokenizer is not None,
        )
        if self._validate_params is not None:
            self._validate_params(params)
        elif params.extra_args and params.extra_args.keys() - {KV_TRANSFER_PARAMS}:
            raise ValidationError(
                "extra_args (vllm_xargs) are read by logits processors, and this engine has none",
                hint="leave out extra_args, or start the engine with --logits-processors", field="extra_args",
            )  # fmt: skip
        params.check_transfer_params(has_connector=self._limits.has_connector)
        params = copy.copy(params)  # shallow: fields are replaced below, never changed in place
        room = self._limits.max_model_len - len(prompt_token_ids)
        params.max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        if params.min_tokens > params.max_tokens:
            raise ValidationError(
                f"min_tokens={params.min_tokens} is larger than the {params.max_tokens} new tokens that "
                    "are possible after this prompt",
                hint=f"use min_tokens <= {params.max_tokens}, or shorten the prompt", field="min_tokens",
            )  # fmt: skip
        if params.logprobs == -1:
            params.logprobs = self._limits.vocab_size
        if params.prompt_logprobs == -1:
            params.prompt_logprobs = self._limits.vocab_size
        if self._defaults.other_eos_token_ids and not params.ignore_eos:
            own = params.stop_token_ids or []
            params.stop_token_ids = list(dict.fromkeys([*own, *self._defaults.other_eos_token_ids]))
        if params.beam_search is not None:
            params.logprobs = self._num_beam_logprobs(params)
        if params.bad_words and self._tokenizer is not None:
            params.bad_words_token_ids = bad_words_token_ids(self._tokenizer, params.bad_words)
        if params.structured_outputs is not None or params.thinking_token_budget is not None:
            self._find_thinking(params, prompt_token_ids)
        if params.thinking_token_budget is not None:
            self._check_budget_possible(params)
        if params.structured_outputs is not None:
            self._check_grammar_possible()
            check_ends(params, self._defaults.eos_token_id)
            params.structured_outputs = self._resolve_form(params.structured_outputs, salt)
            if self._structured.enable_in_reasoning:
                params.reasoning = None
        return params

    def _num_beam_logprobs(self, params: SamplingParams) -> int:
        """How many of each beam's likeliest tokens its search looks at."""
        assert params.beam_search is not None
        ends = set(params.stop_token_ids or ())
        if not params.ignore_eos and self._defaults.eos_token_id >= 0:
            ends.add(self._defaults.eos_token_id)
        num_top = num_top_tokens(params.beam_search.num_beams, len(ends))
        if num_top > self._limits.vocab_size:
            raise ValidationError(
                f"{params.beam_search.num_beams} beams need {num_top} tokens in each step, but the vocabulary has "
                f"{self._limits.vocab_size}",
                hint="use fewer beams",
                field="beam_width",
            )
        return num_top

    def _find_thinking(self, params: SamplingParams, prompt_token_ids: np.ndarray) -> None:
        """Set what delimits the answer's reasoning, where the server has not and the settings do."""
        if params.reasoning is None and self._reasoning is not None:
            params.reasoning = self._reasoning.delimiters(prompt_token_ids[-TAIL_TOKENS:].tolist())

    def _check_budget_possible(self, params: SamplingParams) -> None:
        if params.reasoning is None or not params.reasoning.end_ids:
            raise UnsupportedError(
                "thinking_token_budget needs a reasoning format with an end delimiter",
                hint="set structured_outputs_reasoning_parser (or --reasoning-parser, for chats), or leave it out",
                field="thinking_token_budget",
            )  # fmt: skip
        if params.structured_outputs is not None and self._structured.enable_in_reasoning:
            raise UnsupportedError(
                "thinking_token_budget cannot be combined with structured output that constrains the reasoning, too",
                hint="leave it out, or start the engine without structured_outputs_enable_in_reasoning",
                field="thinking_token_budget",
            )

    def _check_grammar_possible(self) -> None:
        if self._tokenizer is None or self._tokenizer.table is None:
            raise UnsupportedError(
                "structured_outputs needs a tokenizer whose tokens stand for fixed bytes, and this engine has none",
                hint="leave out structured_outputs", field="structured_outputs",
            )  # fmt: skip
        if self._defaults.eos_token_id < 0:
            raise UnsupportedError(
                "structured_outputs needs an end-of-sequence token, but this model does not define one",
                hint="set eos_token_id in generation_config.json", field="structured_outputs",
            )  # fmt: skip


def bad_words_token_ids(tokenizer: Tokenizer, words: list[str]) -> list[list[int]]:
    """Token forms of each word: at the beginning of a text, and after a space."""
    forms: dict[tuple[int, ...], None] = {}
    for word in words:
        stem = word.lstrip(" ")
        for text in (stem, " " + stem) if stem else (word,):
            forms[tuple(tokenizer.encode(text, add_special_tokens=False))] = None
    return [list(ids) for ids in forms if ids]
