"""Talk to the model: answers stream as they are made, with their speed after each.

Commands: /clear forgets the conversation, /system TEXT sets the system prompt, /exit ends. Ctrl-C ends an answer,
not the program. Without a terminal, each line of stdin is one message.
"""

from __future__ import annotations

import argparse
import contextlib
import sys

from quire import envs
from quire.entrypoints.cli.conversation import Conversation
from quire.entrypoints.cli.demo_tools import demo_tools
from quire.entrypoints.cli.local_chat import LocalModel
from quire.entrypoints.cli.remote_chat import RemoteModel, remote_parameters
from quire.entrypoints.cli.sampling import add_model_arguments, add_sampling_arguments, sampling_from_args, start_engine
from quire.errors import QuireClientError

TOOLS = {"demo": demo_tools}
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
    group.add_argument(
        "--tools", choices=tuple(TOOLS), help="Tools that the model may call. demo: a calculator and a clock, run here."
    )
    group.add_argument("--no-stats", action="store_true", help="Do not show speed and TTFT after each answer.")


def run(args: argparse.Namespace) -> int:
    """Answer messages until there are no more."""
    tools = TOOLS[args.tools]() if args.tools else None
    if args.url is not None:
        remote = RemoteModel(args.url, args.api_key or envs.api_key(), remote_parameters(args))
        _hold(Conversation(remote, args.system_prompt, tools), remote.name, args)
        return 0
    engine = start_engine(args)
    try:
        params = sampling_from_args(args, engine, max_tokens=None)
        model = LocalModel(engine, params, uses_tools=tools is not None)
        _hold(Conversation(model, args.system_prompt, tools), engine.config.model.served_model_name or "", args)
        return 0
    finally:
        engine.shutdown()


def _hold(conversation: Conversation, name: str, args: argparse.Namespace) -> None:
    if args.quick is not None:
        _answer(conversation, args.quick, shows_stats=not args.no_stats)
        return
    if sys.stdin.isatty():
        print(f"{name}: {HELP}", file=sys.stderr)
    _converse(conversation, shows_stats=not args.no_stats)


def _converse(conversation: Conversation, *, shows_stats: bool) -> None:
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
            _obey(conversation, line)
        elif line:
            _answer(conversation, line, shows_stats=shows_stats)


def _obey(conversation: Conversation, line: str) -> None:
    command, _, rest = line.partition(" ")
    if command == "/clear":
        conversation.clear()
    elif command == "/system":
        conversation.set_system_prompt(rest.strip() or None)
    else:
        print(HELP if command == "/help" else f"unknown command {command}: {HELP}", file=sys.stderr)


def _answer(conversation: Conversation, message: str, *, shows_stats: bool) -> None:
    """Answer one message; a conversation that grew too long is reported, not fatal."""
    try:
        times = conversation.answer(message)
    except QuireClientError as error:
        print(f"error: {error}\nhint: /clear forgets the conversation", file=sys.stderr)
        return
    if shows_stats:
        stopped = " (stopped)" if times.finish_reason == "abort" else ""
        print(f"[{times}{stopped}]", file=sys.stderr, flush=True)
