"""Turns of a conversation: the one that a request brings, and those that it follows. No state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quire.errors import ValidationError
from quire.server.api.responses.background import Background
from quire.server.api.responses.envelope import FAILED
from quire.server.api.responses.items import Item, is_object_text, read_items
from quire.server.api.responses.protocol import ResponsesRequest
from quire.server.api.responses.store import BrokenChainError, ResponseStore, StoredResponse
from quire.server.api.responses.tools import with_additional_tools
from quire.server.chat.protocol.warnings import Warnings
from quire.server.http.errors import BAD_REQUEST, NOT_FOUND, ApiError
from quire.utils.checks import shown

PREVIOUS = "previous_response_id"
MAX_CHAIN_BYTES = 64 << 20
DEFAULT_PAGE, MAX_PAGE = 20, 100
ORDERS = ("asc", "desc")


@dataclass(frozen=True, slots=True)
class Turn:
    """What a request says.

    Attributes:
        items: its own.
        conversation: those of the turns before, then its own.
    """

    items: list[Item]
    conversation: list[Item]


async def read_turn(
    body: ResponsesRequest,
    store: ResponseStore | None,
    background: Background,
    tenant: str,
    max_turns: int,
    warnings: Warnings,
) -> Turn:
    """The items of a request and of the turns that it follows; tools among the items move to the request's tools.

    Args:
        max_turns: that are read.

    Raises:
        ApiError, ValidationError, UnsupportedError: the input is malformed, or an earlier turn cannot be used.
    """
    body.tools, body.input = with_additional_tools(body.tools, body.input)
    items = read_items(body.input, warnings)
    previous = body.previous_response_id
    if previous is None:
        return Turn(items, items)
    if store is None:
        raise ValidationError(
            "this server does not store responses to continue from", hint="send the whole conversation as input",
            field=PREVIOUS,
        )  # fmt: skip
    if background.get((tenant, previous)) is not None:
        raise ApiError(BAD_REQUEST, f"the response {shown(previous)} is not completed yet", param=PREVIOUS)
    try:
        turns = await store.chain(tenant, previous, max_turns, MAX_CHAIN_BYTES)
    except BrokenChainError as error:
        if error.is_too_long:
            raise ApiError(
                BAD_REQUEST, "the conversation has too many turns; send the relevant part as input", param=PREVIOUS
            ) from None
        raise ApiError(NOT_FOUND, f"there is no response {shown(error.response_id)}", param=PREVIOUS) from None
    if turns[-1].response.get("status") in (FAILED, "queued", "in_progress"):
        raise ApiError(BAD_REQUEST, f"the response {shown(previous)} failed and cannot be continued", param=PREVIOUS)
    return Turn(items, [*(item for turn in turns for item in _turn_items(turn)), *items])


def items_page(items: Sequence[Item], order: str | None, limit: str | None, after: str | None) -> dict[str, Any]:
    """A page of `items`, the last first unless `order` is asc.

    Raises:
        ValidationError: a parameter is malformed.
    """
    if order not in (None, *ORDERS):
        raise ValidationError(f"order={shown(order)} is unknown", hint="use asc or desc", field="order")
    count = DEFAULT_PAGE
    if limit is not None:
        count = int(limit) if limit.isdecimal() and len(limit) < 5 else 0
        if not 1 <= count <= MAX_PAGE:
            raise ValidationError(f"limit must be in [1, {MAX_PAGE}]", field="limit")
    listed = list(items) if order == "asc" else list(items)[::-1]
    if after is not None:
        positions = [number for number, item in enumerate(listed) if item["id"] == after]
        if not positions:
            raise ValidationError(f"after={shown(after)} is not an item of this response", field="after")
        listed = listed[positions[0] + 1 :]
    page = listed[:count]
    return {
        "object": "list", "data": page, "has_more": len(listed) > len(page),
        "first_id": page[0]["id"] if page else None, "last_id": page[-1]["id"] if page else None,
    }  # fmt: skip


def _turn_items(turn: StoredResponse) -> list[Item]:
    """What an earlier turn adds to the conversation; calls that were cut short say nothing that could be shown."""
    output = [item for item in turn.response.get("output", ()) if not _is_cut_call(item)]
    return read_items([*turn.input, *output], Warnings())


def _is_cut_call(item: Item) -> bool:
    return item.get("type") == "function_call" and not is_object_text(item.get("arguments"))
