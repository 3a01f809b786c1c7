"""Snapshots of running requests, taken from one engine and given to another. Called by `AsyncLLM`; no state."""

from __future__ import annotations

from typing import Any

from quire.config import QuireConfig
from quire.core.engine_messages import EngineCoreRequest
from quire.core.request_options import RequestOptions, Resumed
from quire.core.request_snapshot import FIELD, RequestSnapshot
from quire.engine.request_state import RequestState
from quire.errors import ValidationError
from quire.utils.checks import shown


def take_snapshot(
    config: QuireConfig, request_id: str, message: EngineCoreRequest | None, state: RequestState | None
) -> RequestSnapshot:
    """How far a request is.

    Args:
        message, state: of its only answer; None = there is none.

    Raises:
        ValidationError: there is none, or it cannot be continued.
    """
    if message is None or state is None or state.is_finished or not message.sampling_params.can_resume:
        raise ValidationError(
            f"request_id {shown(request_id)} has no snapshot: it does not run, or has several answers or logprobs",
            hint="name a running request as its answer names it", field="request_id",
        )  # fmt: skip
    return RequestSnapshot(
        model=_served_name(config), request_id=request_id, prompt_token_ids=message.prompt_token_ids.tolist(),
        output_token_ids=list(state.token_ids), seed=message.seed, sampling_params=message.sampling_params,
        cache_salt=message.cache_salt, num_shared_tokens=message.num_shared_tokens,
    )  # fmt: skip


def continued(config: QuireConfig, snapshot: RequestSnapshot) -> tuple[dict[str, Any], RequestOptions]:
    """The prompt and options of a request that continues.

    Raises:
        ValidationError: it is of another model.
    """
    served = _served_name(config)
    if snapshot.model != served:
        raise ValidationError(
            f"{FIELD} is of model {shown(snapshot.model)}, this server has {shown(served)}",
            hint="send it to a replica of that model", field=FIELD,
        )  # fmt: skip
    resumed = Resumed(tuple(snapshot.output_token_ids), snapshot.seed)
    return {"prompt_token_ids": snapshot.prompt_token_ids}, RequestOptions(
        cache_salt=snapshot.cache_salt, resumed=resumed
    )


def _served_name(config: QuireConfig) -> str:
    return str(config.model.served_model_name or config.model.model)
