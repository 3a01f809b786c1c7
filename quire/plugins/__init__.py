"""What other installed packages may add: `kinds` says what, `registry` finds and loads it."""

from quire.plugins.kinds import (
    ATTENTION_BACKEND,
    EXECUTOR,
    GRAMMAR_BACKEND,
    KINDS,
    KV_CONNECTOR,
    LOGITS_PROCESSOR,
    MODEL,
    QUANTIZATION,
    REASONING_PARSER,
    SCHEDULER,
    SCHEDULING_POLICY,
    STAT_LOGGER,
    TOOL_PARSER,
    PluginKind,
)
from quire.plugins.registry import (
    Plugin,
    find_plugin,
    import_object,
    installed,
    load,
    load_plugin,
    plugin_names,
    problems_of,
    unknown_choice,
)

__all__ = [
    "ATTENTION_BACKEND", "EXECUTOR", "GRAMMAR_BACKEND", "KINDS", "KV_CONNECTOR", "LOGITS_PROCESSOR", "MODEL",
    "QUANTIZATION", "REASONING_PARSER", "SCHEDULER", "SCHEDULING_POLICY", "STAT_LOGGER", "TOOL_PARSER", "Plugin",
    "PluginKind", "find_plugin", "import_object", "installed", "load", "load_plugin", "plugin_names", "problems_of",
    "unknown_choice",
]  # fmt: skip
