"""What packages may add to Quire: one row for each kind, in which a change of what a kind promises is written down.

The base classes are named and not imported: they are higher layers'. docs/how-to/plugins.md has an example of each.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginKind:
    """One thing that packages may add.

    Attributes:
        name: in messages.
        group: of entry points.
        setting: that names a plugin.
        base: "module:Class" that a plugin's class is derived from; "" = there is no interface yet.
        contract: version of what that class promises and asks for; raised by a change that breaks plugins.
        may_omit_contract: a class that declares no version was written for version 1: older than contracts.
    """

    name: str
    group: str
    setting: str
    base: str
    contract: int = 1
    may_omit_contract: bool = False


MODEL = PluginKind(
    name="model", group="quire.models", setting="architectures", base="quire.config.model_family:ModelFamily"
)
ATTENTION_BACKEND = PluginKind(
    name="attention backend", group="quire.attention_backends", setting="attention_backend",
    base="quire.attention.backend:AttentionBackend",
)  # fmt: skip
EXECUTOR = PluginKind(
    name="executor", group="quire.executors", setting="distributed_executor_backend",
    base="quire.executor.base:Executor",
)  # fmt: skip
SCHEDULER = PluginKind(
    name="scheduler", group="quire.schedulers", setting="scheduler_cls",
    base="quire.scheduler.interface:SchedulerInterface",
)  # fmt: skip
SCHEDULING_POLICY = PluginKind(
    name="scheduling policy", group="quire.scheduling_policies", setting="scheduling_policy",
    base="quire.scheduler.policy:Ranking",
)  # fmt: skip
LOGITS_PROCESSOR = PluginKind(
    name="logits processor", group="quire.logits_processors", setting="logits_processors",
    base="quire.sample.logits_processor.interface:ProcessorKind",
)  # fmt: skip
TOOL_PARSER = PluginKind(
    name="tool call parser", group="quire.tool_parsers", setting="tool_call_parser",
    base="quire.parsers.base:ToolCallParser", may_omit_contract=True,
)  # fmt: skip
REASONING_PARSER = PluginKind(
    name="reasoning parser", group="quire.reasoning_parsers", setting="reasoning_parser",
    base="quire.parsers.base:ReasoningParser", may_omit_contract=True,
)  # fmt: skip
GRAMMAR_BACKEND = PluginKind(
    name="grammar backend", group="quire.grammar_backends", setting="structured_outputs_backend",
    base="quire.structured_output.interface:StructuredOutputBackend",
)  # fmt: skip
QUANTIZATION = PluginKind(
    name="quantization", group="quire.quantizations", setting="quantization",
    base="quire.layers.quantization:Quantization",
)  # fmt: skip
STAT_LOGGER = PluginKind(
    name="stat logger", group="quire.stat_loggers", setting="stat_loggers",
    base="quire.engine.stat_loggers:StatLoggerBase",
)  # fmt: skip
KV_CONNECTOR = PluginKind(
    name="KV connector", group="quire.kv_connectors", setting="kv_transfer_config",
    base="quire.kv_transfer.connector:KVConnector",
)  # fmt: skip
KINDS = (
    MODEL, ATTENTION_BACKEND, EXECUTOR, SCHEDULER, SCHEDULING_POLICY, LOGITS_PROCESSOR, TOOL_PARSER,
    REASONING_PARSER, GRAMMAR_BACKEND, QUANTIZATION, STAT_LOGGER, KV_CONNECTOR,
)  # fmt: skip
