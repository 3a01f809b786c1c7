"""Messages of content blocks as the messages of a chat.

Called by `translation`. `Conversation` owns the chat's turns while they are put together.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from quire.errors import UnsupportedError, ValidationError, unknown_name
from quire.server.api.anthropic.parts import kind_of, read_part
from quire.server.chat.protocol.warnings import Warnings
from quire.utils.checks import check_text, shown, wrong_type

AddBlock = Callable[[str, str, Any], None]
"""Takes in a block: where it is, the role of its message, the block."""

ROLES = ("user", "assistant", "system")
MEDIA = ("image", "document", "search_result", "container_upload", "tool_reference", "browser_state")
CACHE_CONTROL: dict[str, tuple[Any, ...]] = {"cache_control": ()}
ABOUT_TEXT = {**CACHE_CONTROL, "citations": ([],)}
CLIENT_NOTICE = "x-anthropic-billing-header:"
"""What some agents write into a system block of its own for the provider's accounts. It changes with every request, so
a prompt that held it would share nothing with the one before."""
ERROR_MARK = "Error: "


class TextBlock(msgspec.Struct):
    """Text."""

    text: str


class ToolUseBlock(msgspec.Struct):
    """A call that the model made."""

    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(msgspec.Struct):
    """What came of a call."""

    tool_use_id: str
    content: str | list[dict[str, Any]] | None = None
    is_error: bool | None = None


class ThinkingBlock(msgspec.Struct):
    """What the model thought; the signature is not looked at."""

    thinking: str
    signature: str | None = None


class RedactedBlock(msgspec.Struct):
    """Thinking that only its provider can read."""

    data: str


@dataclass(slots=True)
class Turn:
    """One message of the chat, while it is put together.

    Attributes:
        rest: fields beside its role and its text.
    """

    role: str
    texts: list[str] = field(default_factory=list)
    thoughts: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    rest: dict[str, Any] = field(default_factory=dict)

    def message(self) -> dict[str, Any]:
        """As chats have it: a line break between its texts."""
        has_more = self.thoughts or self.calls
        message = {"role": self.role, "content": "\n".join(self.texts) if self.texts or not has_more else None}
        if self.thoughts:
            message["reasoning_content"] = "\n".join(self.thoughts)
        return message | ({"tool_calls": self.calls} if self.calls else {}) | self.rest


class Conversation:
    """Puts a chat together. Neighbouring turns of one role become one, as templates want them.

    Args:
        warnings: gets what is not used.
    """

    def __init__(self, warnings: Warnings) -> None:
        self._turns: list[Turn] = []
        self._warnings = warnings
        self._tool_names: dict[str, str] = {}
        self._user_blocks: dict[str, AddBlock] = {"text": self._add_text, "tool_result": self._add_result}
        self._assistant_blocks: dict[str, AddBlock] = {
            "text": self._add_text, "thinking": self._add_thinking, "redacted_thinking": self._note_redacted,
            "tool_use": self._add_call,
        }  # fmt: skip

    def add_system(self, where: str, system: str | list[Any]) -> None:
        """The system prompt, or a further part of it.

        Raises:
            ValidationError, UnsupportedError: a block is malformed, or is no text.
        """
        for text in self._texts(where, system):
            if text.startswith(CLIENT_NOTICE):
                self._warnings.add(where, f"{where}: {CLIENT_NOTICE} is not part of the prompt")
            else:
                self._turn("system").texts.append(text)

    def add(self, where: str, message: dict[str, Any]) -> None:
        """A turn.

        Raises:
            ValidationError, UnsupportedError: it is malformed, or has a block that a text model cannot take.
        """
        for name in message:
            if name not in ("role", "content") and not self._warnings.are_full:
                self._warnings.add(where, f"{where}: unknown field {shown(name)} is ignored")
        role, content = check_text(f"{where}.role", message.get("role")), message.get("content")
        if role not in ROLES:
            raise unknown_name(f"role in {where}:", role, ROLES, ValidationError, field=f"{where}.role")
        if not isinstance(content, (str, list)):
            raise wrong_type(f"{where}.content", content, "a string or a list of blocks")
        if role == "system":
            self.add_system(f"{where}.content", content)
        elif isinstance(content, str):
            self._turn(role).texts.append(content)
        else:
            self._add_blocks(role, f"{where}.content", content)

    def messages(self) -> list[dict[str, Any]]:
        """The chat's messages."""
        return [turn.message() for turn in self._turns]

    def continues_last(self) -> bool:
        """True when the last turn is the beginning of the answer.

        Raises:
            ValidationError: it is a turn of the assistant's that cannot be continued.
        """
        if not self._turns or self._turns[-1].role != "assistant":
            return False
        last = self._turns[-1]
        if last.calls:
            raise ValidationError(
                "messages end with a tool_use block",
                hint="send its result in a tool_result block of a user message", field="messages",
            )  # fmt: skip
        if not any(last.texts):
            raise ValidationError(
                "messages end with an assistant message without text, which cannot be continued",
                hint="leave it out, or end with a user message", field="messages",
            )  # fmt: skip
        return True

    def _add_blocks(self, role: str, where: str, blocks: list[Any]) -> None:
        known = self._user_blocks if role == "user" else self._assistant_blocks
        if not blocks:
            self._turn(role).texts.append("")
        for index, block in enumerate(blocks):
            place = f"{where}[{index}]"
            known[_block_kind(place, block, role, known)](place, role, block)

    def _turn(self, role: str) -> Turn:
        """The last turn if it is of `role`, else a new one."""
        if not self._turns or self._turns[-1].role != role:
            self._turns.append(Turn(role))
        return self._turns[-1]

    def _add_text(self, where: str, role: str, block: Any) -> None:
        self._turn(role).texts.append(read_part(where, block, TextBlock, self._warnings, ABOUT_TEXT).text)

    def _add_result(self, where: str, role: str, block: Any) -> None:
        result = read_part(where, block, ToolResultBlock, self._warnings, {**CACHE_CONTROL, "toolset_name": ()})
        text = "\n".join(self._texts(f"{where}.content", result.content or ""))
        if result.is_error and text[:5].lower() != "error":
            text = f"{ERROR_MARK}{text}"
        rest = {"tool_call_id": result.tool_use_id}
        if result.tool_use_id in self._tool_names:
            rest["name"] = self._tool_names[result.tool_use_id]
        self._turns.append(Turn("tool", [text], rest=rest))

    def _add_thinking(self, where: str, role: str, block: Any) -> None:
        self._turn(role).thoughts.append(read_part(where, block, ThinkingBlock, self._warnings).thinking)

    def _note_redacted(self, where: str, role: str, block: Any) -> None:
        read_part(where, block, RedactedBlock, self._warnings)
        self._turn(role)
        self._warnings.add("redacted_thinking", "redacted_thinking has no effect: only its provider can read it")

    def _add_call(self, where: str, role: str, block: Any) -> None:
        call = read_part(
            where, block, ToolUseBlock, self._warnings,
            {**CACHE_CONTROL, "caller": ({"type": "direct"},), "toolset_name": ()},
        )  # fmt: skip
        self._tool_names[call.id] = call.name
        function = {"name": call.name, "arguments": call.input}
        self._turn(role).calls.append({"id": call.id, "type": "function", "function": function})

    def _texts(self, where: str, content: str | list[Any]) -> list[str]:
        """The texts of a content that may hold nothing else."""
        if isinstance(content, str):
            return [content]
        texts: list[str] = []
        for index, block in enumerate(content):
            place = f"{where}[{index}]"
            _block_kind(place, block, "", ("text",))
            texts.append(read_part(place, block, TextBlock, self._warnings, ABOUT_TEXT).text)
        return texts


def _block_kind(where: str, block: Any, role: str, known: Any) -> str:
    """The type of a block, one of `known`."""
    kind = block.get("type") if isinstance(block, dict) else None
    if isinstance(kind, str) and kind in MEDIA:
        raise UnsupportedError(
            f"{where} is a block of type {kind}; this server's models take text", hint="send text blocks", field=where
        )
    place = f"in a message of the {role}" if role else "here"
    return kind_of(where, block, known, f"{', '.join(known)} can stand {place}")
