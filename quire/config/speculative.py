"""SpeculativeConfig: how tokens are guessed ahead, and how guesses are accepted. Names are vLLM's where it has them.

Made by `config.speculative_forms` from what the user gave; read by the engine core's factory. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.config.base import check_settings, setting, settings_of
from quire.config.token_tree import Tree, parse_tree
from quire.errors import ConfigError, QuireError, nearest
from quire.utils.checks import shown

FIELD = "speculative_config"
OFF = "off"
HISTORY_METHODS = ("ngram", "suffix")
"""Methods that guess from tokens alone."""
MODEL_METHODS = ("draft_model", "eagle", "eagle3", "medusa", "mtp")
"""Methods that compute a model of their own, or heads of the target's."""
TREE_METHODS = ("eagle", "eagle3", "medusa")
"""Those of them that draft trees."""
METHODS = (*HISTORY_METHODS, *MODEL_METHODS)
MAX_TOKENS = 128  # vLLM's bound, too
DEFAULT_LOOKUP = 5
POSTERIOR = (0.09, 0.3)  # threshold and alpha
MODEL_KEYS = ("model", "revision", "quantization", "max_model_len")
# Most drafts of a row where none are given; how many are verified in a step is the controller's choice.
DEFAULT_TOKENS = {"ngram": 8, "suffix": 24, "draft_model": 4, "eagle": 4, "eagle3": 4, "medusa": 6, "mtp": 1}
# vLLM's deprecated names of one method.
MTP_ALIASES = frozenset({
    "bailing_hybrid_mtp", "bailing_hybrid_v3_mtp", "deepseek_mtp", "dots3_note_mtp", "ernie_mtp", "exaone4_5_mtp",
    "exaone_moe_mtp", "gemma4_mtp", "glm4_moe_lite_mtp", "glm4_moe_mtp", "glm5_next_mtp", "glm_ocr_mtp", "hy_v3_mtp",
    "hy_v4_mtp", "inkling_mtp", "kimi_k3_mtp", "longcat_flash_mtp", "mimo_mtp", "mimo_v2_mtp", "minimax_m3_mtp",
    "nemotron_h_mtp", "pangu_ultra_moe_mtp", "qwen3_5_mtp", "qwen3_next_mtp", "qwen4_exp_mtp", "step3p5_mtp",
    "step5_mtp",
})  # fmt: skip
ALIASES = {**dict.fromkeys(MTP_ALIASES, "mtp"), "ngram_gpu": "ngram"}
_TRAINED = "the method needs a drafter that Quire does not compute"
METHODS_NOT_YET = {
    "dflash": _TRAINED, "dspark": _TRAINED, "mlp_speculator": _TRAINED,
    "extract_hidden_states": "it exports hidden states through a KV connector, and there is none",
    "custom_class": "classes are not imported by path; proposers are added in quire/speculation",
}  # fmt: skip
_INSTEAD = "use suffix or ngram, which need no model"


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """How tokens are guessed ahead and verified, several in one step; keys of `speculative_config`."""

    method: tuple[str, ...] = setting(
        (), "Where drafts come from: ngram, suffix, draft_model, eagle, eagle3, medusa, mtp; or two of them "
        '(["suffix", "eagle"]; "suffix,eagle"), of which the second is asked where the first has nothing. off = none.',
    )  # fmt: skip
    num_speculative_tokens: int | None = setting(
        None, "Most draft tokens of a request in a step. Default by method: ngram 8, suffix 24, medusa 6, mtp 1, "
        "others 4; the larger one of two.", minimum=1, maximum=MAX_TOKENS,
    )  # fmt: skip
    max_step_draft_tokens: int | None = setting(
        None, "Most draft tokens of all requests in a step; memory for their logits is set aside at the start. "
        "Default: two for each of max_num_seqs, and 128 at least.", minimum=1,
    )  # fmt: skip
    model: str | None = setting(
        None, "Directory or name of the draft model or of the heads. Default: what lies in the target's own directory, "
        "in draft, eagle, eagle3 or medusa.",
    )  # fmt: skip
    revision: str | None = setting(None, "Branch, tag or commit of `model` on the Hugging Face hub.")
    quantization: str | None = setting(None, "Quantization of `model`; default: as it is stored.")
    max_model_len: int | None = setting(
        None, "Longest sequence of `model`: requests beyond it continue without its drafts. Default: the model's own.",
        minimum=1,
    )  # fmt: skip
    acceptance: str | None = setting(
        None, "sampled = a draft stands where it is the token that would have been sampled: the same bytes as without. "
        "rejection = by ratios of probabilities: the same distribution, other draws. typical = what the model finds "
        "likely enough: another distribution. Default: sampled; with rejection_sample_method block or "
        "draft_sample_method probabilistic, rejection.", choices=("sampled", "rejection", "typical"),
    )  # fmt: skip
    rejection_sample_method: str = setting(
        "standard", "Of acceptance rejection: standard = token by token; block = all drafts of a request together, "
        "which accepts more.", choices=("standard", "block"),
    )  # fmt: skip
    draft_sample_method: str | None = setting(
        None, "greedy = a model's draft is its likeliest token; probabilistic = it is drawn, and accepted by the ratio "
        "of both probabilities. Default: probabilistic with acceptance rejection and a model, else greedy.",
        choices=("greedy", "probabilistic"),
    )  # fmt: skip
    speculative_token_tree: str | None = setting(
        None, "eagle, eagle3, medusa: several tokens are drafted for a place, of which one may stand. Paths of ranks, "
        "as in [(0,), (1,), (0, 0)]: the two likeliest tokens, and behind the first of them its likeliest.",
    )  # fmt: skip
    posterior_threshold: float = setting(
        POSTERIOR[0], "Of acceptance typical: a draft of at least this probability stands.", minimum=0.0, maximum=1.0
    )
    posterior_alpha: float = setting(
        POSTERIOR[1], "Of acceptance typical: so does one of this times exp(-entropy), if that is less.", minimum=0.0,
        maximum=1.0,
    )  # fmt: skip
    enable_adaptive_verification: bool = setting(
        True, "How many drafts are verified, zero included, follows from measured costs and acceptance. false: always "
        "as many as there are, which can be slower than none.",
    )  # fmt: skip
    prompt_lookup_max: int | None = setting(
        None, "ngram: longest end of the text that is looked up in it. Default: prompt_lookup_min, else 5.",
        minimum=1, maximum=MAX_TOKENS,
    )  # fmt: skip
    prompt_lookup_min: int | None = setting(
        None, "ngram: shortest one. Default: prompt_lookup_max, else 5.", minimum=1, maximum=MAX_TOKENS
    )
    suffix_decoding_max_tree_depth: int = setting(
        24, "suffix: maximum number of tokens of match and draft together.", minimum=2, maximum=4096
    )
    suffix_decoding_max_cached_requests: int = setting(
        10_000, "suffix: most past answers that are kept; 0 = only the request's own text is searched.", minimum=0
    )
    suffix_decoding_max_spec_factor: float = setting(
        1.0, "suffix: most draft tokens per matched token.", minimum=0.0, maximum=float(MAX_TOKENS)
    )
    suffix_decoding_min_token_prob: float = setting(
        0.1, "suffix: least frequency with which a token followed, 0 to 1.", minimum=0.0, maximum=1.0
    )
    suffix_store_bytes: int = setting(
        64 << 20, "suffix: memory for past answers in bytes, of all tenants together; the oldest go first.",
        minimum=0, is_size=True,
    )  # fmt: skip
    suffix_share_tenants: bool = setting(
        False, "suffix: drafts may come from past answers of other tenants. What is proposed, and so the time that a "
        "request takes, then depends on them.",
    )  # fmt: skip

    def __post_init__(self) -> None:
        try:
            check_settings(self)
        except QuireError as error:
            raise config_error(error.message, error.hint) from None
        self._set("method", _methods(self.method))
        self._resolve()
        if self.method:  # who writes off may leave the other keys as they were
            self._check_models()
            self._check_suffix()
            self._check_acceptance()
            self._check_lookup()
            self._check_tree()

    @property
    def is_off(self) -> bool:
        """Whether nothing is guessed, as asked by `off`."""
        return not self.method

    @property
    def num_tokens(self) -> int:
        """Most draft tokens of a request in a step."""
        return self.num_speculative_tokens or 0 if self.method else 0

    @property
    def draws_drafts(self) -> bool:
        """Whether a model's drafts are drawn from its distribution."""
        return bool(self.method) and self.draft_sample_method == "probabilistic"

    @property
    def tree(self) -> Tree:
        """`speculative_token_tree`, parents first; empty = chains are drafted."""
        return () if self.speculative_token_tree is None or self.is_off else parse_tree(self.speculative_token_tree)

    @property
    def history_methods(self) -> tuple[str, ...]:
        """Those of `method` that guess from tokens alone, in order."""
        return tuple(name for name in self.method if name in HISTORY_METHODS)

    @property
    def model_method(self) -> str | None:
        """The one of `method` that computes a model; None = there is none."""
        return next((name for name in self.method if name in MODEL_METHODS), None)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _resolve(self) -> None:
        """Replace what is left open."""
        if self.num_speculative_tokens is None and self.method:
            defaults = (
                {**DEFAULT_TOKENS, **dict.fromkeys(TREE_METHODS, len(self.tree))} if self.tree else DEFAULT_TOKENS
            )
            self._set("num_speculative_tokens", max(defaults[name] for name in self.method))
        if self.acceptance is None:
            is_ratio = self.rejection_sample_method == "block" or self.draft_sample_method == "probabilistic"
            self._set("acceptance", "rejection" if is_ratio else "sampled")
        if self.draft_sample_method is None:
            is_drawn = self.acceptance == "rejection" and self.model_method is not None
            self._set("draft_sample_method", "probabilistic" if is_drawn else "greedy")
        if "ngram" in self.method:
            low, high = self.prompt_lookup_min, self.prompt_lookup_max
            self._set("prompt_lookup_min", low or high or DEFAULT_LOOKUP)
            self._set("prompt_lookup_max", high or low or DEFAULT_LOOKUP)

    def _check_models(self) -> None:
        if self.model_method is None:
            given = next((name for name in MODEL_KEYS if getattr(self, name) is not None), None)
            if given is not None:
                raise config_error(
                    f"{given} is given, and method {', '.join(self.method)} has no model",
                    f"leave out {given}, or add a method with a model: {', '.join(MODEL_METHODS)}",
                )

    def _check_suffix(self) -> None:
        for one in settings_of(type(self)):
            is_set = one.name.startswith("suffix_") and getattr(self, one.name) != one.default
            if is_set and "suffix" not in self.method:
                raise config_error(
                    f"{one.name} has no effect with method {', '.join(self.method)}",
                    "leave it out, or add the method suffix",
                )

    def _check_acceptance(self) -> None:
        if self.acceptance != "rejection":
            for name, value in (("rejection_sample_method", "block"), ("draft_sample_method", "probabilistic")):
                if getattr(self, name) == value:
                    raise config_error(
                        f"{name} {value} needs acceptance rejection, not {self.acceptance}",
                        f"leave out acceptance or {name}",
                    )
        if self.draft_sample_method == "probabilistic" and self.model_method is None:
            raise config_error(
                "draft_sample_method probabilistic needs a method with a model",
                f"leave it out, or use one of {', '.join(MODEL_METHODS)}",
            )
        if self.acceptance != "typical" and (self.posterior_threshold, self.posterior_alpha) != POSTERIOR:
            raise config_error(
                f"posterior_threshold and posterior_alpha are of acceptance typical, not {self.acceptance}",
                'leave them out, or add "acceptance": "typical" (answers then differ from those without drafts)',
            )

    def _check_tree(self) -> None:
        if self.tree and (self.model_method not in TREE_METHODS or self.acceptance != "sampled"):
            raise config_error(
                f"speculative_token_tree is of methods {', '.join(TREE_METHODS)} and of acceptance sampled, not "
                f"{', '.join(self.method)} and {self.acceptance}", "leave it out",
            )  # fmt: skip

    def _check_lookup(self) -> None:
        low, high = self.prompt_lookup_min, self.prompt_lookup_max
        if "ngram" not in self.method:
            if low is not None or high is not None:
                raise config_error(
                    f"prompt_lookup_min and prompt_lookup_max are of method ngram, not {', '.join(self.method)}",
                    "leave them out, or add the method ngram",
                )
        elif low is not None and high is not None and low > high:
            raise config_error(
                f"prompt_lookup_min={low} is larger than prompt_lookup_max={high}",
                f"use prompt_lookup_min <= {high}",
            )


