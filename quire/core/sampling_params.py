"""How a request wants its tokens chosen. Validated once, here; every field is honoured or refused by name.

Made by users and entry points, read by the scheduler (stop conditions), the sampler and the detokenizer.
The names, defaults and ranges are those that users of vLLM know.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from enum import IntEnum
from typing import Any

import msgspec

from quire.core.beam_search import BeamSpec
from quire.core.kv_hints import KV_HINTS, check_kv_hints
from quire.core.reasoning import ReasoningDelimiters
from quire.core.sampling_checks import (
    MAX_TOKEN_ID,
    bias,
    check_num_logprobs,
    check_plain,
    check_vocabulary,
    clamped_bias,
    count_of_logprobs,
    is_one_of,
    texts,
)
from quire.core.structured_outputs import StructuredOutputsParams
from quire.errors import UnsupportedError, ValidationError, unknown_name
from quire.logger import get_logger
from quire.utils.checks import check_bool, check_float, check_int, check_int_list, out_of_range, shown, wrong_type
from quire.utils.other_names import PARAMETERS

MAX_N = 16384
MAX_BAD_WORDS = 128
MAX_LOGPROB_TOKEN_IDS = 128
MIN_TEMPERATURE = 0.01
MAX_TEMPERATURE = 1e6  # all tokens are as likely as each other
GREEDY_BELOW = 1e-5

# Names that users know and Quire does not honour yet, with the values that ask for nothing.
NOT_YET: dict[str, tuple[Any, ...]] = {
    "repetition_detection": (None,),
    "watermarking": (None, False),
    "prompt_logprob_token_ids": (None,),
    "prompt_logprob_start": (None,),
    "flat_logprobs": (False,),
    "stream_interval": (None, 1),
    "routed_experts_prompt_start": (0,),
    "trace_decode_token_ids": (None,),
    "skip_clone": (False, True),  # parameters are copied where they must be
}
NOT_YET_EXTRA_ARGS = ("ec_transfer_params",)
KV_TRANSFER_PARAMS = "kv_transfer_params"
"""Name among `extra_args` of what a request says to the KV connector."""

logger = get_logger(__name__)


class RequestOutputKind(IntEnum):
    """What each `RequestOutput` of a running request holds."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class SamplingType(IntEnum):
    """How the next token is chosen: the likeliest, at random, or at random from the request's own seed."""

    GREEDY = 0
    RANDOM = 1
    RANDOM_SEED = 2


# What would change a beam search's scores or its end in ways that it does not know, with the values that do nothing.
BESIDE_BEAMS: dict[str, tuple[Any, ...]] = {
    "output_kind": (RequestOutputKind.CUMULATIVE, RequestOutputKind.FINAL_ONLY),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "repetition_penalty": (1.0,),
    "min_tokens": (0,),
    "stop": (None, []),
    "logprob_token_ids": (None,),
    "logprobs": (None,),
    "prompt_logprobs": (None,),
    "logit_bias": (None, {}),
    "allowed_token_ids": (None,),
    "bad_words": (None, []),
    "structured_outputs": (None,),
    "extra_args": (None, {}),
    "thinking_token_budget": (None,),
}


class _NamesFields(msgspec.StructMeta):
    """Turns Python's TypeError for an unknown keyword into an error that names the nearest field."""

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().__call__(*args, **kwargs)
        except TypeError:
            fields = [f for f in cls.__struct_fields__ if f not in ("bad_words_token_ids", "reasoning")]
            for name in kwargs:
                if name not in cls.__struct_fields__:
                    raise unknown_name(
                        "sampling parameter", name, fields, ValidationError, elsewhere=PARAMETERS
                    ) from None
            if args:
                raise ValidationError(
                    "sampling parameters are given by keyword", hint="write SamplingParams(temperature=0.7)"
                ) from None
            raise


