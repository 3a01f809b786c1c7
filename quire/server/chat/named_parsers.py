"""The parsers that the settings of a server name. Apart from what uses them, as they are looked for before it starts.

Called by `server.checks` and by `parsing`. No state.
"""

from __future__ import annotations

from pathlib import Path

from quire.config.server import ApiConfig
from quire.errors import ConfigError
from quire.parsers.base import ReasoningParser, ToolCallParser
from quire.parsers.registry import HARMONY_REASONING, PATTERN, reasoning_parser, tool_call_parser
from quire.parsers.tool_calls.pattern import PatternFormat

AUTO, NONE = "auto", "none"
MAX_FORMAT_BYTES = 1 << 16

ToolMaker = type[ToolCallParser] | PatternFormat


def check_parsers(config: ApiConfig) -> None:
    """Find the parsers that are named.

    Raises:
        ConfigError: one is unknown, or its description cannot be used.
    """
    named_tool_parser(config)
    named_reasoning_parser(config)


def named_tool_parser(config: ApiConfig) -> ToolMaker | None:
    """What makes parsers for tool calls; None when none is named.

    Raises:
        ConfigError: as `check_parsers`.
    """
    name = config.tool_call_parser
    if (config.tool_call_format is not None) != (name == PATTERN):
        raise ConfigError(
            "tool_call_format and tool_call_parser=pattern need each other",
            hint="set both flags, or neither",
            field="tool_call_format",
        )
    if config.tool_call_format is not None:
        return _read_format(config.tool_call_format)
    return None if name in (AUTO, NONE) else tool_call_parser(name)


def named_reasoning_parser(config: ApiConfig) -> type[ReasoningParser] | None:
    """The parser class for the reasoning; None when there is none, or harmony's, which does both.

    Raises:
        ConfigError: it is unknown.
    """
    name = config.reasoning_parser
    return None if name in (None, "", NONE, HARMONY_REASONING) else reasoning_parser(str(name))


def _read_format(path: str) -> PatternFormat:
    from quire.utils.yaml_config import parse_yaml  # late: few servers need it

    try:
        with Path(path).open("rb") as file:
            text = file.read(MAX_FORMAT_BYTES)
    except OSError as error:
        raise ConfigError(
            f"cannot read tool_call_format {path}: {error.strerror}", hint="use a readable file",
            field="tool_call_format",
        ) from None  # fmt: skip
    return PatternFormat(dict(parse_yaml(path, text, kind="tool call format", field="tool_call_format")))
