"""vLLM's `entrypoints.chat_utils`: messages are plain dicts, and templates the text that `chat_template` takes."""

from __future__ import annotations

import os
from typing import Any

from quire.compat.absent import module_getattr
from quire.compat.vllm.features import CONVERSATIONS, MULTIMODAL
from quire.tokenization.chat_template import read_template_argument

__all__ = ["ChatCompletionMessageParam", "ConversationMessage", "load_chat_template"]

ChatCompletionMessageParam = dict[str, Any]
ConversationMessage = dict[str, Any]


def load_chat_template(chat_template: str | os.PathLike[str] | None, *, is_literal: bool = False) -> str | None:
    """The source of a chat template: of a path the file's text, Jinja as it is.

    Args:
        is_literal: it is Jinja, whatever it looks like.

    Raises:
        ChatTemplateError: it is neither.
    """
    if chat_template is None or is_literal:
        return None if chat_template is None else os.fspath(chat_template)
    return read_template_argument(os.fspath(chat_template))


__getattr__ = module_getattr(
    __name__,
    absent_names={
        "apply_hf_chat_template": CONVERSATIONS,
        "apply_mistral_chat_template": CONVERSATIONS,
        "parse_chat_messages": CONVERSATIONS,
        "parse_chat_messages_async": CONVERSATIONS,
        "parse_chat_messages_futures": CONVERSATIONS,
        "resolve_hf_chat_template": CONVERSATIONS,
        "resolve_chat_template_content_format": CONVERSATIONS,
        "MultiModalItemTracker": MULTIMODAL,
        "ChatTemplateContentFormatOption": CONVERSATIONS,
    },
)
