"""How grammars for structured output are made."""

from __future__ import annotations

from dataclasses import dataclass

from quire.config.base import check_settings, setting
from quire.plugins import GRAMMAR_BACKEND

BACKENDS = ("xgrammar", "guidance", "outlines", "lm-format-enforcer")
"""Grammar libraries, in the order in which `auto` asks them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StructuredOutputsConfig:
    """How grammars for structured output are made (needs `quire[structured]`).

    `structured_outputs_config` gives several at once, by their names without `structured_outputs_`.
    """

    backend: str = setting(
        "auto",
        "Grammar library; auto uses, for each request, the first that supports all of its schema.",
        choices=("auto", *BACKENDS),
        plugins=GRAMMAR_BACKEND,
        flag="structured_outputs_backend",
    )
    disable_any_whitespace: bool = setting(
        False, "JSON is written without optional whitespace.", flag="structured_outputs_disable_any_whitespace"
    )
    max_whitespace_cnt: int | None = setting(
        20, "Most optional whitespace characters in a row in JSON; none = any number. A request's whitespace_pattern "
        "takes precedence; lm-format-enforcer allows 12, outlines 8.", flag="structured_outputs_max_whitespace_cnt",
        minimum=1, maximum=1024, overruled_by=("structured_outputs_disable_any_whitespace",),
    )  # fmt: skip
    disable_additional_properties: bool = setting(
        False,
        "Objects have only the properties that their schema declares, unless it says otherwise.",
        flag="structured_outputs_disable_additional_properties",
    )
    thinking_parser: str | None = setting(
        None,
        "Format of the model's reasoning for requests without a server's reasoning_parser (think, qwen3, "
        "deepseek_r1, granite): structured output and reasoning budgets then apply there too.",
        flag="structured_outputs_reasoning_parser",
    )
    enable_in_reasoning: bool = setting(
        False,
        "Constrain the output from its first token, including the reasoning; default: only what follows the reasoning.",
        flag="structured_outputs_enable_in_reasoning",
    )
    compile_timeout_s: float = setting(
        1.0,
        "CPU time limit for compiling one grammar, in seconds; requests beyond it are rejected.",
        flag="structured_outputs_compile_timeout",
        minimum=0.01,
        maximum=600.0,
    )
    compile_memory_bytes: int = setting(
        200 << 20,
        "Memory limit for compiling one grammar, in bytes; requests beyond it are rejected.",
        flag="structured_outputs_compile_memory",
        minimum=1 << 20,
        is_size=True,
    )

    def __post_init__(self) -> None:
        check_settings(self)