def config_error(message: str, hint: str | None) -> ConfigError:
    """The error for something wrong in `speculative_config`."""
    return ConfigError(f"{FIELD}: {message}", hint=hint, field=FIELD)


def _methods(names: tuple[str, ...]) -> tuple[str, ...]:
    """The methods that `names` mean; () = off."""
    if names == (OFF,):
        return ()
    methods = tuple(ALIASES.get(name, name) for name in names)
    for name in methods:
        if name in METHODS_NOT_YET:
            raise config_error(f"method {name} is not supported: {METHODS_NOT_YET[name]}", _INSTEAD)
        if name not in METHODS:
            close = nearest(name[:100], (*METHODS, OFF))
            hint = f"did you mean {close!r}?" if close else f"use one of {', '.join((*METHODS, OFF))}"
            raise config_error(f"method {shown(name)} is not a known method", hint)
    if len(set(methods)) != len(methods):
        raise config_error(f"method {', '.join(methods)} is the same one twice", "name each once")
    if len(methods) > 2:
        raise config_error(f"{len(methods)} methods are given", "use at most two")
    if sum(name in MODEL_METHODS for name in methods) > 1:
        raise config_error(
            f"methods {' and '.join(methods)} both need a model of their own", "use one of them, after suffix or ngram"
        )
    return methods
