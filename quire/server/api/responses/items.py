"""Items of a conversation: read from requests and from the store, made into the messages of a chat. No state.

An item as it is kept has an id, a type and only fields that are known; an assistant's thinking, text and calls that
follow each other are one message of a chat.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from quire.errors import UnsupportedError, ValidationError
from quire.server.api.responses.tools import custom_arguments, flat_name
from quire.server.chat.protocol.warnings import Warnings
from quire.utils.checks import shown

Item = dict[str, Any]

FIELD = "input"
MAX_ITEMS = 4096
MAX_ID_CHARS = 128
ROLES = ("user", "assistant", "system", "developer")
TEXT_PARTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
PREFIXES = {
    "message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco",
    "custom_tool_call": "ctc", "custom_tool_call_output": "ctco",
}  # fmt: skip
CALLS = ("function_call", "custom_tool_call")
OUTPUTS = ("function_call_output", "custom_tool_call_output")
UNUSED = frozenset(("id", "status", "type", "annotations", "logprobs", "parsed", "parsed_arguments"))
"""Fields that answers have and that say nothing about the conversation."""


class _Message(msgspec.Struct):
    role: str
    content: str | list[dict[str, Any]]


class _Reasoning(msgspec.Struct):
    summary: list[dict[str, Any]] = []
    content: list[dict[str, Any]] | None = None


class _FunctionCall(msgspec.Struct):
    call_id: str
    name: str
    arguments: str
    namespace: str | None = None


class _CustomCall(msgspec.Struct):
    call_id: str
    name: str
    input: str
    namespace: str | None = None


class _FunctionCallOutput(msgspec.Struct):
    call_id: str
    output: str | list[dict[str, Any]]


class _CustomCallOutput(_FunctionCallOutput):
    pass


FORMS: dict[str, type[msgspec.Struct]] = {
    "message": _Message, "reasoning": _Reasoning, "function_call": _FunctionCall,
    "function_call_output": _FunctionCallOutput, "custom_tool_call": _CustomCall,
    "custom_tool_call_output": _CustomCallOutput,
}  # fmt: skip


def new_id(kind: str) -> str:
    """An id for an item of type `kind`."""
    return f"{PREFIXES[kind]}_{secrets.token_hex(16)}"


def read_items(given: str | Sequence[dict[str, Any]] | None, warnings: Warnings) -> list[Item]:
    """The items of a request's `input`, or of a stored answer, checked.

    Args:
        warnings: gets each field that is not used.

    Raises:
        ValidationError: there is none, or one is malformed.
        UnsupportedError: an item or a part of a type that cannot be shown to the model.
    """
    if not given:
        raise ValidationError("input is missing or empty", hint="send a string or a list of items", field=FIELD)
    if isinstance(given, str):
        return [_message("user", [{"type": "input_text", "text": given}], None)]
    if len(given) > MAX_ITEMS:
        raise ValidationError(f"input has {len(given)} items, at most {MAX_ITEMS} are allowed", field=FIELD)
    return [_read_item(f"input[{index}]", item, warnings) for index, item in enumerate(given)]


def is_object_text(arguments: object) -> bool:
    """True for arguments of a call that can be shown to the model: the text of a JSON object, or nothing."""
    if not isinstance(arguments, str):
        return False
    try:
        return isinstance(msgspec.json.decode(arguments or "{}"), dict)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        return False


def messages_of(items: Sequence[Item], developer_role: str) -> list[dict[str, Any]]:
    """The messages of a chat that say what `items` say.

    Args:
        developer_role: what developers are called there.
    """
    messages: list[dict[str, Any]] = []
    turn: dict[str, Any] | None = None  # the assistant's, while it may grow
    for item in items:
        kind = item["type"]
        if kind == "message" and item["role"] != "assistant":
            role = developer_role if item["role"] == "developer" else item["role"]
            messages.append({"role": role, "content": _text(item["content"])})
            turn = None
            continue
        if kind in OUTPUTS:
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": _text(item["output"])})
            turn = None
            continue
        if turn is None or _ends(turn, kind):
            turn = {"role": "assistant", "content": None}
            messages.append(turn)
        _add(turn, kind, item)
    for message in messages:
        if message["content"] is None and "tool_calls" not in message:
            message["content"] = ""
    return messages


def _ends(turn: dict[str, Any], kind: str) -> bool:
    """True when an item of type `kind` begins a new message of the assistant's."""
    if kind in CALLS:
        return False
    return "tool_calls" in turn or turn["content"] is not None


def _add(turn: dict[str, Any], kind: str, item: Item) -> None:
    if kind == "message":
        turn["content"] = _text(item["content"])
    elif kind == "reasoning":
        parts = item["content"] or item["summary"]
        turn["reasoning_content"] = turn.get("reasoning_content", "") + "".join(part["text"] for part in parts)
    else:
        is_custom = kind == "custom_tool_call"
        function = {
            "name": flat_name(item.get("namespace"), item["name"]),
            "arguments": custom_arguments(item["input"]) if is_custom else item["arguments"],
        }
        calls: list[dict[str, Any]] = turn.setdefault("tool_calls", [])
        calls.append({"id": item["call_id"], "type": "function", "function": function})