class SamplingParams(msgspec.Struct, omit_defaults=True, repr_omit_defaults=True, kw_only=True, metaclass=_NamesFields):
    """Sampling parameters of one request.

    >>> SamplingParams(temperature=0.7, top_p=0.9, max_tokens=64, stop="END").stop
    ['END']

    Construction validates and normalises: a string `stop` becomes a list, greedy requests get neutral filters,
    `seed=-1` is no seed, True as a count of logprobs is 1. Normalising twice changes nothing.

    Attributes:
        n: completions per prompt, 1 to 16384; 1 when greedy.
        presence_penalty, frequency_penalty: subtracted from the logits of tokens already in the output,
            once or per occurrence; in [-2, 2].
        repetition_penalty: divides (positive) or multiplies (negative) logits of tokens in prompt or output; > 0.
        temperature: 0 or more; 0 is greedy, other values are brought into [0.01, 1e6].
        top_p: smallest set of tokens whose probabilities reach this; in (0, 1].
        top_k: number of likeliest tokens kept; 0 or -1 = all.
        min_p: tokens below this fraction of the largest probability are dropped; in [0, 1].
        seed: int64 key of the request's random numbers; None or -1 = derived from the engine's seed.
        stop: strings that end the output; need `detokenize`.
        stop_token_ids: ids that end the output.
        ignore_eos: continue past the end-of-sequence token.
        max_tokens: maximum number of new tokens; None = as many as fit the model.
        min_tokens: end-of-sequence and stop ids are impossible before this many new tokens.
        logprobs: top log-probabilities per new token besides the sampled one's; -1 = all of the vocabulary.
        logprob_token_ids: 1 to 128 ids whose log-probabilities come, without ranks, in place of those of the likeliest
            tokens; `logprobs` is their number, and may be left out.
        prompt_logprobs: as `logprobs`, for each prompt token.
        detokenize: make text of the new ids.
        skip_special_tokens: leave special tokens out of the text.
        spaces_between_special_tokens: False is honoured only while special tokens are skipped (it then has
            nothing to act on); otherwise it is refused, because the text follows the tokenizer's own decoder.
        include_stop_str_in_output: keep the stop string that matched.
        output_kind: what each output of a running request holds.
        logit_bias: token id -> added to its logit.
        allowed_token_ids: only these can be sampled.
        bad_words: words that are never completed.
        bad_words_token_ids: internal; the token forms of `bad_words`, set by the input processor.
        extra_args: free values for custom logits processors; `kv_transfer_params`: an object for the KV connector;
            `kv_hints`: advice about the request's blocks (`core.kv_hints`).
        skip_reading_prefix_cache: compute the whole prompt; None = only when prompt logprobs are asked for.
        beam_search: set by `BeamSearchParams`: the `n` completions are the best sequences of a beam search.
        structured_outputs: constraint on the output; `StructuredOutputsParams`, or a dict of its fields.
        thinking_token_budget: maximum tokens of reasoning, without its delimiters; None or -1 = no limit.
        reasoning: internal; delimiters of the reasoning, set where the reasoning parser is known.
        no_store: do not store blocks of this request in the prefix cache.
        return_progress: while a long prompt is computed, outputs say how far it is (`prompt_progress`); not FINAL_ONLY.

    Raises:
        ValidationError: a value has the wrong type or is out of range, or a keyword is unknown.
        UnsupportedError: a known parameter that is not honoured yet was given (`NOT_YET`).
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    bad_words_token_ids: list[list[int]] | None = None
    extra_args: dict[str, Any] | None = None
    skip_reading_prefix_cache: bool | None = None
    beam_search: BeamSpec | None = None
    no_store: bool = False
    return_progress: bool = False
    structured_outputs: StructuredOutputsParams | None = None
    thinking_token_budget: int | None = None
    reasoning: ReasoningDelimiters | None = None
    repetition_detection: Any = None
    watermarking: bool | None = None
    logprob_token_ids: list[int] | None = None
    prompt_logprob_token_ids: list[list[int]] | None = None
    prompt_logprob_start: int | None = None
    flat_logprobs: bool = False
    stream_interval: int | None = None
    routed_experts_prompt_start: int = 0
    trace_decode_token_ids: list[int] | None = None
    skip_clone: bool = False

    def __post_init__(self) -> None:
        self._refuse_not_yet()
        self._check_randomness()
        self._check_penalties()
        self._check_lengths()
        self._check_logprobs()
        self._check_text()
        self._check_masks()
        self._check_extra_args()
        if self.structured_outputs is not None:
            self.structured_outputs = StructuredOutputsParams.of(self.structured_outputs)
        self._neutralise_greedy()

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SamplingParams:
        """The parameters in `values` (field name -> value); unknown names are errors that name the nearest."""
        return cls(**values)

    @classmethod
    def from_optional(cls, **values: Any) -> SamplingParams:
        """As an API gives them: None means the default, text keys of `logit_bias` are ids, biases are clamped.

        Biases are clamped to [-100, 100]. `max_tokens=None` keeps its meaning: as many as fit.
        """
        given = {name: value for name, value in values.items() if value is not None or name == "max_tokens"}
        if isinstance(given.get("logit_bias"), Mapping):
            given["logit_bias"] = clamped_bias(given["logit_bias"])
        return cls(**given)

    @property
    def is_greedy(self) -> bool:
        """True when the likeliest token is always taken."""
        return self.temperature < GREEDY_BELOW

    @property
    def sampling_type(self) -> SamplingType:
        """How the next token is chosen."""
        if self.is_greedy:
            return SamplingType.GREEDY
        return SamplingType.RANDOM if self.seed is None else SamplingType.RANDOM_SEED

    @property
    def stop_strings(self) -> list[str]:
        """`stop` as a list, empty when there is none."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    def clone(self) -> SamplingParams:
        """A copy that shares nothing mutable with this one."""
        return copy.deepcopy(self)

    def update_from_generation_config(
        self, generation_config: Mapping[str, Any], eos_token_id: int | None = None
    ) -> None:
        """Make the model's further end-of-turn ids stop ids, in place, unless `ignore_eos`.

        Args:
            generation_config: content of the model's generation_config.json.
            eos_token_id: the primary id, which ends a request by itself and is left out.
        """
        ids = generation_config.get("eos_token_id")
        if ids is None or self.ignore_eos:
            return
        found = [ids] if isinstance(ids, int) else check_int_list("eos_token_id", ids, 0, MAX_TOKEN_ID)
        extra = [i for i in found if i != eos_token_id]
        if extra:
            self.stop_token_ids = list(dict.fromkeys([*(self.stop_token_ids or []), *extra]))

    def validate_for_model(self, *, vocab_size: int, max_logprobs: int = -1, has_tokenizer: bool = True) -> None:
        """Check what depends on the engine.

        Args:
            vocab_size: token ids are below this.
            max_logprobs: most log-probabilities per token; -1 = no limit.
            has_tokenizer: False when the engine handles ids only.

        Raises:
            ValidationError: an id is outside the vocabulary, or too many log-probabilities are asked for.
        """
        check_vocabulary("stop_token_ids", self.stop_token_ids, vocab_size)
        check_vocabulary("allowed_token_ids", self.allowed_token_ids, vocab_size)
        check_vocabulary("logit_bias", self.logit_bias, vocab_size)
        for ids in self.bad_words_token_ids or ():
            check_vocabulary("bad_words", ids, vocab_size)
        check_vocabulary("logprob_token_ids", self.logprob_token_ids, vocab_size)
        if self.logprob_token_ids is None:
            check_num_logprobs("logprobs", self.logprobs, vocab_size, max_logprobs)
        check_num_logprobs("prompt_logprobs", self.prompt_logprobs, vocab_size, max_logprobs)
        if self.beam_search is not None:
            self._check_beam_search()
        if not has_tokenizer:
            self._check_without_tokenizer()

    def _refuse_not_yet(self) -> None:
        for name, neutral in NOT_YET.items():
            value = getattr(self, name)
            if value is not neutral[0] and not is_one_of(value, neutral):
                raise UnsupportedError(
                    f"{name} is valid for vLLM, but Quire does not implement it yet (got {shown(value)})",
                    hint=f"leave out {name}",
                    field=name,
                )

    def _check_randomness(self) -> None:
        self.n = check_int("n", self.n, 1, MAX_N)
        self.temperature = check_float("temperature", self.temperature, 0.0)
        if 0.0 < self.temperature < MIN_TEMPERATURE:
            logger.warning("temperature=%g raised to %g; use 0 for greedy", self.temperature, MIN_TEMPERATURE)
            self.temperature = MIN_TEMPERATURE
        if self.temperature > MAX_TEMPERATURE:
            logger.warning("temperature=%g lowered to %g", self.temperature, MAX_TEMPERATURE)
            self.temperature = MAX_TEMPERATURE
        self.top_p = check_float("top_p", self.top_p, 0.0, 1.0, above=0.0)
        self.top_k = check_int("top_k", self.top_k, -1)
        self.min_p = check_float("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            seed = check_int("seed", self.seed)
            self.seed = None if seed == -1 else seed

    def _check_penalties(self) -> None:
        self.presence_penalty = check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        self.frequency_penalty = check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        self.repetition_penalty = check_float("repetition_penalty", self.repetition_penalty, 0.0, above=0.0)

    def _check_lengths(self) -> None:
        self.min_tokens = check_int("min_tokens", self.min_tokens, 0)
        if self.thinking_token_budget is not None:
            budget = check_int("thinking_token_budget", self.thinking_token_budget, -1)
            self.thinking_token_budget = None if budget == -1 else budget
        if self.max_tokens is None:
            return
        self.max_tokens = check_int("max_tokens", self.max_tokens, 1)
        if self.min_tokens > self.max_tokens:
            raise ValidationError(
                f"min_tokens={self.min_tokens} is larger than max_tokens={self.max_tokens}",
                hint=f"use min_tokens <= {self.max_tokens}, or raise max_tokens", field="min_tokens",
            )  # fmt: skip

    def _check_logprobs(self) -> None:
        if self.logprob_token_ids is not None:
            self._take_logprob_token_ids(self.logprob_token_ids)
        if self.logprobs is not None:
            self.logprobs = count_of_logprobs("logprobs", self.logprobs)
        if self.prompt_logprobs is not None:
            self.prompt_logprobs = count_of_logprobs("prompt_logprobs", self.prompt_logprobs)
        if self.skip_reading_prefix_cache is None:
            self.skip_reading_prefix_cache = self.prompt_logprobs is not None
        check_bool("skip_reading_prefix_cache", self.skip_reading_prefix_cache)
        check_bool("no_store", self.no_store)
        check_bool("return_progress", self.return_progress)

    def _take_logprob_token_ids(self, given: list[int]) -> None:
        self.logprob_token_ids = ids = check_int_list("logprob_token_ids", given, 0, MAX_TOKEN_ID)
        if not 0 < len(ids) <= MAX_LOGPROB_TOKEN_IDS:
            raise out_of_range("len(logprob_token_ids)", len(ids), f"1 to {MAX_LOGPROB_TOKEN_IDS}")
        if self.logprobs not in (None, len(ids)):
            raise ValidationError(
                f"logprobs={self.logprobs} with {len(ids)} logprob_token_ids",
                hint=f"leave out logprobs, or use logprobs={len(ids)}", field="logprobs",
            )  # fmt: skip
        self.logprobs = len(ids)

    def _check_text(self) -> None:
        check_bool("ignore_eos", self.ignore_eos)
        check_bool("detokenize", self.detokenize)
        check_bool("skip_special_tokens", self.skip_special_tokens)
        check_bool("spaces_between_special_tokens", self.spaces_between_special_tokens)
        check_bool("include_stop_str_in_output", self.include_stop_str_in_output)
        if type(self.output_kind) is not RequestOutputKind:
            self.output_kind = RequestOutputKind(check_int("output_kind", self.output_kind, 0, 2))
        self.stop = texts("stop", self.stop)
        if self.stop and not self.detokenize:
            raise ValidationError(
                "stop needs detokenize=True: stop strings are searched in the text",
                hint="leave out stop, use stop_token_ids, or set detokenize=True", field="stop",
            )  # fmt: skip
        if not self.spaces_between_special_tokens and not self.skip_special_tokens:
            raise UnsupportedError(
                "spaces_between_special_tokens=False is not supported together with skip_special_tokens=False",
                hint="leave out spaces_between_special_tokens", field="spaces_between_special_tokens",
            )  # fmt: skip

    def _check_masks(self) -> None:
        if self.stop_token_ids is not None:
            ids = check_int_list("stop_token_ids", self.stop_token_ids, 0, MAX_TOKEN_ID)
            self.stop_token_ids = list(dict.fromkeys(ids))
        if self.allowed_token_ids is not None:
            self.allowed_token_ids = check_int_list("allowed_token_ids", self.allowed_token_ids, 0, MAX_TOKEN_ID)
            if not self.allowed_token_ids:
                raise ValidationError(
                    "allowed_token_ids is empty: no token could be sampled",
                    hint="give at least one id, or leave out allowed_token_ids", field="allowed_token_ids",
                )  # fmt: skip
        if self.logit_bias is not None:
            self.logit_bias = bias(self.logit_bias)
        self.bad_words = texts("bad_words", self.bad_words)
        if self.bad_words:
            self.bad_words = list(dict.fromkeys(self.bad_words))
        if self.bad_words and len(self.bad_words) > MAX_BAD_WORDS:
            raise out_of_range("len(bad_words)", len(self.bad_words), f"at most {MAX_BAD_WORDS}")

    def _check_extra_args(self) -> None:
        if self.extra_args is None:
            return
        if not isinstance(self.extra_args, dict):
            raise wrong_type("extra_args", self.extra_args, "a dict of names to values")
        for name in self.extra_args:
            if name in NOT_YET_EXTRA_ARGS:
                raise UnsupportedError(
                    f"extra_args[{name!r}] is valid for vLLM, but Quire does not implement it yet",
                    hint="leave it out",
                    field=name,
                )
        check_plain("extra_args", self.extra_args)
        params = self.extra_args.get(KV_TRANSFER_PARAMS)
        if params is not None and not isinstance(params, dict):
            raise wrong_type(KV_TRANSFER_PARAMS, params, "an object")
        if self.extra_args.get(KV_HINTS) is not None:
            check_kv_hints(self.extra_args[KV_HINTS])

    @property
    def can_resume(self) -> bool:
        """Whether an answer can be continued from its tokens alone."""
        return self.n == 1 and self.beam_search is None and self.logprobs is None and self.prompt_logprobs is None

    def check_transfer_params(self, *, has_connector: bool) -> None:
        """Refuse parameters for a KV connector where there is none.

        Raises:
            ValidationError: there are some.
        """
        if not has_connector and self.extra_args and self.extra_args.get(KV_TRANSFER_PARAMS):
            raise ValidationError(
                "kv_transfer_params are for a KV connector, and this engine has none",
                hint="leave it out, or start the engine with --kv-transfer-config", field=KV_TRANSFER_PARAMS,
            )  # fmt: skip

    def _neutralise_greedy(self) -> None:
        if not self.is_greedy:
            return
        if self.n > 1 and self.beam_search is None:
            raise ValidationError(
                f"n={self.n} with temperature=0: greedy outputs would all be the same",
                hint="use n=1, or temperature > 0", field="n",
            )  # fmt: skip
        self.top_p, self.top_k, self.min_p = 1.0, 0, 0.0

    def _check_beam_search(self) -> None:
        for name, neutral in BESIDE_BEAMS.items():
            value = getattr(self, name)
            if value not in neutral:
                field = value.field if isinstance(value, StructuredOutputsParams) else name
                got = "" if field != name else f" (got {shown(value)})"
                raise ValidationError(
                    f"{field} is not available with beam search{got}",
                    hint=f"leave out {field}, or do not use beam search", field=field,
                )  # fmt: skip

    def _check_without_tokenizer(self) -> None:
        for name in ("stop", "bad_words"):
            if getattr(self, name):
                raise ValidationError(
                    f"{name} needs a tokenizer, and this engine runs with skip_tokenizer_init",
                    hint=f"leave out {name}, or use token ids", field=name,
                )  # fmt: skip
