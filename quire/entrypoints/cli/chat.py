"""Talk to the model: answers stream as they are made, with their speed after each.

Commands: /clear forgets the conversation, /system TEXT sets the system prompt, /exit ends. Ctrl-C ends an answer,
not the program. Without a terminal, each line of stdin is one message.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import Any, Protocol

from quire import envs
from quire.core.sampling_params import SamplingParams
from quire.engine.llm_engine import LLMEngine
from quire.entrypoints.cli.remote_chat import RemoteChat, remote_parameters
from quire.entrypoints.cli.sampling import add_model_arguments, add_sampling_arguments, sampling_from_args, start_engine
from quire.entrypoints.cli.streaming import AnswerStream, AnswerTimes
from quire.errors import ChatTemplateError, QuireClientError

HELP = "/clear forgets the conversation, /system TEXT sets the system prompt, /exit ends; Ctrl-C ends an answer"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's flags."""
    add_sampling_arguments(parser)
    add_model_arguments(parser)
    parser.conflict_handler = "resolve"  # here -q asks a question; --quantization keeps its long name
    group = parser.add_argument_group("conversation")
    group.add_argument("--quick", "-q", metavar="MESSAGE", help="Answer one message and end.")
    group.add_argument("--system-prompt", metavar="TEXT", help="What the model is told before the conversation.")
    group.add_argument(
        "--url", metavar="URL", help="Talk to a server, such as http://127.0.0.1:8000/v1, in place of a model in here."
    )
    group.add_argument("--api-key", metavar="KEY", help="For --url; default: QUIRE_API_KEY of the environment.")
    group.add_argument("--no-stats", action="store_true", help="Do not show speed and TTFT after each answer.")


def run(args: argparse.Namespace) -> int:
    """Answer messages until there are no more."""
    if args.url is not None:
        remote = RemoteChat(args.url, args.api_key or envs.api_key(), remote_parameters(args), args.system_prompt)
        _hold(remote, remote.model, args)
        return 0
    engine = start_engine(args)
    try:
        session = ChatSession(engine, sampling_from_args(args, engine, max_tokens=None), args.system_prompt)
        _hold(session, engine.config.model.served_model_name or "", args)
        return 0
    finally:
        engine.shutdown()


class Chat(Protocol):
    """A conversation, held here or by a server."""

    def set_system_prompt(self, text: str | None) -> None:
        """Begin anew with `text` as the system prompt."""

    def clear(self) -> None:
        """Forget the conversation; the system prompt stays."""

    def answer(self, message: str) -> AnswerTimes:
        """Write the answer to `message` to stdout as it comes."""


def _hold(chat: Chat, name: str, args: argparse.Namespace) -> None:
    if args.quick is not None:
        _answer(chat, args.quick, shows_stats=not args.no_stats)
        return
    if sys.stdin.isatty():
        print(f"{name}: {HELP}", file=sys.stderr)
    _converse(chat, shows_stats=not args.no_stats)


class ChatSession:
    """A conversation that is being held.

    Args:
        engine: has a chat template.
        params: of every answer.
        system_prompt: first message of the conversation; None = none.
    """

    def __init__(self, engine: LLMEngine, params: SamplingParams, system_prompt: str | None = None) -> None:
        if engine.chat_template is None:
            raise ChatTemplateError(
                "this model has no chat template", hint="pass one with --chat-template, or use quire generate"
            )
        self._engine = engine
        self._template = engine.chat_template
        self._params = params
        self._system: list[dict[str, Any]] = []
        self._turns: list[dict[str, Any]] = []
        self.set_system_prompt(system_prompt)

    def set_system_prompt(self, text: str | None) -> None:
        """Begin anew with `text` as the system prompt."""
        self._system = [{"role": "system", "content": text}] if text else []
        self._turns = []

    def clear(self) -> None:
        """Forget the conversation; the system prompt stays."""
        self._turns = []

    def answer(self, message: str) -> AnswerTimes:
        """Write the answer to `message` to stdout as it comes; a message that is refused is not remembered."""
        turns = [*self._turns, {"role": "user", "content": message}]
        prompt = self._template.render([*self._system, *turns])
        stream = AnswerStream(self._engine, prompt, self._params, add_special_tokens=False)
        text = ""
        for delta in stream:
            text += delta
            print(delta, end="", flush=True)
        print(flush=True)
        self._turns = [*turns, {"role": "assistant", "content": text}]
        return stream.times


def _converse(session: Chat, *, shows_stats: bool) -> None:
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 (line editing for `input`, where the platform has it)
    while True:
        try:
            line = input("> " if is_terminal else "").strip()
        except (EOFError, KeyboardInterrupt):
            return
        if line in ("/exit", "/quit"):
            return
        if line.startswith("/"):
            _obey(session, line)
        elif line:
            _answer(session, line, shows_stats=shows_stats)


def _obey(session: Chat, line: str) -> None:
    command, _, rest = line.partition(" ")
    if command == "/clear":
        session.clear()
    elif command == "/system":
        session.set_system_prompt(rest.strip() or None)
    else:
        print(HELP if command == "/help" else f"unknown command {command}: {HELP}", file=sys.stderr)


def _answer(session: Chat, message: str, *, shows_stats: bool) -> None:
    """Answer one message; a conversation that grew too long is reported, not fatal."""
    try:
        times = session.answer(message)
    except QuireClientError as error:
        print(f"error: {error}\nhint: /clear forgets the conversation", file=sys.stderr)
        return
    if shows_stats:
        stopped = " (stopped)" if times.finish_reason == "abort" else ""
        print(f"[{times}{stopped}]", file=sys.stderr, flush=True)
