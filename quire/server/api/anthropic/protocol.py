"""POST /v1/messages and /v1/messages/count_tokens: their fields. No state.

Names and meaning are Anthropic's; the fields of `SamplingFields` work as in chats.
"""

from __future__ import annotations

from typing import Any

from quire.server.chat.protocol.fields import SamplingFields
from quire.server.chat.protocol.reading import RequestFields

NOT_YET: dict[str, tuple[Any, ...]] = {
    "container": (),
    "mcp_servers": ([],),
}
NO_EFFECT = frozenset((
    "betas", "cache_control", "context_management", "diagnostics", "fallbacks", "inference_geo", "metadata",
    "service_tier", "speed", "user_profile_id", "workspace_id",
))  # fmt: skip


class MessagesRequest(SamplingFields, kw_only=True):
    """A conversation; None is "not given"."""

    model: str | None = None
    messages: list[dict[str, Any]] | None = None
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    max_tokens: int | None = None
    stop_sequences: list[str] | None = None


ANSWER_FIELDS = frozenset((*SamplingFields.__struct_fields__, "max_tokens", "stop_sequences"))
"""Fields that count_tokens does not use: it counts the whole prompt."""
MESSAGES_FIELDS = RequestFields(MessagesRequest, NOT_YET, NO_EFFECT)
COUNT_FIELDS = RequestFields(MessagesRequest, NOT_YET, NO_EFFECT | ANSWER_FIELDS)
