"""The paths that a model answers, and its own routes for them. Made with the state of each model; nothing changes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any

from starlette.responses import Response

from quire.server.api.anthropic.protocol import MessagesRequest
from quire.server.api.anthropic.routes import MessagesRoutes
from quire.server.api.openai.batch_chat import BatchChatRequest, BatchChatRoutes
from quire.server.api.openai.info_routes import InfoRoutes
from quire.server.api.openai.protocol.completion import CompletionRequest
from quire.server.api.openai.protocol.tokenize import DetokenizeRequest, TokenizeRequest
from quire.server.api.openai.routes import GenerationRoutes
from quire.server.api.responses.kept import KeptResponses
from quire.server.api.responses.protocol import ResponsesRequest
from quire.server.api.responses.routes import ResponsesRoutes
from quire.server.chat.answered import Route
from quire.server.chat.protocol.chat import ChatRequest
from quire.server.chat.service import ChatService
from quire.server.chat.state import ServerState


@dataclass(frozen=True, slots=True)
class ModelPath:
    """A path that a model answers.

    Attributes:
        owner, method: the class of its routes, and which of them it is.
        body: the struct of its JSON body, which names the model; None = it is a GET, and the query names it.
    """

    path: str
    owner: type
    method: Callable[..., Awaitable[Response]]
    body: type | None = None


MODEL_PATHS = (
    ModelPath("/v1/completions", GenerationRoutes, GenerationRoutes.completion, CompletionRequest),
    ModelPath("/v1/chat/completions", GenerationRoutes, GenerationRoutes.chat, ChatRequest),
    ModelPath("/v1/chat/completions/batch", BatchChatRoutes, BatchChatRoutes.answer, BatchChatRequest),
    ModelPath("/v1/responses", ResponsesRoutes, ResponsesRoutes.create, ResponsesRequest),
    ModelPath("/v1/responses/input_tokens", ResponsesRoutes, ResponsesRoutes.input_tokens, ResponsesRequest),
    ModelPath("/v1/messages", MessagesRoutes, MessagesRoutes.answer, MessagesRequest),
    ModelPath("/v1/messages/count_tokens", MessagesRoutes, MessagesRoutes.count_tokens, MessagesRequest),
    ModelPath("/invocations", GenerationRoutes, GenerationRoutes.invocation, ChatRequest),
    ModelPath("/tokenize", InfoRoutes, InfoRoutes.tokenize, TokenizeRequest),
    ModelPath("/detokenize", InfoRoutes, InfoRoutes.detokenize, DetokenizeRequest),
    ModelPath("/tokenizer_info", InfoRoutes, InfoRoutes.tokenizer_info),
)


def model_routes(state: ServerState, kept: KeptResponses) -> dict[str, Route]:
    """The routes of `MODEL_PATHS`, of the model of `state`.

    Args:
        kept: the responses of the server.
    """
    service = ChatService(state)
    owners: dict[type, Any] = {
        GenerationRoutes: GenerationRoutes(state, service),
        BatchChatRoutes: BatchChatRoutes(state, service),
        ResponsesRoutes: ResponsesRoutes(state, service, kept),
        MessagesRoutes: MessagesRoutes(state, service),
        InfoRoutes: InfoRoutes(state),
    }
    return {one.path: MethodType(one.method, owners[one.owner]) for one in MODEL_PATHS}
