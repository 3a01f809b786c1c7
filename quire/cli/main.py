"""The `quire` command: finds the subcommand, imports its module, and prints errors without a traceback.

A subcommand's module has `add_arguments(parser)` and `run(args) -> int`. Nothing heavy is imported before one
is chosen, so `quire --help` is immediate. No state.
"""

from __future__ import annotations

import importlib
import io
import os
import sys
from collections.abc import Sequence
from types import ModuleType

from quire.version import __version__

COMMANDS: dict[str, tuple[str, str]] = {
    "demo": ("quire.cli.demo", "run eight prompts at once with the embedded model"),
    "run": ("quire.cli.run", "serve a model and talk to it, in one command"),
    "serve": ("quire.cli.serve", "an OpenAI-compatible HTTP server"),
    "dynamo": ("quire.cli.dynamo", "a worker of an NVIDIA Dynamo deployment"),
    "generate": ("quire.cli.generate", "generate from prompts on the command line, in a file or on stdin"),
    "run-batch": ("quire.cli.run_batch", "run a file of requests (resumable)"),
    "chat": ("quire.cli.chat", "talk to the model"),
    "pull": ("quire.cli.pull", "download a model from the hub"),
    "list": ("quire.cli.list", "list the downloaded models"),
    "rm": ("quire.cli.rm", "remove downloaded models"),
    "cache": ("quire.cli.cache", "list, verify and clear a directory of KV-cache blocks"),
    "inspect": ("quire.cli.inspect", "describe a model, and say whether it runs on this machine"),
    "bench latency": ("quire.cli.bench_latency", "time one batch from prompt to last token"),
    "bench throughput": ("quire.cli.bench_throughput", "tokens per second over many requests"),
    "bench serve": ("quire.cli.bench_serve", "throughput and latencies of a running server under load"),
    "bench scheduler": ("quire.cli.bench_scheduler", "time the control plane alone, without a model"),
    "top": ("quire.cli.top", "what a running server does, live"),
    "report": ("quire.cli.report", "what somebody needs who looks into a problem, as one archive"),
    "profile summary": ("quire.cli.profile_summary", "a table of a profile: time by kernel"),
    "usage": ("quire.cli.usage", "tokens by day, tenant, key and model, as CSV or JSON"),
    "weights update": ("quire.cli.weights_update", "new weights for a running server, without losing a request"),
    "weights show": ("quire.cli.weights_show", "which weights each replica of a running server has"),
    "doctor": ("quire.cli.doctor", "what will be slow or fail here, and the fix"),
    "replay": ("quire.cli.replay", "replay a flight recording and show why requests waited"),
    "plan": ("quire.cli.plan", "capacity planning by simulation"),
    "collect-env": ("quire.cli.collect_env", "describe this machine and installation"),
    "plugins": ("quire.cli.plugins", "list installed plugins"),
    "connector-check": ("quire.cli.connector_check", "try whether a KV connector keeps its contract"),
    "completion": ("quire.cli.completion", "print a shell completion script"),
}
# How a front end of vLLM's starts an engine: as Python's arguments, before those of `vllm`, which are this program's.
AS_PYTHON = ["-m", "vllm.entrypoints.cli.main"]
EXIT_ERROR = 2
EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status.

    Args:
        argv: arguments without the program's name; default: those of the process.
    """
    try:
        return _run_guarded(list(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader went away; keep the interpreter from failing again when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _run_guarded(argv: list[str]) -> int:
    """Run the command line; errors are reported in words, as is what the terminal cannot show."""
    from quire.errors import QuireError  # late, as every import here: Ctrl-C meanwhile is caught by `main`

    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="strict")  # where it is not, wrong bytes would come as halves of characters
    try:
        return _run(argv)
    except QuireError as error:
        print(f"error: {error}", file=sys.stderr)
    except UnicodeDecodeError as error:
        print(
            f"error: the input is not {error.encoding}: byte {error.object[error.start]:#04x}\n"
            "hint: convert it to UTF-8, or set PYTHONIOENCODING to its encoding", file=sys.stderr,
        )  # fmt: skip
    return EXIT_ERROR


def _run(argv: list[str]) -> int:
    if argv[:2] == AS_PYTHON:
        argv = argv[2:]
    if argv[:1] == ["help"]:
        argv = [*argv[1:], "--help"]
    if not argv or argv[0] in ("-h", "--help"):
        print(_overview())
        return 0
    if argv[0] in ("-v", "-V", "--version", "version"):
        print(f"quire {__version__}")
        return 0
    name, rest = _split_command(argv)
    if not name:
        return 0
    return _run_command(name, rest)


def _split_command(argv: list[str]) -> tuple[str, list[str]]:
    """(command, its arguments); ("", []) when help for a family of commands was printed."""
    from quire.errors import unknown_name
    from quire.utils.other_names import BENCHMARKS as BENCHMARKS_ELSEWHERE
    from quire.utils.other_names import COMMANDS as COMMANDS_ELSEWHERE

    for words in (2, 1):
        name = " ".join(argv[:words])
        if name in COMMANDS and len(argv) >= words:
            return name, argv[words:]
    family = [command for command in COMMANDS if command.startswith(f"{argv[0]} ")]
    if not family:
        kind = "flag" if argv[0].startswith("-") else "command"
        raise unknown_name(kind, argv[0], _first_words(), elsewhere=COMMANDS_ELSEWHERE)
    if len(argv) == 1 or argv[1] in ("-h", "--help"):
        print(_overview(family))
        return "", []
    names = [command.split()[1] for command in family]
    raise unknown_name(f"{argv[0]} command", argv[1], names, elsewhere=BENCHMARKS_ELSEWHERE)


def _run_command(name: str, argv: list[str]) -> int:
    # Imported here so that `quire --help` and `--version` do not pay for the configuration.
    from quire.entrypoints.args import QuireParser

    module = importlib.import_module(COMMANDS[name][0])
    parser = QuireParser(prog=f"quire {name}", description=_description(module))
    module.add_arguments(parser)
    args = parser.parse_args(argv)
    if getattr(args, "print_config", False):
        from quire.cli import common

        return int(getattr(module, "print_config", common.print_config)(args))
    return int(module.run(args))


def _first_words() -> list[str]:
    return sorted({command.split()[0] for command in COMMANDS} | {"--help", "--version"})


def _description(module: ModuleType) -> str:
    return (module.__doc__ or "").strip().split("\n\n")[0]


def _overview(commands: Sequence[str] = tuple(COMMANDS)) -> str:
    width = max(map(len, commands))
    lines = [f"  {name:<{width}}  {COMMANDS[name][1]}" for name in commands]
    return "\n".join(
        [
            "usage: quire COMMAND [options]",
            "",
            "commands:",
            *lines,
            "",
            "`quire COMMAND --help` shows the options of a command; `quire --version` the version.",
        ]
    )
