"""Routes that say how the server is and what it has, and the tokenizer's. Owns nothing."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.config import QuireConfig
from quire.config.build import public_config
from quire.engine.protocol import Scalable
from quire.errors import EngineDeadError
from quire.metrics.draft_metrics import DraftMetrics
from quire.metrics.family_sums import page_of
from quire.server.api.openai.protocol.tokenize import DETOKENIZE_FIELDS, TOKENIZE_FIELDS, check_tokenize
from quire.server.chat.prompts import Truncation
from quire.server.chat.protocol.generation import check_truncation
from quire.server.chat.protocol.reading import RequestFields
from quire.server.chat.protocol.warnings import Warnings
from quire.server.chat.state import ServerState
from quire.server.http.errors import FORBIDDEN, NOT_FOUND, ApiError
from quire.server.http.request_scope import scope_of
from quire.version import __version__

METRICS_TYPE = "text/plain; version=1.0.0; charset=utf-8"
ROOT_TEXT = "Quire: OpenAI's API is under /v1, Anthropic's is /v1/messages; /health returns the server's state.\n"


class PlainRoutes:
    """Routes that depend on nothing."""

    async def root(self, request: Request) -> Response:
        """What listens here; clients probe it to learn whether anything does."""
        return Response(ROOT_TEXT, media_type="text/plain")

    async def live(self, request: Request) -> Response:
        """This process runs."""
        return Response(status_code=200)

    async def version(self, request: Request) -> Response:
        """Quire's version."""
        return _json({"version": __version__})


