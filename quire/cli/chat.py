"""Talk to the model: answers stream as they are made, with their speed after each.

/help lists the commands. Ctrl-C stops generation, not the program. Without a terminal, each line of stdin is one
message.
"""

from __future__ import annotations

import argparse
import os
import sys

from quire import envs
from quire.cli import common
from quire.cli.chat_commands import ChatCommands
from quire.cli.chat_input import ChatInput, history_file
from quire.cli.conversation import ChatModel, Conversation
from quire.cli.demo_tools import demo_tools
from quire.cli.local_chat import LocalModel
from quire.cli.remote_chat import RemoteModel, remote_parameters
from quire.cli.sampling import add_model_arguments, add_sampling_arguments, sampling_from_args, start_engine
from quire.cli.serve import chosen_model
from quire.errors import QuireClientError, ValidationError

EXIT_FAILED = 1
DIM, PLAIN = "\x1b[2m", "\x1b[0m"
TOOLS = {"demo": demo_tools}
HELP = (
    '/help lists the commands, """ begins and ends a message of several lines, Ctrl-C stops generation, Ctrl-D the chat'
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's flags."""
    parser.add_argument("model_argument", nargs="?", metavar="MODEL", help="As --model.")
    add_sampling_arguments(parser)
    add_model_arguments(parser)
    parser.conflict_handler = "resolve"  # here -q asks a question; --quantization keeps its long name
    group = add_conversation_arguments(parser)
    group.add_argument("--quick", "-q", metavar="MESSAGE", help="Answer one message and exit.")
    group.add_argument(
        "--url", metavar="URL", help="Talk to a server, such as http://127.0.0.1:8000/v1, instead of loading a model."
    )
    group.add_argument("--model-name", metavar="NAME", help="As --model; with --url one of the server's models.")
    group.add_argument(
        "--api-key", metavar="KEY", help="API key for --url; default: the environment variable QUIRE_API_KEY."
    )


def add_conversation_arguments(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add the flags of a conversation wherever the model is; returns their group."""
    group = parser.add_argument_group("conversation")
    group.add_argument("--system-prompt", metavar="TEXT", help="System prompt.")
    group.add_argument(
        "--tools", choices=tuple(TOOLS), help="Tools that the model may call. demo: a calculator and a clock, run here."
    )
    group.add_argument("--no-stats", action="store_true", help="Do not show speed and TTFT after each reply.")
    return group


def print_config(args: argparse.Namespace) -> int:
    """Show the engine's settings; returns the exit status."""
    _take_model(args)
    return common.print_config(args)


def run(args: argparse.Namespace) -> int:
    """Answer messages until there are no more."""
    _take_model(args)
    if args.quick is not None and not args.quick.strip():
        raise ValidationError("--quick is empty", hint='pass a message: quire chat -q "Hello"', field="quick")
    if args.url is not None:
        model = getattr(args, "model", None)
        remote = RemoteModel(args.url, args.api_key or envs.api_key(), remote_parameters(args), model)
        return hold_chat(remote, remote.name, args, args.quick)
    engine = start_engine(args)
    try:
        params = sampling_from_args(args, engine, max_tokens=None)
        model = LocalModel(engine, params, uses_tools=bool(args.tools))
        return hold_chat(model, engine.config.model.served_model_name or "", args, args.quick)
    finally:
        engine.shutdown()


def hold_chat(model: ChatModel, name: str, args: argparse.Namespace, message: str | None) -> int:
    """Answer `message`, or all that are typed; returns the exit status.

    Args:
        name: of the model.
        args: of the conversation's flags.
    """
    tools = TOOLS[args.tools]() if args.tools else None
    chat = Chat(Conversation(model, args.system_prompt, tools), name, shows_stats=not args.no_stats)
    if message is not None:
        return 0 if chat.answer(message) else EXIT_FAILED
    chat.hold()
    return 0


def _take_model(args: argparse.Namespace) -> None:
    """The positional model is --model."""
    named = getattr(args, "model", args.model_name)
    vars(args).update({} if named is None else {"model": named}, **chosen_model(args, named))


class Chat:
    """A chat with a person or a file of lines.

    Args:
        conversation: with the model.
        name: of the model.
        shows_stats: speed and TTFT after each reply.
    """

    def __init__(self, conversation: Conversation, name: str, *, shows_stats: bool) -> None:
        self._conversation = conversation
        self._name = name
        self._shows_stats = shows_stats
        self._commands = ChatCommands(conversation, self.answer)

    def hold(self) -> None:
        """Answer all messages that are typed."""
        with ChatInput(history_file()) as typed:
            if typed.is_terminal:
                _tell(f"{self._name}: {HELP}")
            for message in typed.messages():
                if not message.startswith("/"):
                    self.answer(message)
                elif not self._commands.run(message):
                    return

    def answer(self, message: str | None) -> bool:
        """Answer one message; False = it was refused, as when the conversation has grown too long, and reported."""
        try:
            times = self._conversation.answer(message)
        except QuireClientError as error:
            print(f"error: {error.message}\nhint: /clear forgets the conversation", file=sys.stderr)
            return False
        if self._shows_stats:
            _tell(f"[{times}{' (stopped)' if times.finish_reason == 'abort' else ''}]")
        return True


def _tell(text: str) -> None:
    """Write about the chat, not of it: to stderr, dim on a terminal that has colours."""
    has_colours = sys.stderr.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    print(f"{DIM}{text}{PLAIN}" if has_colours else text, file=sys.stderr, flush=True)
