"""POST /v1/chat/completions/batch: several conversations in one request, each with choices of its own. Owns nothing."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.core.outputs import RequestOutput
from quire.errors import ValidationError
from quire.server.api.openai.chat import ChatWriter
from quire.server.chat.answer import AnswerEnvelope
from quire.server.chat.protocol.chat import CHAT_NOT_YET, ChatRequest
from quire.server.chat.protocol.generation import NO_EFFECT
from quire.server.chat.protocol.reading import RequestFields
from quire.server.chat.running import Run, unless_gone
from quire.server.chat.service import JSON, ChatService, PreparedChat
from quire.server.chat.state import ServerState

OF_ITS_PROMPT = ("prompt_logprobs", "prompt_token_ids", "prompt_text")
COUNTS = ("prompt_tokens", "completion_tokens", "total_tokens")
DETAILS = ("prompt_tokens_details", "completion_tokens_details")


class BatchChatRequest(ChatRequest, kw_only=True):
    """A chat whose `messages` are a list of conversations; the other fields hold for all of them."""

    messages: list[list[dict[str, Any]]] | None = None  # type: ignore[assignment]


BATCH_FIELDS = RequestFields(BatchChatRequest, CHAT_NOT_YET, NO_EFFECT | {"verbosity", "prediction"})


class BatchChatRoutes:
    """The route of batches.

    Args:
        state: of the server.
        service: prepares each conversation.
    """

    def __init__(self, state: ServerState, service: ChatService) -> None:
        self._state = state
        self._service = service

    async def answer(self, request: Request) -> Response:
        """Answer several conversations; answer `i` of conversation `c` is choice `c * n + i`."""
        body, warnings = await self._service.read(request, BATCH_FIELDS)
        self._check(body)
        fields = {name: getattr(body, name) for name in ChatRequest.__struct_fields__}
        bodies = [ChatRequest(**{**fields, "messages": messages}) for messages in body.messages]
        chats = []
        for one in bodies:
            chats.append(await self._service.prepare_chat(request, one, "chatcmpl-", warnings))
            await _let_others_run()
        runs = [Run(self._state, chat.work) for chat in chats]
        try:
            outputs = await unless_gone(request.receive, _final_outputs(runs))
        except BaseException:
            for run in runs:
                run.close()
            raise
        answers = []
        for one, chat, output in zip(bodies, chats, outputs, strict=True):
            answers.append(self._whole(one, chat, warnings.texts, output))
            await _let_others_run()
        return Response(msgspec.json.encode(_merged(answers)), media_type=JSON)

    def _check(self, body: BatchChatRequest) -> None:
        limit = self._state.config.limits.max_completion_prompts
        if not body.messages or len(body.messages) > limit:
            raise ValidationError(
                f"messages must be a list of 1 to {limit} conversations",
                hint='give [[{"role": "user", "content": ...}], ...]', field="messages",
            )  # fmt: skip
        if body.stream or body.echo:
            name = "stream" if body.stream else "echo"
            raise ValidationError(f"{name} is not available in a batch", hint=f"leave out {name}", field=name)

    def _whole(
        self, body: ChatRequest, chat: PreparedChat, warnings: list[str], output: RequestOutput
    ) -> dict[str, Any]:
        form = AnswerEnvelope(self._state, body, chat.work, model=chat.model, warnings=warnings, kind="chat.completion")
        writer = ChatWriter(form, body, self._state.config.api.response_role, "", chat.plan)
        answer: dict[str, Any] = msgspec.json.decode(writer.whole([output]))
        return answer


async def _final_outputs(runs: list[Run]) -> list[RequestOutput]:
    """Start all; the final output of each."""
    for run in runs:
        await run.start()
        await _let_others_run()
    final = []
    for run in runs:
        while not run.is_over:
            _, output = await run.next()
        final.append(output)
    return final


async def _let_others_run() -> None:
    """A conversation takes a millisecond, in which no stream goes on, and there may be a thousand."""
    await asyncio.sleep(0)


def _merged(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """One answer with the choices of all."""
    merged = {name: value for name, value in answers[0].items() if name not in OF_ITS_PROMPT}
    merged["choices"], usage = [], dict.fromkeys(COUNTS, 0)
    details: dict[str, dict[str, int]] = {}
    for answer in answers:
        own = {name: answer[name] for name in OF_ITS_PROMPT if name in answer}
        for choice in answer["choices"]:
            merged["choices"].append({**choice, **own, "index": len(merged["choices"])})
        for name in COUNTS:
            usage[name] += answer["usage"][name]
        for name in DETAILS:
            for key, value in (answer["usage"].get(name) or {}).items():
                sums = details.setdefault(name, {})
                sums[key] = sums.get(key, 0) + (value or 0)
    return {**merged, "usage": {**usage, **details}}