def _text(content: str | list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """As a chat has it: one text, or several parts."""
    if isinstance(content, str):
        return content
    texts = [part[TEXT_PARTS[part["type"]]] for part in content]
    return texts[0] if len(texts) == 1 else [{"type": "text", "text": text} for text in texts]


def _read_item(where: str, item: dict[str, Any], warnings: Warnings) -> Item:
    kind = item.get("type", "message" if "role" in item else None)
    form = FORMS.get(kind) if isinstance(kind, str) else None
    if form is None:
        raise UnsupportedError(
            f"{where}.type={shown(kind)} is not supported", hint=f"use {', '.join(FORMS)}", field=FIELD
        )
    _warn(where, item, form.__struct_fields__, warnings)
    try:
        read = msgspec.convert(item, form)
    except msgspec.ValidationError as error:
        raise ValidationError(f"{where}: {error}", field=FIELD) from None
    own_id = item.get("id")
    if own_id is not None and (not isinstance(own_id, str) or not 0 < len(own_id) <= MAX_ID_CHARS):
        raise _wrong(f"{where}.id", own_id, f"a string of 1 to {MAX_ID_CHARS} characters")
    return READERS[form](where, read, own_id)


def _warn(where: str, item: dict[str, Any], known: tuple[str, ...], warnings: Warnings) -> None:
    for name, value in item.items():
        if name in known or name in UNUSED or value in (None, [], {}):
            continue
        if not warnings.are_full:
            warnings.add(f"{where}.{name[:40]}", f"{where}.{name[:40]} has no effect")


def _read_message(where: str, read: _Message, own_id: str | None) -> Item:
    if read.role not in ROLES:
        raise ValidationError(
            f"{where}.role={shown(read.role)} is unknown", hint=f"use one of {', '.join(ROLES)}", field=FIELD
        )
    kind = "output_text" if read.role == "assistant" else "input_text"
    content = read.content
    parts = [_part(kind, content)] if isinstance(content, str) else _parts(f"{where}.content", content, kind)
    return _message(read.role, parts, own_id)


def _message(role: str, content: list[dict[str, Any]], own_id: str | None) -> Item:
    return {
        "id": own_id or new_id("message"), "type": "message", "role": role, "status": "completed", "content": content
    }  # fmt: skip


def _read_reasoning(where: str, read: _Reasoning, own_id: str | None) -> Item:
    summary = [
        {"type": "summary_text", "text": _part_text(f"{where}.summary[{number}]", part, "text")}
        for number, part in enumerate(read.summary)
    ]
    content = [
        {"type": "reasoning_text", "text": _part_text(f"{where}.content[{number}]", part, "text")}
        for number, part in enumerate(read.content or [])
    ]
    return {"id": own_id or new_id("reasoning"), "type": "reasoning", "summary": summary, "content": content}


def _read_call(where: str, read: _FunctionCall, own_id: str | None) -> Item:
    _check_call_id(where, read.call_id)
    if not is_object_text(read.arguments):
        raise ValidationError(
            f"{where}.arguments is not a JSON object", hint="send them as the model generated them", field=FIELD
        )
    return {
        "id": own_id or new_id("function_call"), "type": "function_call", "status": "completed",
        "call_id": read.call_id, "name": read.name, "arguments": read.arguments, **_namespace(read.namespace),
    }  # fmt: skip


def _read_custom_call(where: str, read: _CustomCall, own_id: str | None) -> Item:
    _check_call_id(where, read.call_id)
    return {
        "id": own_id or new_id("custom_tool_call"), "type": "custom_tool_call", "status": "completed",
        "call_id": read.call_id, "name": read.name, "input": read.input, **_namespace(read.namespace),
    }  # fmt: skip


def _namespace(namespace: str | None) -> dict[str, str]:
    return {"namespace": namespace} if namespace else {}


def _read_output(where: str, read: _FunctionCallOutput, own_id: str | None) -> Item:
    kind = OUTPUTS[isinstance(read, _CustomCallOutput)]
    _check_call_id(where, read.call_id)
    output = read.output
    if not isinstance(output, str):
        output = _parts(f"{where}.output", output, "input_text")
    return {
        "id": own_id or new_id(kind), "type": kind, "status": "completed", "call_id": read.call_id, "output": output,
    }  # fmt: skip


READERS: dict[type[msgspec.Struct], Callable[[str, Any, str | None], Item]] = {
    _Message: _read_message, _Reasoning: _read_reasoning, _FunctionCall: _read_call, _FunctionCallOutput: _read_output,
    _CustomCall: _read_custom_call, _CustomCallOutput: _read_output,
}  # fmt: skip


def _check_call_id(where: str, call_id: str) -> None:
    if not call_id:
        raise ValidationError(f"{where}.call_id is empty", hint="use the id of the call", field=FIELD)


def _parts(where: str, parts: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    read = []
    for number, part in enumerate(parts):
        name = TEXT_PARTS.get(part["type"]) if isinstance(part.get("type"), str) else None
        if name is None:
            raise UnsupportedError(
                f"{where}[{number}].type={shown(part.get('type'))} is not supported; this model reads text",
                hint=f'give {{"type": "{kind}", "text": ...}}', field=FIELD,
            )  # fmt: skip
        read.append(_part(kind, _part_text(f"{where}[{number}]", part, name)))
    if not read:
        raise ValidationError(f"{where} is empty", hint="send non-empty text", field=FIELD)
    return read


def _part(kind: str, text: str) -> dict[str, Any]:
    return {"type": kind, "text": text, **({"annotations": []} if kind == "output_text" else {})}


def _part_text(where: str, part: dict[str, Any], name: str) -> str:
    text = part.get(name)
    if not isinstance(text, str):
        raise _wrong(f"{where}.{name}", text, "a string")
    return text


def _wrong(where: str, value: object, expected: str) -> ValidationError:
    return ValidationError(f"{where} must be {expected}, got {shown(value)} ({type(value).__name__})", field=FIELD)
