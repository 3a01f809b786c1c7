"""POST /tokenize and /detokenize: their fields. No state."""

from __future__ import annotations

import msgspec

from quire.errors import ValidationError
from quire.server.chat.protocol.chat import ChatFields
from quire.server.chat.protocol.reading import RequestFields
from quire.server.chat.protocol.warnings import Warnings

OF_CHATS = (
    "add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs", "documents", "tools",
    "tool_choice", "reasoning_effort",
)  # fmt: skip
"""Fields that make the prompt of a conversation, and do nothing to a text."""


class TokenizeRequest(ChatFields, kw_only=True):
    """A text or a conversation whose ids are asked for."""

    prompt: str | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """Ids whose text is asked for."""

    model: str | None = None
    tokens: list[int]


TOKENIZE_FIELDS = RequestFields(TokenizeRequest)
DETOKENIZE_FIELDS = RequestFields(DetokenizeRequest)


def check_tokenize(request: TokenizeRequest, warnings: Warnings) -> None:
    """Refuse a request without a text and a conversation, or with both.

    Args:
        warnings: gets each field that has no effect on a text.

    Raises:
        ValidationError: as above; the field is named.
    """
    if request.prompt is not None and request.messages is not None:
        raise both_given()
    if request.prompt is None and request.messages is None:
        raise ValidationError("prompt is missing", hint="send prompt or messages", field="prompt")
    for name in OF_CHATS if request.prompt is not None else ():
        if getattr(request, name):
            warnings.add(name, f"{name} has no effect on prompt", f"leave out {name}, or send messages")


def both_given() -> ValidationError:
    """The error of a request with `prompt` and `messages`, of which one is to be read."""
    return ValidationError("prompt and messages are both given", hint="send one of them", field="messages")
