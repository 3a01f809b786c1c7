"""POST /v1/messages and /v1/messages/count_tokens: their fields. No state.

Names and meaning are Anthropic's; the last fields of `MessagesRequest` are those that chats have beside OpenAI's own.
"""

from __future__ import annotations

from typing import Any

import msgspec

from quire.server.chat.protocol.reading import RequestFields

NOT_YET: dict[str, tuple[Any, ...]] = {
    "container": (),
    "mcp_servers": ([],),
}
NO_EFFECT = frozenset((
    "betas", "cache_control", "context_management", "diagnostics", "fallbacks", "inference_geo", "metadata",
    "service_tier", "speed", "user_profile_id", "workspace_id",
))  # fmt: skip


class PromptFields(msgspec.Struct, kw_only=True):
    """What makes the prompt; None is "not given"."""

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


class MessagesRequest(PromptFields, kw_only=True):
    """A conversation to be answered."""

    max_tokens: int | None = None
    stop_sequences: list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    priority: int | None = None
    queue_timeout: float | None = None
    cache_salt: str | None = None
    no_store: bool | None = None
    skip_reading_prefix_cache: bool | None = None
    return_cache_info: bool | None = None
    request_id: str | None = None
    structured_outputs: dict[str, Any] | None = None
    vllm_xargs: dict[str, Any] | None = None


MESSAGES_FIELDS = RequestFields(MessagesRequest, NOT_YET, NO_EFFECT)
COUNT_FIELDS = RequestFields(PromptFields, NOT_YET, NO_EFFECT)
