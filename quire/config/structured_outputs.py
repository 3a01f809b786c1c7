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
        "Library that makes grammars; auto takes, for each request, the first that honours all of what it asks for.",
        choices=("auto", *BACKENDS),
        plugins=GRAMMAR_BACKEND,
        flag="structured_outputs_backend",
    )
    disable_any_whitespace: bool = setting(
        False, "JSON is written without optional whitespace.", flag="structured_outputs_disable_any_whitespace"
    )
    disable_additional_properties: bool = setting(
        False,
        "Objects have no properties but those that their schema names, unless it says otherwise.",
        flag="structured_outputs_disable_additional_properties",
    )
    thinking_parser: str | None = setting(
        None,
        "How thinking is marked in answers whose parser no server names (think, qwen3, deepseek_r1, granite): forms of "
        "answers, and budgets of thinking, are for these, too.",
        flag="structured_outputs_reasoning_parser",
    )
    enable_in_reasoning: bool = setting(
        False,
        "The form of an answer holds from its first token, thinking included; else for what follows the thinking.",
        flag="structured_outputs_enable_in_reasoning",
    )
    compile_timeout_s: float = setting(
        1.0,
        "CPU time that one grammar may take to compile, in seconds; a request whose grammar takes more is refused.",
        flag="structured_outputs_compile_timeout",
        minimum=0.01,
        maximum=600.0,
    )
    compile_memory_bytes: int = setting(
        200 << 20,
        "Memory that one grammar may take to compile, in bytes; a request whose grammar takes more is refused.",
        flag="structured_outputs_compile_memory",
        minimum=1 << 20,
        is_size=True,
    )

    def __post_init__(self) -> None:
        check_settings(self)
