"""Parsers by the names that flags have, those of other packages included, and which one a chat template speaks of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from quire.errors import ConfigError, QuireError, unknown_name
from quire.parsers.base import ReasoningParser, ToolCallParser
from quire.parsers.harmony import HarmonyParser
from quire.parsers.reasoning.answer_tags import Ernie45ReasoningParser, HunyuanReasoningParser
from quire.parsers.reasoning.append_think import AppendThinkParser
from quire.parsers.reasoning.deepseek_r1 import DeepSeekR1Parser
from quire.parsers.reasoning.families import (
    DeepSeekV3ReasoningParser,
    Gemma4ReasoningParser,
    KimiK2ReasoningParser,
    MiniMaxM2ReasoningParser,
    MistralReasoningParser,
    SeedOssReasoningParser,
)
from quire.parsers.reasoning.granite import GraniteReasoningParser
from quire.parsers.reasoning.qwen3 import Qwen3ReasoningParser
from quire.parsers.reasoning.tags import TagParser
from quire.parsers.tool_calls.deepseek import DeepSeekV3Parser, DeepSeekV31Parser
from quire.parsers.tool_calls.gemma import FunctionGemmaParser, Gemma4Parser
from quire.parsers.tool_calls.glm import Glm45Parser, Glm47Parser
from quire.parsers.tool_calls.granite import GraniteFunctionParser, GraniteParser
from quire.parsers.tool_calls.hermes import HermesParser
from quire.parsers.tool_calls.invokes import DeepSeekV4Parser, DeepSeekV32Parser, MiniMaxM2Parser, Step3Parser
from quire.parsers.tool_calls.kimi_k2 import KimiK2Parser
from quire.parsers.tool_calls.llama3_json import Llama3JsonParser
from quire.parsers.tool_calls.mistral import MistralParser
from quire.parsers.tool_calls.pythonic import Lfm2Parser, Olmo3Parser, PythonicParser
from quire.parsers.tool_calls.qwen3_coder import Qwen3CoderParser, SeedOssParser
from quire.parsers.tool_calls.tagged import InternLmParser, JambaParser, LongCatParser, Phi4MiniParser
from quire.parsers.tool_calls.xlam import XlamParser
from quire.parsers.vllm_names import REASONING_NAMES, TOOL_CALL_NAMES
from quire.plugins import REASONING_PARSER, TOOL_PARSER, load_plugin, plugin_names

PATTERN, HARMONY_REASONING = "pattern", "openai_gptoss"
TOOL_CALL_PARSERS: Mapping[str, type[ToolCallParser]] = {
    "deepseek_v3": DeepSeekV3Parser,
    "deepseek_v31": DeepSeekV31Parser,
    "deepseek_v32": DeepSeekV32Parser,
    "deepseek_v4": DeepSeekV4Parser,
    "ernie45": HermesParser,
    "functiongemma": FunctionGemmaParser,
    "gemma4": Gemma4Parser,
    "glm45": Glm45Parser,
    "glm47": Glm47Parser,
    "granite": GraniteParser,
    "granite-20b-fc": GraniteFunctionParser,
    "granite4": HermesParser,
    "hermes": HermesParser,
    "hunyuan_a13b": JambaParser,
    "internlm": InternLmParser,
    "jamba": JambaParser,
    "kimi_k2": KimiK2Parser,
    "lfm2": Lfm2Parser,
    "llama3_json": Llama3JsonParser,
    "llama4_json": Llama3JsonParser,
    "llama4_pythonic": PythonicParser,
    "longcat": LongCatParser,
    "mimo": Qwen3CoderParser,
    "minimax_m2": MiniMaxM2Parser,
    "mistral": MistralParser,
    "olmo3": Olmo3Parser,
    "openai": HarmonyParser,
    "phi4_mini_json": Phi4MiniParser,
    "pythonic": PythonicParser,
    "qwen3_coder": Qwen3CoderParser,
    "qwen3_json": HermesParser,
    "qwen3_xml": Qwen3CoderParser,
    "seed_oss": SeedOssParser,
    "step3": Step3Parser,
    "step3p5": Qwen3CoderParser,
    "xlam": XlamParser,
}
UNFORCED = frozenset(name for name, parser in TOOL_CALL_PARSERS.items() if parser.syntax() is None)
"""Formats that have no grammar, so that calls in them cannot be forced."""
REASONING_PARSERS: Mapping[str, type[ReasoningParser]] = {
    "deepseek_r1": DeepSeekR1Parser,
    "deepseek_v3": DeepSeekV3ReasoningParser,
    "deepseek_v4": DeepSeekV3ReasoningParser,
    "ernie45": Ernie45ReasoningParser,
    "gemma4": Gemma4ReasoningParser,
    "glm45": TagParser,
    "glm47": TagParser,
    "granite": GraniteReasoningParser,
    "hunyuan_a13b": HunyuanReasoningParser,
    "kimi_k2": KimiK2ReasoningParser,
    "mimo": Qwen3ReasoningParser,
    "minimax_m2": MiniMaxM2ReasoningParser,
    "minimax_m2_append_think": AppendThinkParser,
    "mistral": MistralReasoningParser,
    "nemotron_v3": DeepSeekR1Parser,
    "olmo3": TagParser,
    "qwen3": Qwen3ReasoningParser,
    "seed_oss": SeedOssReasoningParser,
    "step3": DeepSeekR1Parser,
    "step3p5": DeepSeekR1Parser,
    "think": TagParser,
}
TEMPLATE_FINGERPRINTS = (  # what a template that writes calls of a format has in it; the first that fits
    (("<｜tool▁calls▁begin｜>", "```json"), "deepseek_v3"),
    (("<｜tool▁calls▁begin｜>",), "deepseek_v31"),
    (("｜DSML｜", "tool_calls>"), "deepseek_v4"),
    (("｜DSML｜", "function_calls>"), "deepseek_v32"),
    (("[TOOL_CALLS]",), "mistral"),
    (("<|channel|>", "functions."), "openai"),
    (("</arg_key><arg_value>",), "glm47"),
    (("<arg_key>", "<arg_value>"), "glm45"),
    (("<minimax:tool_call>", "<invoke name="), "minimax_m2"),
    (("<steptml:invoke",), "step3"),
    (("<seed:tool_call>",), "seed_oss"),
    (("<function=", "<parameter="), "qwen3_coder"),
    (("<|tool_calls_section_begin|>",), "kimi_k2"),
    (("<|tool_call>", "<tool_call|>"), "gemma4"),
    (("<start_function_call>",), "functiongemma"),
    (("<|action_start|>", "<|plugin|>"), "internlm"),
    (("<longcat_tool_call>", '"arguments"'), "longcat"),
    (("<|tool_call_start|>",), "lfm2"),
    (("<|tool_list_start|>",), "lfm2"),
    (("<function_calls>",), "olmo3"),
    (("<|tool|>", "<|/tool|>"), "phi4_mini_json"),
    (("<tool_calls>", "arguments"), "jamba"),
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
    found: type[ToolCallParser] | None = TOOL_CALL_PARSERS.get(name) or load_plugin(TOOL_PARSER, name, ToolCallParser)
    if found is None:
        known = ("auto", "none", PATTERN, *TOOL_CALL_PARSERS, *plugin_names(TOOL_PARSER))
        raise _unknown("tool_call_parser", name, known, TOOL_CALL_NAMES)
    return found


def reasoning_parser(name: str) -> type[ReasoningParser]:
    """The parser class of this name; `HARMONY_REASONING` is none of them, as its tool parser has its part.

    Raises:
        ConfigError: as `tool_call_parser`.
    """
    found: type[ReasoningParser] | None = REASONING_PARSERS.get(name) or load_plugin(
        REASONING_PARSER, name, ReasoningParser
    )
    if found is None:
        known = (HARMONY_REASONING, *REASONING_PARSERS, *plugin_names(REASONING_PARSER))
        raise _unknown("reasoning_parser", name, known, REASONING_NAMES)
    return found


def parser_of_template(source: str) -> str | None:
    """The name of the parser for calls as a chat template writes them."""
    for signs, name in TEMPLATE_FINGERPRINTS:
        if all(sign in source for sign in signs):
            return name
    return None


def _unknown(field: str, name: str, known: Sequence[str], others: frozenset[str]) -> QuireError:
    if name not in others:
        return unknown_name(field, name, known, ConfigError)
    hint = f"valid: {', '.join(sorted(known))}; or add a parser plugin (docs/how-to/tools.md)"
    return ConfigError(f"{field} {name!r} is a vLLM parser that Quire does not implement yet", hint=hint, field=field)
