"""Serve a model and talk to it: the server of quire serve on a free port of this machine, and the chat of quire chat.

    quire run leaf
    quire run Qwen/Qwen3-0.6B "Why is the sky blue?"
    git diff | quire run Qwen/Qwen3-0.6B
    quire run leaf --no-chat --port 8000

With a prompt, or text on stdin, one answer is written and the program ends. Other programs can use the server
meanwhile; its address is shown at the start.
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from types import FrameType, TracebackType
from typing import NoReturn

from quire import envs
from quire.cli import serve
from quire.cli.chat import add_conversation_arguments, hold_chat
from quire.cli.remote_chat import RemoteModel, remote_parameters
from quire.cli.sampling import add_sampling_arguments
from quire.cli.serve_models import add_models_argument
from quire.config.build import SERVER_SECTIONS
from quire.config.server import ServerConfig
from quire.entrypoints.args import add_engine_arguments
from quire.errors import ChatTemplateError, ConfigError, QuireServerError, ValidationError
from quire.logger import configure_logging
from quire.utils.phases import PhaseTimer

FREE_PORT = 0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's flags."""
    parser.add_argument("model_argument", nargs="?", metavar="MODEL", help="As --model.")
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="Answer this, and end. Without a terminal: stdin.")
    add_conversation_arguments(parser).add_argument(
        "--no-chat", action="store_true", help="Serve until a signal ends it, as quire serve does, on a free port."
    )
    add_sampling_arguments(parser)
    add_models_argument(parser)
    add_engine_arguments(parser, also=SERVER_SECTIONS)


def print_config(args: argparse.Namespace) -> int:
    """Show the settings of engine and server; returns the exit status."""
    return serve.print_config(args)


def run(args: argparse.Namespace) -> int:
    """Serve and chat; returns the exit status."""
    timer = PhaseTimer("python and imports")
    level = "INFO" if args.no_chat else envs.log_level("WARNING")
    configure_logging(level)
    defaults = {"port": FREE_PORT, "log_level": level.lower()}
    if args.no_chat:
        return serve.serve_until_signal(serve.start_from_args(args, timer, **defaults))
    key = _own_key(serve.settings_from_args(args, **defaults)[1])
    message = _message(args.prompt)
    started = serve.start_from_args(args, timer, **defaults)
    try:
        if args.models is None and getattr(started.engine, "chat_template", None) is None:
            raise ChatTemplateError(
                "this model has no chat template", hint="pass one with --chat-template, or use quire generate --raw"
            )
        with ServerThread(started) as address:
            model = RemoteModel(address, key, remote_parameters(args))
            return hold_chat(model, f"{model.name} at {address}/v1", args, message)
    finally:
        started.engine.shutdown()


class ServerThread:
    """A server in a thread of its own, from entering to leaving; on entering, its address.

    The main thread keeps Ctrl-C for the chat; SIGTERM ends the chat, and so the server.
    """

    def __init__(self, started: serve.StartedServer) -> None:
        self._started = started
        self._thread = threading.Thread(target=self._serve, name="server")
        self._is_listening = threading.Event()
        self._address = ""
        self._error: BaseException | None = None

    def __enter__(self) -> str:
        signal.signal(signal.SIGTERM, _exit)
        self._thread.start()
        self._is_listening.wait()
        if not self._address:
            self._thread.join()
            raise self._error or QuireServerError("the server ended before it was listening")
        return self._address

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._started.server.begin_drain()
        try:
            self._thread.join()
        except KeyboardInterrupt:  # answers to other programs still run: a second Ctrl-C cuts them
            self._started.server.force_exit = self._started.server.should_exit = True
            self._thread.join()

    def _serve(self) -> None:
        try:
            self._started.run(self._listening)
        except BaseException as error:
            self._error = error
            raise
        finally:
            self._is_listening.set()

    def _listening(self, address: str) -> None:
        self._address = address
        self._is_listening.set()


def _exit(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def _own_key(server: ServerConfig) -> str | None:
    """The key that the chat shows to the server; None = it asks for none.

    Raises:
        ConfigError: the chat cannot reach a server with these settings.
    """
    http, api = server.http, server.api
    for name, value in (("uds", http.uds), ("ssl_certfile", http.ssl_certfile)):
        if value is not None:
            raise ConfigError(f"quire run does not chat over {name}", hint="use quire serve, or --no-chat", field=name)
    key = next(iter((*api.api_key, *envs.api_keys())), None)
    if key is None and api.api_key_file is not None:
        raise ConfigError(
            "the chat needs one of the keys in api_key_file", hint="set QUIRE_API_KEY to it, or use --no-chat",
            field="api_key_file",
        )  # fmt: skip
    return key


def _message(prompt: str | None) -> str | None:
    """The one message to be answered: the prompt, or all of a stdin that is no terminal; None = a chat."""
    if prompt is None and sys.stdin.isatty():
        return None
    message = sys.stdin.read() if prompt is None else prompt
    if not message.strip():
        raise ValidationError(
            "no prompt given", hint="pass one after the model or on stdin, or use --no-chat", field="prompt"
        )
    return message.strip()
