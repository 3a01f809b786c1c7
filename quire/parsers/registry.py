"""Parsers by the names that flags have, those of other packages included, and which one a chat template speaks of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Any

from quire.errors import ConfigError, unknown_name
from quire.parsers.base import ReasoningParser, ToolCallParser
from quire.parsers.harmony import HarmonyParser
from quire.parsers.reasoning.deepseek_r1 import DeepSeekR1Parser
from quire.parsers.reasoning.granite import GraniteReasoningParser
from quire.parsers.reasoning.tags import TagParser
from quire.parsers.tool_calls.deepseek import DeepSeekV3Parser, DeepSeekV31Parser
from quire.parsers.tool_calls.granite import GraniteFunctionParser, GraniteParser
from quire.parsers.tool_calls.hermes import HermesParser
from quire.parsers.tool_calls.llama3_json import Llama3JsonParser
from quire.parsers.tool_calls.mistral import MistralParser
from quire.parsers.tool_calls.pythonic import PythonicParser
from quire.parsers.tool_calls.qwen3_coder import Qwen3CoderParser

TOOL_GROUP, REASONING_GROUP = "quire.tool_parsers", "quire.reasoning_parsers"
PATTERN, HARMONY_REASONING = "pattern", "openai_gptoss"
TOOL_CALL_PARSERS: Mapping[str, type[ToolCallParser]] = {
    "deepseek_v3": DeepSeekV3Parser,
    "deepseek_v31": DeepSeekV31Parser,
    "granite": GraniteParser,
    "granite-20b-fc": GraniteFunctionParser,
    "hermes": HermesParser,
    "llama3_json": Llama3JsonParser,
    "llama4_json": Llama3JsonParser,
    "llama4_pythonic": PythonicParser,
    "mistral": MistralParser,
    "openai": HarmonyParser,
    "pythonic": PythonicParser,
    "qwen3_coder": Qwen3CoderParser,
    "qwen3_xml": Qwen3CoderParser,
}
REASONING_PARSERS: Mapping[str, type[ReasoningParser]] = {
    "deepseek_r1": DeepSeekR1Parser,
    "granite": GraniteReasoningParser,
    "qwen3": TagParser,
    "think": TagParser,
}
TEMPLATE_SIGNS = (  # what a template that writes calls of a format has in it; the first that fits
    (("<｜tool▁calls▁begin｜>", "```json"), "deepseek_v3"),
    (("<｜tool▁calls▁begin｜>",), "deepseek_v31"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<|channel|>", "functions."), "openai"),
    (("<function=", "<parameter="), "qwen3_coder"),
    (("<|tool_call|>",), "granite"),
    (("<tool_call>", '"arguments"'), "hermes"),
    (("<tool_call>", '\\"arguments\\"'), "hermes"),
    (("<|python_start|>",), "llama4_pythonic"),
    (("<|python_tag|>", "parameters"), "llama3_json"),
)


def tool_call_parser(name: str) -> type[ToolCallParser]:
    """The parser class of this name.

    Raises:
        ConfigError: there is none, or a plugin's cannot be loaded.
    """
    found = TOOL_CALL_PARSERS.get(name) or _plugin(TOOL_GROUP, name, ToolCallParser)
    if found is None:
        known = ("auto", "none", PATTERN, *TOOL_CALL_PARSERS, *_plugin_names(TOOL_GROUP))
        raise unknown_name("tool_call_parser", name, known, ConfigError)
    return found


def reasoning_parser(name: str) -> type[ReasoningParser]:
    """The parser class of this name; `HARMONY_REASONING` is none of them, as its tool parser has its part.

    Raises:
        ConfigError: as `tool_call_parser`.
    """
    found = REASONING_PARSERS.get(name) or _plugin(REASONING_GROUP, name, ReasoningParser)
    if found is None:
        known = (HARMONY_REASONING, *REASONING_PARSERS, *_plugin_names(REASONING_GROUP))
        raise unknown_name("reasoning_parser", name, known, ConfigError)
    return found


def parser_of_template(source: str) -> str | None:
    """The name of the parser for calls as a chat template writes them."""
    for signs, name in TEMPLATE_SIGNS:
        if all(sign in source for sign in signs):
            return name
    return None


def _plugin_names(group: str) -> list[str]:
    return sorted({point.name for point in entry_points(group=group)})


def _plugin(group: str, name: str, base: type[Any]) -> Any:
    """What an installed package gives under this name; None when none does."""
    for point in entry_points(group=group, name=name):
        load: Callable[[], Any] = point.load
        try:
            found = load()
        except (ImportError, AttributeError) as error:
            raise ConfigError(f"the parser {name} of {point.value} cannot be loaded: {error}", field=group) from error
        if not (isinstance(found, type) and issubclass(found, base)):
            raise ConfigError(f"{point.value} is no {base.__name__}", hint=f"subclass {base.__name__}", field=group)
        return found
    return None
