"""Routes by which operators move a running request to another replica; for operators' API keys alone. No state."""

from __future__ import annotations

import uuid
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from quire.core.request_snapshot import snapshot_from
from quire.engine.protocol import Migratable
from quire.errors import ValidationError
from quire.logger import get_logger
from quire.server.api.openai.operator_routes import require_operator
from quire.server.chat.protocol.reading import RequestFields
from quire.server.chat.reading import release
from quire.server.chat.state import ServerState

logger = get_logger(__name__)


class SnapshotRequest(msgspec.Struct, kw_only=True):
    """Which request, by the id of its answer, and whether it is to end here."""

    request_id: str = ""
    abort: bool = False


class ResumeRequest(msgspec.Struct, kw_only=True):
    """What `/snapshot_request` of another replica gave."""

    snapshot: dict[str, Any] = msgspec.field(default_factory=dict)


SNAPSHOT_FIELDS, RESUME_FIELDS = RequestFields(SnapshotRequest), RequestFields(ResumeRequest)


class MigrationRoutes:
    """The routes."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def snapshot(self, request: Request) -> Response:
        """A running request and how far it is; with `abort` it ends here."""
        require_operator(request)
        body, _ = await self._state.bodies.read_fields(request, SNAPSHOT_FIELDS)
        release(request)
        taken = self._engine().snapshot(body.request_id)
        if body.abort:
            await self._state.engine.abort(body.request_id)
        return Response(taken.to_json(), media_type="application/json")

    async def resume(self, request: Request) -> Response:
        """The whole answer of a request that began on another replica, when it has ended."""
        require_operator(request)
        body, _ = await self._state.bodies.read_fields(request, RESUME_FIELDS)
        release(request)
        snapshot, output = snapshot_from(body.snapshot), None
        logger.info("a request of another replica is resumed after %d tokens", len(snapshot.output_token_ids))
        async for one in self._engine().resume(snapshot, f"resumed-{uuid.uuid4().hex}"):
            output = one
        if output is None or not output.outputs:
            raise ValidationError("snapshot gave no answer", hint="send it again", field="snapshot")
        answer = output.outputs[0]
        told = {
            "request_id": snapshot.request_id, "text": answer.text, "output_token_ids": answer.token_ids,
            "finish_reason": answer.finish_reason, "stop_reason": answer.stop_reason,
        }  # fmt: skip
        return Response(msgspec.json.encode(told), media_type="application/json")

    def _engine(self) -> Migratable:
        engine = self._state.engine
        assert isinstance(engine, Migratable), "the routes are there where it is"
        return engine
