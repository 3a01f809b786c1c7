"""POST /tokenize and /detokenize: their fields. No state."""

from __future__ import annotations

import msgspec

from quire.server.chat.protocol.chat import ChatFields
from quire.server.chat.protocol.reading import RequestFields


class TokenizeRequest(ChatFields, kw_only=True):
    """A text or a conversation whose ids are asked for."""

    prompt: str | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """Ids whose text is asked for."""

    model: str | None = None
    tokens: list[int] = []


TOKENIZE_FIELDS = RequestFields(TokenizeRequest)
DETOKENIZE_FIELDS = RequestFields(DetokenizeRequest)
