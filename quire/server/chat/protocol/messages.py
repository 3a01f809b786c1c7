"""The messages of a chat as clients send them, on their way to `core.inputs.parse_messages`. Pure functions.

Clients send back what other servers' answers had. A key that cannot change the prompt is left out and named in
`warnings`; one that would is translated or refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.core.inputs import MESSAGE_KEYS, ROLES, TOOL_CALL_KEYS
from quire.errors import MAX_NAME_CHARS, UnsupportedError, ValidationError, nearest
from quire.server.chat.protocol.warnings import MAX_WARNINGS, Warnings
from quire.utils.checks import shown

Message = dict[str, Any]

FIELD = "messages"
NEEDED = ("role", "content")
REFUSED = {
    "prefix": "send continue_final_message=true to have the last message continued",
    "tools": "send them as tools of the request",
    "audio": "send the audio as text content",
}
"""Keys that ask for another prompt -> what to do instead."""


def read_messages(given: Sequence[Message], warnings: Warnings) -> list[Message]:
    """Messages with the keys that are known, and no others; empty ones ("refusal": null) are left out.

    Args:
        warnings: gets each key that is left out, at the first message that has it.

    Raises:
        ValidationError: strict: a key or a role is unknown.
        UnsupportedError: a key asks for what is not there.
    """
    reader = _Reader(warnings)
    return [reader.message(f"{FIELD}[{index}]", message) for index, message in enumerate(given)]


class _Reader:
    """Reads the messages of one request; knows which keys were named already."""

    def __init__(self, warnings: Warnings) -> None:
        self._warnings = warnings
        self._named: set[str] = set()

    def message(self, where: str, message: Message) -> Message:
        kept: Message = {}
        for name, value in message.items():
            if name in MESSAGE_KEYS:
                if name in NEEDED or value not in (None, []):
                    kept[name] = value
            elif name in REFUSED and value:
                raise UnsupportedError(f"{where}.{name} is not supported", hint=REFUSED[name], field=f"{where}.{name}")
            elif name != "function_call" and value and not self._is_noted(where, name, MESSAGE_KEYS, message):
                kept[name] = value  # to be refused
        if message.get("function_call"):
            kept["tool_calls"] = _calls(where, message)
        elif isinstance(kept.get("tool_calls"), list):
            kept["tool_calls"] = [
                self._call(f"{where}.tool_calls[{number}]", call) if isinstance(call, dict) else call
                for number, call in enumerate(kept["tool_calls"])
            ]
        self._note_role(where, kept.get("role"))
        return kept

    def _call(self, where: str, call: dict[str, Any]) -> dict[str, Any]:
        unknown = [name for name in call if name not in TOOL_CALL_KEYS]
        for name in unknown:
            if call[name]:
                self._is_noted(where, name, TOOL_CALL_KEYS, call)
        return {name: value for name, value in call.items() if name not in unknown} if unknown else call

    def _note_role(self, where: str, role: Any) -> None:
        """Templates may know roles of their own; what looks like a misspelling is worth a line."""
        if not isinstance(role, str) or role in ROLES or f"role {role}" in self._named:
            return
        self._named.add(f"role {role[:MAX_NAME_CHARS]}")
        close = nearest(role, ROLES)
        hint = f"; did you mean {close}?" if close else ""
        text = f"{where}.role={shown(role)} is not a standard role; it is passed to the chat template{hint}"
        self._warnings.add(where, text, f"use {', '.join(ROLES)}")

    def _is_noted(self, where: str, name: str, known: Sequence[str], owner: dict[str, Any]) -> bool:
        """Name a key that is left out; False for what must be a misspelling of one that `owner` needs and lacks."""
        short = name[:MAX_NAME_CHARS]
        if short in self._named or len(self._named) >= MAX_WARNINGS:
            return True
        close = nearest(name, known)
        if close in NEEDED and owner.get(close) is None:
            return False
        self._named.add(short)
        self._warnings.add(f"{where}.{short}", f"{where}.{short} has no effect")
        return True


def _calls(where: str, message: Message) -> list[dict[str, Any]]:
    """`function_call`, the one call of a message in OpenAI's older form, as `tool_calls`."""
    if message.get("tool_calls"):
        raise ValidationError(
            f"{where} has function_call and tool_calls", hint="send tool_calls alone", field=f"{where}.function_call"
        )
    return [{"type": "function", "function": message["function_call"]}]