class InfoRoutes(PlainRoutes):
    """The routes that generate nothing."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def models(self, request: Request) -> Response:
        """The names that requests may ask for."""
        return _json({"object": "list", "data": [self._card(name) for name in self._state.model_names]})

    async def model(self, request: Request) -> Response:
        """One model by name."""
        return _json(self._card(self._state.check_model(request.path_params["model"])))

    async def tokenize(self, request: Request) -> Response:
        """Ids of a text or a conversation."""
        body, warnings = await self._read(request, TOKENIZE_FIELDS)
        self._state.check_model(body.model)
        check_tokenize(body, warnings)
        check_truncation(body)
        reader, tenant = self._state.prompts, scope_of(request).tenant
        cut = Truncation(body.truncate_prompt_tokens, body.truncation_side or "left", body.max_tokens or 1)
        if body.messages is not None:
            size = reader.size_of(body)
            charge = self._state.admission.begin(0, reader.least_tokens_of(size), tenant)
            prompt = await reader.read_chat(
                body, cut, tenant=tenant.name, size=size, add_special_tokens=bool(body.add_special_tokens),
                warnings=warnings,
            )  # fmt: skip
        else:
            charge = self._state.admission.begin(0, reader.least_tokens(body.prompt), tenant)
            special = body.add_special_tokens is not False
            prompt = await reader.read(
                body.prompt, cut, tenant=tenant.name, add_special_tokens=special, warnings=warnings
            )
        ids = list(prompt.prompt_token_ids)
        charge.correct(len(ids))
        content = {
            "count": len(ids),
            "max_model_len": reader.max_model_len,
            "tokens": ids,
            "token_strs": await reader.token_strs(ids, tenant.name) if body.return_token_strs else None,
        }
        return _with_warnings(content, warnings)

    async def detokenize(self, request: Request) -> Response:
        """Text of ids."""
        body, warnings = await self._read(request, DETOKENIZE_FIELDS)
        self._state.check_model(body.model)
        tenant = scope_of(request).tenant
        self._state.admission.begin(0, len(body.tokens), tenant)
        content = {"prompt": await self._state.prompts.decode_long(body.tokens, tenant.name)}
        return _with_warnings(content, warnings)

    async def health(self, request: Request) -> Response:
        """The engine can serve."""
        await require_alive(self._state)
        return Response(status_code=200)

    async def ready(self, request: Request) -> Response:
        """New work is taken."""
        self._state.refuse_new_work()
        await require_alive(self._state)
        return Response(status_code=200)

    async def server_info(self, request: Request) -> Response:
        """The engine's settings, without secrets; of several tenants, only an operator may read them."""
        if not self._state.tenants.may_see_all(scope_of(request).tenant):
            raise ApiError(
                FORBIDDEN,
                "server settings need operator rights, which this API key lacks (operator: true in the key file)",
            )
        engine = self._state.engine
        config = engine.config
        speculation = speculation_info(config, self._state.metrics.drafts)
        content: dict[str, Any] = {
            "version": __version__,
            "config": public_config(config),
            "speculative_decoding": speculation,
        }
        if isinstance(engine, Scalable):
            content["data_parallel_size"] = engine.data_parallel_size
        return _json(content)

    async def tokenizer_info(self, request: Request) -> Response:
        """What the tokenizer's own settings say, with the chat template."""
        if not self._state.config.api.enable_tokenizer_info_endpoint:
            raise ApiError(
                NOT_FOUND, "tokenizer settings are not served; start the server with "
                    "--enable-tokenizer-info-endpoint",
            )  # fmt: skip
        tokenizer, template = self._state.prompts.tokenizer(), self._state.engine.chat_template
        told = {name: value for name, value in tokenizer.config.items() if not name.endswith(("_file", "name_or_path"))}
        told |= tokenizer.special_tokens
        return _json({**told, "chat_template": None if template is None else template.source})

    async def load(self, request: Request) -> Response:
        """Answers that were admitted and have not ended; of several tenants, each sees its own alone."""
        tenant = scope_of(request).tenant
        sees_all = self._state.tenants.may_see_all(tenant)
        return _json({"server_load": self._state.admission.num_answers if sees_all else tenant.num_answers})

    async def metrics(self, request: Request) -> Response:
        """Everything counted, for Prometheus; of several tenants, only an operator may read it."""
        if not self._state.tenants.may_see_all(scope_of(request).tenant):
            raise ApiError(
                FORBIDDEN,
                "metrics cover the whole server; this API key lacks operator rights (operator: true in the key file)",
            )
        await self._state.look_at_processes()
        metrics, peers = self._state.metrics, self._state.parts.peers
        page = metrics.render() if peers is None else page_of(await peers.families(metrics.all_series()))
        return Response(page, headers={"content-type": METRICS_TYPE})

    async def _read(self, request: Request, fields: RequestFields[Any]) -> tuple[Any, Warnings]:
        body: tuple[Any, Warnings] = await self._state.bodies.read_fields(request, fields)
        return body

    def _card(self, name: str) -> dict[str, Any]:
        model = self._state.engine.config.model
        return {
            "id": name,
            "object": "model",
            "created": self._state.parts.created,
            "owned_by": "quire",
            "root": model.model,
            "parent": None,
            "max_model_len": model.max_model_len,
            "permission": [],
        }


def speculation_info(config: QuireConfig, drafts: DraftMetrics | None) -> dict[str, Any] | None:
    """Its settings as they were resolved, and what was decided since the engine core started; None = it is off."""
    if config.speculative is None or drafts is None:
        return None
    stats = dataclasses.asdict(drafts.told)
    if stats["controller"] is not None:
        stats["controller"]["reasons"] = {reason.value: n for reason, n in stats["controller"]["reasons"].items()}
    return {**dataclasses.asdict(config.speculative), **stats}


def _with_warnings(content: dict[str, Any], warnings: Warnings) -> Response:
    return _json({**content, "warnings": warnings.texts} if warnings.texts else content)


def _json(content: Any) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")


async def require_alive(state: ServerState) -> None:
    """Raise `EngineDeadError` unless the engine can serve."""
    if state.engine.errored:
        raise EngineDeadError("the engine has stopped")
    await state.engine.check_health()
