"""What a server may answer to a hostile request. No state."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from quire.server import absent
from quire.server.api.anthropic.errors import CLIENT_ERROR, SERVER_ERROR, TYPES
from quire.server.api.responses.errors import INVALID_REQUEST
from quire.server.http import errors
from tests.robustness.server_fuzz.cases import Case
from tests.robustness.server_fuzz.client import Answer, Outcome

CATALOGUE = (
    {
        (kind.status, kind.type, kind.code or kind.status)
        for kind in (*vars(errors).values(), *vars(absent).values())
        if isinstance(kind, errors.ErrorKind)
    }
    | {(400, INVALID_REQUEST, code) for code in (400, errors.TOO_LONG.code)}
    | {(404, INVALID_REQUEST, 404)}
)
ROOT = Path(__file__).parents[3]
INSIDE = re.compile(
    rf"{re.escape(str(ROOT))}/|"
    r'Traceback|File "|site-packages|/usr/|/home/|/tmp/|\w\.py\b|0x[0-9a-f]{6,}|msgspec|starlette|fastapi'
    r"|uvicorn|h11|asyncio|Exception|\b(?:Value|Type|Key|Index|Attribute|Runtime|Overflow|Unicode\w+)Error"
)
LOG = re.compile(r"Traceback|unforeseen|Exception in|Fatal error|never retrieved|never awaited| ERROR | CRITICAL ")


def complaints(case: Case, outcome: Outcome) -> list[str]:
    """What is wrong with `outcome`, in words; empty when nothing is."""
    if outcome.gave_up:
        return ["no answer and no end in time"]
    found = [f"not HTTP: {outcome.raw[:200]!r}"] if outcome.raw else []
    if not outcome.answers and not outcome.raw and not case.may_be_silent:
        found.append("closed without an answer")
    for answer in outcome.answers:
        found += _wrong(case, answer)
    return found


def _wrong(case: Case, answer: Answer) -> list[str]:
    shown = f"{answer.status} {answer.body[:300]!r}"
    if answer.status not in case.statuses:
        return [f"status: {shown}"]
    if answer.status >= 400:
        return _wrong_error(case, answer, shown)
    if answer.headers.get("content-type", "").startswith("text/event-stream"):
        return _wrong_stream(case, answer)
    if answer.headers.get("content-type") == "application/json" and answer.body:
        content = _parsed(answer.body)
        return [f"not an object: {shown}"] if not isinstance(content, dict) or content.get("error") else []
    return []


def _wrong_error(case: Case, answer: Answer, shown: str) -> list[str]:
    if not answer.body and "HEAD" in case.methods:
        return []
    return _wrong_error_object(_parsed(answer.body), answer.status, shown)


def _wrong_error_object(content: Any, status: int, shown: str) -> list[str]:
    if isinstance(content, dict) and set(content) == {"type", "error", "request_id"}:
        return _wrong_message_error(content, status, shown)
    error = content.get("error") if isinstance(content, dict) and set(content) == {"error"} else None
    if not isinstance(error, dict) or set(error) != {"message", "type", "param", "code"}:
        return [f"not an error object: {shown}"]
    if (status, error["type"], error["code"]) not in CATALOGUE or not error["message"]:
        return [f"not of the catalogue: {shown}"]
    if INSIDE.search(error["message"]):
        return [f"tells of the inside: {shown}"]
    return []


def _wrong_message_error(content: Any, status: int, shown: str) -> list[str]:
    """An error in Anthropic's form."""
    error = content["error"]
    if content["type"] != "error" or set(error) != {"type", "message"} or not error["message"]:
        return [f"not an error object: {shown}"]
    if error["type"] != TYPES.get(status, CLIENT_ERROR if status < 500 else SERVER_ERROR):
        return [f"not of the catalogue: {shown}"]
    return [f"tells of the inside: {shown}"] if INSIDE.search(error["message"]) else []


def _wrong_stream(case: Case, answer: Answer) -> list[str]:
    """A stream may end with an error where the case allows 503, and nowhere else."""
    blocks = [block for block in answer.body.split(b"\n\n") if not block.startswith(b":")]
    if blocks[0].startswith(b"event: response."):
        return _wrong_response_stream(case, blocks)
    if blocks[0].startswith(b"event: message_start"):
        return _wrong_message_stream(case, blocks)
    if blocks[-1] or len(blocks) < 2 or blocks[-2] != b"data: [DONE]":
        return [f"a stream without its end: {answer.body[-200:]!r}"]
    for i, block in enumerate(blocks[:-2]):
        content, shown = _parsed(block.removeprefix(b"data: ")), f"{block[:300]!r}"
        if isinstance(content, dict) and "error" in content and 503 in case.statuses and i == len(blocks) - 3:
            return _wrong_error_object(content, 503, shown)
        if not isinstance(content, dict) or "error" in content:
            return [f"an event that is none: {shown}"]
    return []


def _wrong_response_stream(case: Case, blocks: list[bytes]) -> list[str]:
    """The events of a response, numbered; the last one tells how it ended."""
    events = [_parsed(block.partition(b"\ndata: ")[2]) for block in blocks[:-1]]
    if blocks[-1] or not all(isinstance(event, dict) for event in events):
        return [f"an event that is none: {blocks[-1]!r}"]
    if [event.get("sequence_number") for event in events] != list(range(len(events))):
        return ["events are not numbered"]
    ends = {"response.completed", "response.incomplete"} | ({"response.failed"} if 503 in case.statuses else set())
    return [] if events[-1].get("type") in ends else [f"a stream without its end: {blocks[-2][-200:]!r}"]


def _wrong_message_stream(case: Case, blocks: list[bytes]) -> list[str]:
    """The events of a message; only where the case allows 503 may the last one be an error."""
    events = [_parsed(block.partition(b"\ndata: ")[2]) for block in blocks[:-1]]
    if blocks[-1] or not all(isinstance(event, dict) for event in events):
        return [f"an event that is none: {blocks[-1]!r}"]
    ends = {"message_stop"} | ({"error"} if 503 in case.statuses else set())
    return [] if events[-1].get("type") in ends else [f"a stream without its end: {blocks[-2][-200:]!r}"]


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return None
