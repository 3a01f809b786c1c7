"""ChatCommands: what a line that begins with a slash does in `quire chat`. No state but the conversation's."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quire.cli.conversation import Conversation
from quire.cli.sampling import FLAGS
from quire.errors import QuireClientError, unknown_name

Command = Callable[[str], None]


class ChatCommands:
    """Carries out commands.

    Args:
        conversation: which they change.
        answer: answers a message, or the last one again (None).
    """

    def __init__(self, conversation: Conversation, answer: Callable[[str | None], object]) -> None:
        self._conversation = conversation
        self._answer = answer
        self._commands: dict[str, tuple[str, str, Command]] = {
            "/help": ("", "show this list", self._help),
            "/clear": ("", "clear the conversation; keep the system prompt", lambda _: conversation.clear()),
            "/system": ("[TEXT]", "set or remove the system prompt and start over", self._system),
            "/regen": ("", "regenerate the last reply", self._regenerate),
            "/set": ("[NAME VALUE]", "set a sampling parameter, or show those set", self._set),
            "/save": ("FILE", "write the conversation to a JSON file", self._save),
            "/load": ("FILE", "load a conversation from a file", self._load),
            "/exit": ("", "exit; also /quit and Ctrl-D", lambda _: None),
        }

    def run(self, line: str) -> bool:
        """Carry out the command of `line`; returns False when the chat is over."""
        name, _, rest = line.partition(" ")
        if name in ("/exit", "/quit", "/bye"):
            return False
        try:
            if name not in self._commands:
                raise QuireClientError(f"unknown command {name}", hint="/help lists the commands")
            self._commands[name][2](rest.strip())
        except (QuireClientError, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
        return True

    def _help(self, _: str) -> None:
        rows = [(f"{name} {argument}".rstrip(), doc) for name, (argument, doc, _) in self._commands.items()]
        rows += [('"""', "begins and ends a message of several lines"), ("Ctrl-C", "stops generation")]
        width = max(len(usage) for usage, _ in rows)
        print("\n".join(f"  {usage:<{width}}  {doc}" for usage, doc in rows), file=sys.stderr)

    def _system(self, text: str) -> None:
        self._conversation.set_system_prompt(text or None)

    def _regenerate(self, _: str) -> None:
        self._answer(None)

    def _set(self, text: str) -> None:
        name, _, value = text.partition(" ")
        if not name:
            values = self._conversation.parameters
            print("\n".join(f"  {one} {values[one]}" for one in values) or "  nothing was set", file=sys.stderr)
            return
        if name not in FLAGS:
            raise unknown_name("sampling parameter", name, FLAGS)
        kind = FLAGS[name][0]
        try:
            number = kind(value)
        except ValueError:
            raise QuireClientError(
                f"{value!r} is not a valid {name}", hint=f"for example /set {name} {kind(1)}", field=name
            ) from None
        self._conversation.set_parameter(name, number)

    def _save(self, name: str) -> None:
        path = _path(name)
        content = {"messages": self._conversation.messages, "parameters": self._conversation.parameters}
        path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        print(f"saved {len(self._conversation.messages)} messages to {path}", file=sys.stderr)

    def _load(self, name: str) -> None:
        path = _path(name)
        try:
            messages = read_messages(json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, RecursionError) as error:
            raise QuireClientError(f"{path} is not a saved chat: {error}", hint="write one with /save") from None
        self._conversation.restore(messages)
        print(f"loaded {len(messages)} messages from {path}", file=sys.stderr)


def read_messages(content: Any) -> list[dict[str, Any]]:
    """The messages of a saved chat, or of a request to a server.

    Raises:
        ValueError: they are malformed.
    """
    messages = content.get("messages") if isinstance(content, dict) else None
    if not isinstance(messages, list) or not messages:
        raise ValueError("messages is missing or not a list")
    for index, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ValueError(f"messages[{index}] has no role")
        if message["role"] == "system" and index:
            raise ValueError(f"messages[{index}]: a system prompt comes first")
    return messages


def _path(name: str) -> Path:
    if not name:
        raise QuireClientError("no file given", hint="for example /save chat.json")
    return Path(name).expanduser()
